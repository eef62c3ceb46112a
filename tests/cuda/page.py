"""What tests write: a part of docs/gpu.md, between two markers, and the table of waits."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conftest import ROOT

WAITS = ROOT / "results" / "gpu-stub" / "waits.csv"


def write(path: Path, title: str, lines: Sequence[str]) -> None:
    """Put lines in place of those that stand between the markers of that title."""
    before, _, after = _parts(path, title)
    path.write_text("\n".join([before, "", *lines, "", after]))


def write_row(path: Path, title: str, row: str) -> None:
    """Put a row of the table in place of the one with the same first cell, or below all others."""
    lines = _parts(path, title)[1].strip().splitlines()
    write(path, title, list({line.split("|")[1]: line for line in [*lines, row]}.values()))


def _parts(path: Path, title: str) -> tuple[str, str, str]:
    """What stands up to the first marker, between both, and from the second one on."""
    begin, end = f"<!-- counted: {title} -->", f"<!-- end of {title} -->"
    before, found, rest = path.read_text().partition(begin)
    between, closed, after = rest.partition(end)
    assert found and closed, f"{path} lacks {begin} and {end}"
    return before + begin, between, end + after


def write_waits(world_size: int, rows: Sequence[Mapping[str, str]]) -> None:
    """Put rows in place of those of the same number of GPUs."""
    with WAITS.open(newline="", encoding="utf-8") as file:
        others = [row for row in csv.DictReader(file) if row["world_size"] != str(world_size)]
    every = [*others, *({"world_size": str(world_size), **row} for row in rows)]
    with WAITS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(every[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(every, key=lambda row: int(row["world_size"])))
