"""Figures that an earlier report of a run drew and the present one does not: they would tell of cells that are gone."""

from __future__ import annotations

import csv
from collections.abc import Collection
from pathlib import Path

from bench.report.spreadsheet import guarded

SUFFIXES = (".png", ".svg", ".csv")
"""Of the files of one figure; the last has its data."""


def kind_of(stem: str) -> str:
    """The name of a figure without the number of its page: ``noise`` of ``noise`` and of ``noise-2``."""
    name, _, page = stem.rpartition("-")
    return name if name and page.isdecimal() else stem


def remove_leftovers(folder: Path, run_id: str, kinds: Collection[str], drawn: Collection[Path]) -> list[Path]:
    """Remove the figures of this run and of these kinds that are not among the files drawn; returns their paths.

    A figure is three files, the last of which names the run or its cells. All else in the folder may be a user's, and
    stays. Raises OSError if a file cannot be read or removed.
    """
    removed = []
    for data in sorted(folder.glob("*" + SUFFIXES[-1])):
        files = [data.with_suffix(suffix) for suffix in SUFFIXES]
        if kind_of(data.stem) not in kinds or not set(files).isdisjoint(drawn):
            continue
        if all(map(Path.is_file, files)) and _is_of(data, run_id):
            for path in files:
                path.unlink()
            removed += files
    return removed


def _is_of(data: Path, run_id: str) -> bool:
    """Whether the first row is one of the run; a row of ratios names no run but its two cells."""
    try:
        with data.open(encoding="utf-8", errors="replace", newline="") as lines:
            first = next(csv.DictReader(lines), {})
    except csv.Error:
        return False
    return first.get("run_id") == guarded(run_id) or {"cell_id_a", "cell_id_b"} <= set(first)
