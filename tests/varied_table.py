"""A table of a page that says once what is the same in all of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from bench.tabular import markdown_table


def varied_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown, and an empty one after them.

    A column that is the same in all of several rows is not in it, unless it is the first: a line below names it. If the
    first column alone is left, it becomes one line.
    """
    shown, same = [0], []
    for place in range(1, len(header)):
        values = {row[place] for row in rows}
        if len(rows) > 1 and len(values) == 1:
            same.append(f"*{header[place]}* {rows[0][place]}")
        else:
            shown.append(place)
    if len(shown) == 1 and same:
        separator = ", "
        if any(separator in row[0] for row in rows):
            separator = "; "
        lines = [f"*{header[0]}* {separator.join(row[0] for row in rows)}.", ""]
    else:
        titles = [header[place] for place in shown]
        lines = markdown_table(titles, [[row[place] for place in shown] for row in rows])
    if same:
        lines += [f"The same in all: {'; '.join(same)}.", ""]
    return lines
