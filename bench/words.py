"""Numbers with their nouns, and lists of names."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMES = 4
"""Names in one sentence."""


def plural(count: int, noun: str, ending: str = "s") -> str:
    """A count with its noun: ``1 repeat``, ``12 repeats``; ``ending`` is what the noun gets if it is not one."""
    return f"{count} {noun}{'' if count == 1 else ending}"


def some(names: Sequence[str]) -> str:
    """The first MOST_NAMES names, and how many more there are."""
    left = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {left} more" if left > 0 else "")
