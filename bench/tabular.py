"""Tables of texts: aligned for pipes and terminals, in Markdown, and in HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from bench.formatting import markdown

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Texts under headings."""

    columns: Sequence[TableColumn]
    rows: Sequence[TableRow]
    caption: str = ""

    @classmethod
    def from_rows(
        cls, header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = (), caption: str = ""
    ) -> Table:
        """A table of plain rows; ``numbers`` are the places of the columns that hold numbers."""
        columns = [TableColumn(str(place), title, place in numbers) for place, title in enumerate(header)]
        keys = [column.key for column in columns]
        texts = [TableRow(dict(zip(keys, row, strict=True))) for row in rows]
        return cls(columns=columns, rows=texts, caption=caption)

    def text(self) -> str:
        """Aligned columns without the caption, as wide as they need."""
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self._lines(math.inf))

    def show(self, console: Console) -> None:
        """Print the caption, and as many columns as the terminal has room for, with their styles."""
        from rich.text import Text

        for line in ([(self.caption, "italic")], *self._lines(console.width), []):
            console.print(Text.assemble(*line), soft_wrap=True)

    def _lines(self, width: float) -> Iterator[list[tuple[str, str]]]:
        """Lines of at most so many characters, if columns can be left out or the first can be folded.

        Each line is the texts of its columns with their styles.
        """
        titles = {column.key: column.title for column in self.columns}
        rows = [TableRow(titles, dict.fromkeys(titles, "bold")), *self.rows]
        widths = {key: max(len(row.texts.get(key, "")) for row in rows) for key in titles}
        shown = list(self.columns)
        while (over := sum(widths[column.key] + len(GAP) for column in shown) - len(GAP) - width) > 0:
            spare = max(shown, key=lambda column: column.drop)
            if not spare.drop:
                break
            shown.remove(spare)
        first, *others = shown
        room = widths[first.key] - int(max(over, 0))
        room = room if room >= LEAST else max(widths[first.key], 1)
        for row in rows:
            name = row.texts[first.key]
            for start in range(0, len(name) or 1, room):
                line = [(f"{name[start : start + room]:{room}}", row.styles.get(first.key, ""))]
                for column in others:
                    text = "" if start else row.texts.get(column.key, "")
                    side = ">" if column.is_number else "<"
                    line.append((f"{GAP}{text:{side}{widths[column.key]}}", row.styles.get(column.key, "")))
                yield line

    def markdown(self, *, is_markup: bool = False) -> list[str]:
        """The lines, and an empty one after them; with ``is_markup``, the texts are Markdown already."""
        form = _in_cell if is_markup else markdown
        rules = ["---:" if column.is_number else "---" for column in self.columns]
        lines = [[form(column.title) for column in self.columns], rules]
        lines += [[form(row.texts.get(column.key, "")) for column in self.columns] for row in self.rows]
        return [*(f"| {' | '.join(line)} |" for line in lines), ""]

    def html(self, key: str) -> Markup:
        """The table in a region that scrolls; its id is ``key``, and that of its caption ``key``-caption."""
        return Markup(_template().render(table=self, key=key))


@cache
def _template() -> Template:
    from jinja2 import Environment

    source = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()) -> list[str]:
    """The lines of a table of texts that are Markdown already (``Table.from_rows``), and an empty one after them."""
    return Table.from_rows(header, rows, numbers).markdown(is_markup=True)


def _in_cell(text: str) -> str:
    """Markdown in one line that ends no cell."""
    return " ".join(BARE_PIPE.sub(r"\|", text).split())
