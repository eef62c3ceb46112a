"""A neutral bench for gradient accumulation: what each backend costs, and what it really did."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from bench.judge.frames import Frames

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def load(run: str | Path) -> Frames:
    """The frames of a run's folder: cells, trials, steps, losses, collectives, memory, ratios; attributes and items.

    ``python -m bench export RUN`` shows their columns with dtypes and units. Raises bench.errors.InputError for what is
    no run.
    """
    from bench.judge.frames import read

    return read(run)
