"""Types of options that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from bench.backends.base import register
from bench.errors import InputError

SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
"""Seconds per unit of time."""


def split_names(text: str) -> list[str]:
    """The names in a comma-separated list, without empty ones."""
    return [name.strip() for name in text.split(",") if name.strip()]


def backend_names(text: str) -> list[str]:
    """The names in a comma-separated list; ``module:Class`` is loaded, and from then on known by its own name."""
    try:
        return [register(name) if ":" in name else name for name in split_names(text)]
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def integer_to(largest: int) -> Callable[[str], int]:
    """A parser of integers from 1 to ``largest``, which has at most nine digits."""

    def read(text: str) -> int:
        number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else 0
        if not 1 <= number <= largest:
            raise argparse.ArgumentTypeError(f"'{text}' is not an integer from 1 to {largest}")
        return number

    return read


def share(text: str) -> float:
    """0.05 for ``5%`` or ``0.05``. A number of 1 or more without a sign is refused: it may be meant as per cent."""
    words = text.strip()
    try:
        number = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 on, such as 5% or 0.05")
    if number >= 1 and not words.endswith("%"):
        raise argparse.ArgumentTypeError(f"'{text}' has no unit; write {words}%, or a share below 1 such as 0.05")
    return number


def duration(text: str) -> float:
    """Seconds for ``90s``, ``20m``, ``20 min`` or ``1.5h``. A number without a unit is refused as ambiguous."""
    words = text.strip()
    name = words.lstrip("0123456789.eE+-").strip()
    unit = SECONDS.get(name)
    try:
        number = float(words.removesuffix(name)) if unit else math.nan
    except ValueError:
        number = math.nan
    if unit is None or not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"'{text}' is not a time above 0 with its unit, such as 90s, 20m or 1h")
    return number * unit
