"""Tables of texts: aligned for pipes and terminals, in Markdown, and in HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from bench.formatting import markdown

if TYPE_CHECKING:
    from rich.console import Console

GAP = "  "
"""Between aligned columns."""
LEAST = 12
"""Characters that a folded first column has at least."""
BARE_PIPE = re.compile(r"(?<!\\)\|")
NO_ATTRIBUTES: Mapping[str, object] = {}


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
    """Those that are ``markupsafe.Markup`` are HTML already."""
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

        if self.caption:
            console.print(Text(self.caption, "italic"), soft_wrap=True)
        for line in self._lines(console.width):
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
        rules = ("---:" if column.is_number else "---" for column in self.columns)
        lines = [_markdown_row(form(column.title) for column in self.columns), _markdown_row(rules)]
        for row in self.rows:
            if row.is_heading:
                lines.append(f"| *{form(row.texts[self.columns[0].key])}* |" + " |" * (len(self.columns) - 1))
            else:
                lines.append(_markdown_row(form(row.texts[column.key]) for column in self.columns))
        return [*lines, ""]

    def html(self, key: str) -> Markup:
        """The table in a region that scrolls; its id is ``key``, and that of its caption ``key``-caption."""
        caption_id, sortable = f"{key}-caption", {name for row in self.rows for name in row.values}
        head = Markup()
        for column in self.columns:
            attributes = {"scope": "col", "class": "number" if column.is_number else None}
            attributes["data-key"] = column.key if column.key in sortable else None
            head += _element("th", column.title, attributes)
        bodies: list[tuple[Mapping[str, object], list[Markup]]] = []
        for row in self.rows:
            if row.is_heading or not bodies:
                bodies.append((row.attributes if row.is_heading else {}, []))
            bodies[-1][1].append(self._html_row(row))
        parts = [
            _element("caption", self.caption, {"id": caption_id}),
            _element("thead", _element("tr", head)),
            *(_element("tbody", Markup("\n").join(rows), attributes) for attributes, rows in bodies),
        ]
        table = _element("table", Markup("\n").join(parts), {"id": key})
        region = {"class": "scroll", "role": "region", "aria-labelledby": caption_id, "tabindex": "0"}
        return _element("div", table, region)

    def _html_row(self, row: TableRow) -> Markup:
        first, cells = self.columns[0], Markup()
        if row.is_heading:
            attributes = {"scope": "rowgroup", "colspan": len(self.columns)}
            return _element("tr", _element("th", row.texts[first.key], attributes), {"class": "group"})
        for column in self.columns:
            text, value = row.texts[column.key], row.values.get(column.key)
            style = " ".join(filter(None, ("number" * column.is_number, row.styles.get(column.key, ""))))
            attributes = {"scope": "row" if column is first else None, "class": style or None}
            attributes |= {"data-key": column.key if column.key in row.values else None, "data-value": value}
            content = text if column.is_number or isinstance(text, Markup) else _element("bdi", text)
            cells += _element("th" if column is first else "td", content, attributes)
        return _element("tr", cells, row.attributes)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()) -> list[str]:
    """The lines of a table of texts that are Markdown already (``Table.from_rows``), and an empty one after them."""
    return Table.from_rows(header, rows, numbers).markdown(is_markup=True)


def _in_cell(text: str) -> str:
    """Markdown in one line that ends no cell."""
    return " ".join(BARE_PIPE.sub(r"\|", text).split())


def _markdown_row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _element(tag: str, content: str, attributes: Mapping[str, object] = NO_ATTRIBUTES) -> Markup:
    """An element of HTML, with the attributes that are not None."""
    given = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items() if value is not None)
    return Markup(f"<{tag}{given}>{escape(content)}</{tag}>")
