"""The parts of docs/gpu.md that tests write: each between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write(path: Path, title: str, lines: Sequence[str]) -> None:
    """Put lines in place of those that stand between the markers of that title."""
    before, _, after = _parts(path, title)
    path.write_text("\n".join([before, "", *lines, "", after]))


def write_row(path: Path, title: str, row: str) -> None:
    """Put a row of the table in place of the one with the same first cell, or below all others."""
    lines, first = _parts(path, title)[1].strip().splitlines(), row.split("|")[1]
    same = [index for index, line in enumerate(lines) if line.split("|")[1] == first]
    place = same[0] if same else len(lines)
    write(path, title, [*lines[:place], row, *lines[place + len(same) :]])


def _parts(path: Path, title: str) -> tuple[str, str, str]:
    """What stands up to the first marker, between both, and from the second one on."""
    begin, end = f"<!-- counted: {title} -->", f"<!-- end of {title} -->"
    before, found, rest = path.read_text().partition(begin)
    between, closed, after = rest.partition(end)
    assert found and closed, f"{path} lacks {begin} and {end}"
    return before + begin, between, end + after
