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
    lines = _parts(path, title)[1].strip().splitlines()
    write(path, title, list({line.split("|")[1]: line for line in [*lines, row]}.values()))


def _parts(path: Path, title: str) -> tuple[str, str, str]:
    """What stands up to the first marker, between both, and from the second one on."""
    begin, end = f"<!-- counted: {title} -->", f"<!-- end of {title} -->"
    before, found, rest = path.read_text().partition(begin)
    between, closed, after = rest.partition(end)
    assert found and closed, f"{path} lacks {begin} and {end}"
    return before + begin, between, end + after
