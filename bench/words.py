"""Numbers with their nouns."""

from __future__ import annotations


def plural(count: int, noun: str, ending: str = "s") -> str:
    """A count with its noun: ``1 repeat``, ``12 repeats``; ``ending`` is what the noun gets if it is not one."""
    return f"{count} {noun}{'' if count == 1 else ending}"
