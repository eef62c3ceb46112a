"""The part of docs/gpu.md that tests write: between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write(path: Path, title: str, lines: Sequence[str]) -> None:
    """Put lines in place of those that stand between the markers of that title."""
    begin, end = f"<!-- counted: {title} -->", f"<!-- end of {title} -->"
    before, found, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    assert found and closed, f"{path} lacks {begin} and {end}"
    path.write_text("\n".join([before + begin, "", *lines, "", end + after]))
