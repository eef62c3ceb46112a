"""On the terminal: the answer at the end of a run, and the findings of ``check`` and ``doctor``."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from bench.errors import BAD, GOOD
from bench.findings import Finding, Level
from bench.formatting import plural, printable, some
from bench.screen import Screen

if TYPE_CHECKING:
    from bench.report.answer import Answer

STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.NOTE: "", Level.GOOD: "green"}
MOST_LINES = 3
"""Findings on single cells that are shown of each topic."""


def show(console: Console, answer: Answer) -> None:
    """Print the table of the largest N, then every statement."""
    if answer.groups:
        largest, *others = answer.groups
        largest.table.show(console)
        console.print(Text(printable(largest.legend), style="dim"))
        if notes := largest.footnote:
            console.print(Text(printable(notes), style="dim"))
        if others:
            titles = [group.title for group in others]
            text = f"report.html has the same table for {'; '.join(titles)}"
            console.print(Text(text, style="dim"))
    console.print()
    width = max(len(statement.topic) for statement in answer.all)
    for statement in answer.all:
        _show_statement(console, statement, width)
    for text in answer.remarks:
        console.print(Text(printable(f"{text}.")))


def _show_statement(console: Console, statement: Finding, width: int) -> None:
    """A statement beside its topic.

    A command has a line of its own, which is not wrapped: it is to be pasted.
    """
    topic, style = f"{statement.topic:{width}}  ", "bold"
    if statement.level is Level.WARNING:
        style = "bold red"
    room = max(1, console.width - len(topic))
    lines = textwrap.wrap(statement.sentence, room, break_on_hyphens=False)
    text = f"\n{' ' * len(topic)}".join(lines)
    console.print(Text.assemble((topic, style), text), soft_wrap=True)
    if statement.command:
        console.print(Text(f"  {statement.command}"), soft_wrap=True)


def report_findings(
    findings: Sequence[Finding],
    verdicts: Sequence[str],
    *,
    as_json: bool,
    **facts: str,
) -> int:
    """Print findings and the verdict on them, or these and ``facts`` as JSON.

    ``verdicts`` are those with errors, with warnings alone, and with neither. Returns the exit
    status, 1 if a finding is an error.
    """
    levels = Counter(finding.level for finding in findings)
    errors, warnings = levels[Level.ERROR], levels[Level.WARNING]
    with_errors, with_warnings, with_neither = verdicts
    verdict = with_neither
    if errors:
        verdict = with_errors
    elif warnings:
        verdict = with_warnings
    if as_json:
        every = [finding.to_dict() for finding in findings]
        print(json.dumps({**facts, "findings": every, "errors": errors, "warnings": warnings}))
    else:
        counts = f"{plural(errors, 'error')}, {plural(warnings, 'warning')}"
        _show_findings(findings, f"{counts}: {verdict}")
    if errors:
        return BAD
    return GOOD


def _show_findings(findings: Sequence[Finding], verdict: str) -> None:
    """One line each; findings that say the same of several cells share a line."""
    console = Screen()
    width = 0
    subjects: dict[tuple[Level, str, str], list[str]] = {}
    for finding in findings:
        width = max(width, len(finding.topic))
        key = (finding.level, finding.topic, finding.text)
        subjects.setdefault(key, []).append(finding.subject)
    shown: dict[tuple[Level, str], list[str]] = {}
    for (level, topic, text), names in subjects.items():
        line = text
        if names[0]:
            line = f"{some(names)}: {text}"
        shown.setdefault((level, topic), []).append(line)
    for (level, topic), lines in shown.items():
        beginning = Text(f"{level:7}  {topic:{width}}  ", style=STYLES[level])
        for line in _first_of(lines):
            console.print(beginning + Text(printable(line)), soft_wrap=True)
    console.print(verdict, highlight=False, soft_wrap=True)


def _first_of(lines: Sequence[str]) -> list[str]:
    """MOST_LINES of the lines and the number of the others; all if there is only one more."""
    if len(lines) <= MOST_LINES + 1:
        return [*lines]
    return [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} more, which --json lists"]
