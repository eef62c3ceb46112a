"""On the terminal: the answer at the end of a run, and the findings of ``check`` and ``doctor``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.findings import Finding, Level
from bench.report.answer import Answer, Statement

PADDING = (0, 2, 0, 0)


def show(console: Console, answer: Answer) -> None:
    """Print the table of the largest N, then every statement."""
    for group in answer.groups[:1]:
        console.print(group.table.fitted(console))
        console.print(Text(group.legend(answer.baseline), style="dim"))
    if others := [group.title for group in answer.groups[1:]]:
        console.print(Text(f"report.md has the same table for {'; '.join(others)}", style="dim"))
    console.print()
    width = max(len(statement.title) for statement in answer.all)
    for statement in answer.all:
        _show_statement(console, statement, width)
    for text in answer.remarks:
        console.print(Text(f"{text}."))


def _show_statement(console: Console, statement: Statement, width: int) -> None:
    """A statement beside its title; a command has a line of its own, which is not wrapped: it is to be pasted."""
    grid = Table.grid(padding=PADDING)
    grid.add_column(width=width, no_wrap=True, style="bold red" if statement.is_warning else "bold")
    grid.add_column(overflow="fold")
    grid.add_row(Text(statement.title), Text(statement.sentence))
    console.print(grid)
    if statement.command:
        console.print(Text(f"  {statement.command}"), soft_wrap=True)


STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.GOOD: "green"}


def show_findings(findings: Sequence[Finding], verdict: str) -> None:
    """One line each, and the verdict on all."""
    console = Console()
    width = max((len(finding.topic) for finding in findings), default=0)
    for finding in findings:
        mark = Text(f"{finding.level:7}  {finding.topic:{width}}  ", style=STYLES[finding.level])
        console.print(mark + Text(finding.text), soft_wrap=True)
    console.print(verdict, highlight=False, soft_wrap=True)
