"""Tables of texts: aligned for pipes and terminals, in Markdown, and in HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from bench.formatting import markdown, printable

if TYPE_CHECKING:
    from jinja2 import Template
    from rich.console import Console

GAP = "  "
"""Between aligned columns."""
LEAST = 12
"""Characters that a folded first column has at least."""
BARE_PIPE = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of a table."""

    key: str
    title: str
    is_number: bool = True
    drop: int = 0
    """In which order a narrow terminal leaves columns out: the largest number first, 0 never."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row; texts, styles and values are by the keys of the columns."""

    texts: Mapping[str, str]
    """``markupsafe.Markup`` is HTML already."""
    styles: Mapping[str, str] = field(default_factory=dict)
    """Rich's on a terminal, classes in HTML."""
    values: Mapping[str, object] = field(default_factory=dict)
    """By which a script may sort the rows in HTML; None is unknown."""
    attributes: Mapping[str, object] = field(default_factory=dict)
    """In HTML, of the row, or of all rows below a heading; those that are None are left out."""
    is_heading: bool = False
    """Whether its text in the first column is a heading of the rows below."""

    def __post_init__(self) -> None:
        texts = {
            key: text if isinstance(text, Markup) else printable(text)
            for key, text in self.texts.items()
        }
        object.__setattr__(self, "texts", texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Texts under headings."""

    columns: Sequence[TableColumn]
    rows: Sequence[TableRow]
    caption: str = ""

    @classmethod
    def from_rows(
        cls,
        header: Sequence[str],
        rows: Iterable[Sequence[str]],
        numbers: Collection[int] = (),
        caption: str = "",
    ) -> Table:
        """A table of plain rows; ``numbers`` are the places of the columns that hold numbers."""
        columns: list[TableColumn] = []
        for place, title in enumerate(header):
            columns.append(TableColumn(str(place), title, is_number=place in numbers))
        keys = [column.key for column in columns]
        texts = [TableRow(dict(zip(keys, row, strict=True))) for row in rows]
        return cls(columns=columns, rows=texts, caption=caption)

    def text(self) -> str:
        """Aligned columns without the caption, as wide as they need."""
        lines = []
        for pieces in self._lines(math.inf):
            texts = [text for text, _ in pieces]
            lines.append("".join(texts).rstrip())
        return "\n".join(lines)

    def show(self, console: Console) -> None:
        """Print the caption, and as many columns as the terminal has room for, in their styles."""
        from rich.text import Text

        for line in ([(self.caption, "italic")], *self._lines(console.width), []):
            console.print(Text.assemble(*line), soft_wrap=True)

    def _lines(self, width: float) -> Iterator[list[tuple[str, str]]]:
        """Lines of at most so many characters: the texts of their columns with their styles.

        They can be longer if no column can be left out, and the first cannot be folded.
        """
        titles = {column.key: column.title for column in self.columns}
        rows = [TableRow(titles, dict.fromkeys(titles, "bold")), *self.rows]
        widths = dict.fromkeys(titles, 0)
        for row in rows:
            for key in titles:
                widths[key] = max(widths[key], len(row.texts.get(key, "")))
        first, *others = self._fitting(widths, width)
        missing = _width([first, *others], widths) - width
        room = max(widths[first.key], 1)
        if missing > 0 and room - missing >= LEAST:
            room -= int(missing)
        for row in rows:
            name = row.texts[first.key]
            style = row.styles.get(first.key, "")
            line = [(f"{name[:room]:{room}}", style)]
            for column in others:
                text = _aligned(row.texts.get(column.key, ""), column, widths)
                line.append((text, row.styles.get(column.key, "")))
            yield line
            for start in range(room, len(name), room):
                line = [(f"{name[start : start + room]:{room}}", style)]
                for column in others:
                    line.append((_aligned("", column, widths), row.styles.get(column.key, "")))
                yield line

    def _fitting(self, widths: Mapping[str, int], width: float) -> list[TableColumn]:
        """The columns for which so many characters have room, or all that are never left out."""
        shown = list(self.columns)
        while _width(shown, widths) > width:
            spare = max(shown, key=lambda column: column.drop)
            if not spare.drop:
                break
            shown.remove(spare)
        return shown

    def markdown(self, *, is_markup: bool = False) -> list[str]:
        """The lines, and an empty one after them.

        With ``is_markup``, the texts are Markdown already.
        """
        form: Callable[[str], str] = markdown
        if is_markup:
            form = _in_cell
        titles = [form(column.title) for column in self.columns]
        rules = list(map(_rule, self.columns))
        lines = [_markdown_line(titles), _markdown_line(rules)]
        for row in self.rows:
            texts = [form(row.texts.get(column.key, "")) for column in self.columns]
            lines.append(_markdown_line(texts))
        return [*lines, ""]

    def html(self, key: str) -> Markup:
        """The table in a region that scrolls.

        Its id is ``key``, and that of its caption ``key``-caption.
        """
        return Markup(_template().render(table=self, key=key))


def _width(columns: Sequence[TableColumn], widths: Mapping[str, int]) -> int:
    """Characters of a line."""
    return sum(widths[column.key] for column in columns) + len(GAP) * (len(columns) - 1)


def _aligned(text: str, column: TableColumn, widths: Mapping[str, int]) -> str:
    """A text after the gap before its column."""
    if column.is_number:
        return f"{GAP}{text:>{widths[column.key]}}"
    return f"{GAP}{text:<{widths[column.key]}}"


def _rule(column: TableColumn) -> str:
    if column.is_number:
        return "---:"
    return "---"


def _markdown_line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


@cache
def _template() -> Template:
    from jinja2 import Environment

    source = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()
) -> list[str]:
    """The lines of a table of texts that are Markdown already, and an empty one after them.

    The arguments are those of ``Table.from_rows``.
    """
    return Table.from_rows(header, rows, numbers).markdown(is_markup=True)


def _in_cell(text: str) -> str:
    """Markdown in one line that ends no cell."""
    return " ".join(BARE_PIPE.sub(r"\|", text).split())
