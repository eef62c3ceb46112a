"""A neutral bench for gradient accumulation: what each backend costs, and what it really did."""

__version__ = "0.1.0"
