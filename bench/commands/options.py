"""Values of options that several commands read alike."""

from __future__ import annotations


def split_names(text: str) -> list[str]:
    """The names in a list with commas; empty ones are left out."""
    return [name.strip() for name in text.split(",") if name.strip()]
