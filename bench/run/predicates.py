"""Whether a value that comes from a file is what it should be: small checks, and checks made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]


def text(value: Any) -> bool:
    """Whether it is a string."""
    return isinstance(value, str)


def boolean(value: Any) -> bool:
    """Whether it is true or false."""
    return isinstance(value, bool)


def integer(value: Any) -> bool:
    """Whether it is an integer from 0 on that a table can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def number(value: Any) -> bool:
    """Whether it is a number; NaN and infinity too."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def seconds(value: Any) -> bool:
    """Whether it is a finite number from 0 on."""
    return number(value) and math.isfinite(value) and value >= 0


def or_none(check: Check) -> Check:
    """A check that lets None pass too."""
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    """A check of lists all of whose items pass another."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def table_of(check: Check, *needed: str) -> Check:
    """A check of tables all of whose values pass another, and that have some keys."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values())) and value.keys() >= set(needed)


def table(**checks: Check) -> Check:
    """A check of tables whose values pass the check of their key; keys may be missing, and others may be there."""
    return lambda value: (
        isinstance(value, dict) and all(check(value[key]) for key, check in checks.items() if key in value)
    )


def anything(value: Any) -> bool:
    """True."""
    return True
