"""Where a value of a config stands, and how deep it may."""

from __future__ import annotations

from typing import Any

from bench.errors import InputError

Path = tuple[str, ...]
"""Where a value stands: the keys on the way to it; items of a list by their index."""
MAX_DEPTH = 64
"""Of nested mappings and lists."""


def too_deep(file: str) -> InputError:
    """The error for a text that is nested deeper than MAX_DEPTH, or than its parser can follow."""
    return InputError(f"{file}: is nested more than {MAX_DEPTH} deep; a config must be flatter")


def check_depth(value: Any, file: str) -> None:
    """Raise InputError if mappings and lists are nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise too_deep(file)
