"""The answer in the terminal at the end of a run, fitted to its width, and findings of ``check`` and ``doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from bench.judge.integrity import Finding, Level
from bench.judge.samples import NAME
from bench.report.answer import Answer, Statement
from bench.report.ranking import Group, RankedColumn

PADDING = (0, 2, 0, 0)
UNBOUNDED = 1000


def show(console: Console, answer: Answer) -> None:
    """Print the table of the largest N, then every statement."""
    for group in answer.groups[:1]:
        console.print(_fitted(console, group))
        console.print(Text(legend(answer, group), style="dim"))
    if others := [group.title for group in answer.groups[1:]]:
        console.print(Text(f"report.md has the same table of {'; '.join(others)}", style="dim"))
    console.print()
    width = max(len(one.title) for one in answer.all)
    for one in answer.all:
        _say(console, one, width)
    for text in answer.remarks:
        console.print(Text(f"{text}."))


def _say(console: Console, one: Statement, width: int) -> None:
    """A statement under its title; a command has a line of its own, which is not wrapped: it is to be pasted."""
    grid = Table.grid(padding=PADDING)
    grid.add_column(width=width, no_wrap=True, style="bold red" if one.is_warning else "bold")
    grid.add_column(overflow="fold")
    grid.add_row(Text(one.title), Text(one.sentence))
    console.print(grid)
    if one.command:
        console.print(Text(f"  {one.command}"), soft_wrap=True)


def legend(answer: Answer, group: Group) -> str:
    """What the columns of the table are, in one line."""
    if not group.is_timed:
        return "memory is the largest peak of a rank"
    return f"s/step: {NAME} of n trials; ratio to {answer.baseline}: below 1 is faster"


def _fitted(console: Console, group: Group) -> Table:
    """The table with as many columns as there is room for; names are folded if even the last have too little."""
    columns = list(group.columns)
    while True:
        found = _table(group, columns)
        needed = Measurement.get(console, console.options.update(max_width=UNBOUNDED), found).maximum
        spare = max(columns, key=lambda column: column.drop)
        if needed <= console.width or not spare.drop:
            return found
        columns.remove(spare)


def _table(group: Group, columns: Sequence[RankedColumn]) -> Table:
    table = Table(title=group.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Literal["right", "left"] = "right" if column.is_number else "left"
        table.add_column(column.title, justify=justify, no_wrap=column.key != "backend", overflow="fold")
    for row in group.rows:
        texts = row.texts
        table.add_row(*(Text(texts[column.key]) for column in columns), style="red" if row.is_wrong else None)
    return table


STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.GOOD: "green"}


def show_findings(findings: Sequence[Finding], verdict: str) -> None:
    """One line each, and the verdict on all."""
    console = Console()
    width = max((len(one.topic) for one in findings), default=0)
    for one in findings:
        mark = Text(f"{one.level:7}  {one.topic:{width}}  ", style=STYLES[one.level])
        console.print(mark + Text(one.text), soft_wrap=True)
    console.print(verdict, highlight=False, soft_wrap=True)
