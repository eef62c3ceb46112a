"""What tests write to results/gpu-stub: what was counted in windows, and how far values are from the CPU's."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conftest import ROOT

WAITS = ROOT / "results" / "gpu-stub" / "waits.csv"
VALUES = WAITS.with_name("values.csv")


def write_values(row: Mapping[str, str]) -> None:
    """Put a row in place of the one with the same options, or below all others."""
    rows = {each["options"]: each for each in _read(VALUES)}
    rows[row["options"]] = dict(row)
    _write(VALUES, list(rows.values()))


def write_waits(world_size: int, rows: Sequence[Mapping[str, str]]) -> None:
    """Put rows in place of those of the same number of GPUs."""
    others = [row for row in _read(WAITS) if row["world_size"] != str(world_size)]
    every = [*others, *({"world_size": str(world_size), **row} for row in rows)]
    _write(WAITS, sorted(every, key=lambda row: int(row["world_size"])))


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
