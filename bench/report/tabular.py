"""Tables of texts, and how the terminal and Markdown show them; the template of the page has the one for HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from bench.formatting import markdown
from bench.judge.tables import rows_of
from bench.plan.column import Column

UNBOUNDED = 1000
"""Characters of a line that has room for everything."""


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
    """One row."""

    texts: Mapping[str, str]
    """By the keys of the columns."""
    styles: Mapping[str, str] = field(default_factory=dict)
    """Rich's styles by the keys of the columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Texts under headings."""

    columns: Sequence[TableColumn]
    rows: Sequence[TableRow]
    caption: str = ""

    @classmethod
    def from_rows(
        cls, caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int = 1
    ) -> Table:
        """A table of plain rows; its first columns hold text, the others numbers."""
        columns = [TableColumn(title, title, is_number=place >= num_text_columns) for place, title in enumerate(header)]
        texts = [TableRow(dict(zip(header, row, strict=True))) for row in rows]
        return cls(columns=columns, rows=texts, caption=caption)

    @classmethod
    def from_frame(cls, caption: str, frame: pd.DataFrame, columns: Mapping[str, Column]) -> Table:
        """These columns of a frame; those without any value are left out."""
        known = {name: column for name, column in columns.items() if frame[name].notna().any()}
        rows = [{name: column.shown(row[name]) for name, column in known.items()} for row in rows_of(frame[[*known]])]
        return cls(
            columns=[
                TableColumn(name, about.title or name, is_number=about.is_number) for name, about in known.items()
            ],
            rows=[TableRow(row) for row in rows],
            caption=caption,
        )

    def fitted(self, console: Console) -> RichTable:
        """As many columns as a terminal has room for; the first one is folded if even the last have too little."""
        shown = list(self.columns)
        while True:
            table = RichTable(title=self.caption or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            table.padding = (0, 1, 0, 0)
            for column in shown:
                table.add_column(
                    column.title,
                    justify="right" if column.is_number else "left",
                    no_wrap=column is not self.columns[0],
                    overflow="fold",
                )
            for row in self.rows:
                table.add_row(*(Text(row.texts[column.key], row.styles.get(column.key, "")) for column in shown))
            needed = Measurement.get(console, console.options.update(max_width=UNBOUNDED), table).maximum
            spare = max(shown, key=lambda column: column.drop)
            if needed <= console.width or not spare.drop:
                return table
            shown.remove(spare)

    def markdown(self) -> list[str]:
        head = [markdown(column.title) for column in self.columns]
        rules = ["---:" if column.is_number else "---" for column in self.columns]
        rows = [[markdown(row.texts[column.key]) for column in self.columns] for row in self.rows]
        return [f"| {' | '.join(line)} |" for line in (head, rules, *rows)]
