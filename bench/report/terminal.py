"""On the terminal: the answer at the end of a run, and the findings of ``check`` and ``doctor``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from bench.errors import BAD, GOOD
from bench.findings import Finding, Level
from bench.formatting import plural, printable, some
from bench.grouping import grouped
from bench.screen import Screen

if TYPE_CHECKING:
    from bench.report.answer import Answer

STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.NOTE: "", Level.GOOD: "green"}
MOST_LINES = 3
"""Findings on single cells that are shown of each topic."""


def show(console: Console, answer: Answer) -> None:
    """Print the table of the largest N, then every statement."""
    for group in answer.groups[:1]:
        group.table.show(console)
        console.print(Text(printable(group.legend), style="dim"))
    if others := [group.title for group in answer.groups[1:]]:
        console.print(Text(f"report.md has the same table for {'; '.join(others)}", style="dim"))
    console.print()
    width = max(len(statement.topic) for statement in answer.all)
    for statement in answer.all:
        _show_statement(console, statement, width)
    for text in answer.remarks:
        console.print(Text(printable(f"{text}.")))


def _show_statement(console: Console, statement: Finding, width: int) -> None:
    """A statement beside its topic; a command has a line of its own, which is not wrapped: it is to be pasted."""
    topic, style = f"{statement.topic:{width}}  ", "bold red" if statement.level is Level.WARNING else "bold"
    lines = textwrap.wrap(statement.sentence, max(1, console.width - len(topic)), break_on_hyphens=False)
    console.print(Text.assemble((topic, style), f"\n{' ' * len(topic)}".join(lines)), soft_wrap=True)
    if statement.command:
        console.print(Text(f"  {statement.command}"), soft_wrap=True)


def report_findings(findings: Sequence[Finding], verdicts: Sequence[str], *, as_json: bool, **facts: str) -> int:
    """Print findings and the verdict on them, or these and ``facts`` as JSON; the exit status, 1 if one is an error.

    ``verdicts`` are those with errors, with warnings alone, and with neither.
    """
    errors, warnings = (sum(finding.level is level for finding in findings) for level in (Level.ERROR, Level.WARNING))
    if as_json:
        every = [finding.to_dict() for finding in findings]
        print(json.dumps({**facts, "findings": every, "errors": errors, "warnings": warnings}))
    else:
        verdict = verdicts[0] if errors else verdicts[1] if warnings else verdicts[2]
        _show_findings(findings, f"{plural(errors, 'error')}, {plural(warnings, 'warning')}: {verdict}")
    return BAD if errors else GOOD


def _show_findings(findings: Sequence[Finding], verdict: str) -> None:
    """One line each; findings that say the same of several cells share a line."""
    console = Screen()
    width = max((len(finding.topic) for finding in findings), default=0)
    subjects = grouped(((finding.level, finding.topic, finding.text), finding.subject) for finding in findings)
    shown = grouped(
        ((level, topic), f"{some(names)}: {text}" if names[0] else text)
        for (level, topic, text), names in subjects.items()
    )
    for (level, topic), texts in shown.items():
        most = MOST_LINES if len(texts) > MOST_LINES + 1 else len(texts)
        more = [f"... and {len(texts) - most} more, which --json lists"] if len(texts) > most else []
        for text in texts[:most] + more:
            console.print(Text(f"{level:7}  {topic:{width}}  ", style=STYLES[level]) + Text(text), soft_wrap=True)
    console.print(verdict, highlight=False, soft_wrap=True)
