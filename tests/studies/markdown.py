"""Tables of the pages that tests write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, and an empty one after it."""
    return [
        f"| {' | '.join(header)} |",
        "|" + " --- |" * len(header),
        *(f"| {' | '.join(map(cell, row))} |" for row in rows),
        "",
    ]


def cell(text: str) -> str:
    """The text in one line, which ends no cell."""
    return " ".join(text.replace("|", r"\|").split())
