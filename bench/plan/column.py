"""What a column is: its dtype, unit and meaning, how tables show it, and how a cell's value comes from its trials."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from bench.formatting import size

DASH = "-"
"""Shown for a value that is unknown or does not apply."""


class Axis(IntEnum):
    """The role of a cell's field, in the order in which titles list them."""

    WORK = 1
    """What a step trains: equal in cells that are compared, and in a cell and its reference."""
    WAY = 2
    """An option of how the backend trains it."""
    NAME = 3
    """Part of every cell's label."""


class Over(StrEnum):
    """How the value of a cell comes from those of its trials."""

    FIRST = "first"
    """All trials have the same: the first that is known."""
    MEDIAN = "median"
    """The median of the good trials, or of all if none is good."""
    MAX = "max"
    """The largest of all trials."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a frame."""

    dtype: str
    """Nullable pandas dtype."""
    unit: str
    """Empty if the column has none."""
    meaning: str
    axis: Axis | None = None
    """None if the column is not a field of a cell."""
    source: str = ""
    """Where a trial's value is in its record, key by key; empty if it is a field of the cell, or calculated."""
    over: Over | None = None
    """How a cell's value comes from its trials', beside that of an axis, which all share."""
    section: str = ""
    """Key of the page's section whose table of cells has the column; empty if none has."""
    title: str = ""
    """Column heading in tables; empty to use the name."""
    form: str = ""
    """Format specification for numbers in tables."""
    phrasing: tuple[str, ...] = ("{}",)
    """Templates for a value in a title or sentence: the first for false and 0, the last for everything else."""

    @property
    def is_number(self) -> bool:
        return self.dtype in {"Int64", "Float64"}

    @property
    def aggregation(self) -> Over | None:
        """How a cell's value comes from its trials'; None if cells have no such column, or calculate it otherwise."""
        return self.over or (None if self.axis is None else Over.FIRST)

    def shown(self, value: Any) -> str:
        """A value as a table shows it; None is unknown."""
        if value is None:
            return DASH
        if self.dtype == "boolean":
            return "yes" if value else "no"
        if self.unit == "B":
            return size(float(value))
        if self.is_number:
            return format(int(value), self.form) if self.dtype == "Int64" else format(float(value), self.form or "g")
        return str(value) or DASH

    def phrase(self, value: Any) -> str:
        """A value as a title or sentence shows it; None is unknown."""
        return "unknown" if value is None else self.phrasing[-1 if value else 0].format(value)
