"""What the sections of a report are made of: tables of plain words, and how numbers become words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.analysis.baseline import Standing
from bench.analysis.compare import Run
from bench.cell import REFERENCES, Status

DASH = "-"
"""What is not known, or does not apply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of plain words under a header."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    """How many first columns hold words; the others hold numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One question."""

    key: str
    title: str
    sentences: tuple[str, ...]
    plots: tuple[str, ...]
    """Names of figures, without the number of a page: the first that was drawn is shown, the others can be unfolded."""
    table: Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """What sections are made of."""

    run: Run
    standing: Standing
    """Against the run's own baseline."""
    cells: pd.DataFrame
    """A row per cell: ``summary.by_cell``."""

    def label(self, cell_id: str) -> str:
        """The name of a cell."""
        return self.run.cells[cell_id].label

    @property
    def others(self) -> pd.DataFrame:
        """The cells but for the reference; all if there is nothing else."""
        found = self.cells[~self.cells["backend"].isin(REFERENCES)]
        return self.cells if found.empty else found


def table_of(
    caption: str,
    header: Sequence[str],
    cells: pd.DataFrame,
    line: Callable[[Mapping[str, Any]], tuple[str, ...]],
    words: int = 1,
) -> Table:
    """A table with a row per cell."""
    rows: Iterable[Any] = cells.to_dict("records")
    return Table(caption=caption, header=tuple(header), rows=tuple(line(row) for row in rows), words=words)


def status_words(cell: Mapping[str, Any]) -> str:
    """The status, and in how many trials, if it is not good."""
    status = str(cell["status"])
    return status if status == Status.OK else f"{status}, {cell['num_bad']} of {cell['num_trials']}"


def number(value: Any, form: str) -> str:
    """A number, or a dash if there is none."""
    if value is None or pd.isna(value):
        return DASH
    return format(int(value) if form == "d" else float(value), form)


def interval(low: Any, high: Any) -> str:
    """The ends of an interval, or a dash if there is none."""
    return DASH if pd.isna(low) or pd.isna(high) else f"{number(low, '.4g')} - {number(high, '.4g')}"


def scaled(value: Any, unit: float) -> str:
    """A number of units, or a dash."""
    return DASH if value is None or pd.isna(value) else f"{float(value) / unit:,.2f}"


def word(value: Any) -> str:
    """A word, or a dash if there is none."""
    return DASH if pd.isna(value) or value == "" else str(value)


def count(amount: int, noun: str) -> str:
    """A number of things."""
    return f"{amount} {noun}" + ("" if amount == 1 else "s")
