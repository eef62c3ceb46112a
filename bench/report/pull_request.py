"""A run in short, as Markdown for a pull request: the answer, a table for each N, and how to repeat the run."""

from __future__ import annotations

import shlex

from bench.findings import Finding, Level
from bench.formatting import markdown
from bench.judge.loading import Run
from bench.report.answer import Answer
from bench.report.citation import commit_sentence

REPORT = "report.md"
MOST_ROWS = 60
"""Cells in all tables, since a comment may have 65,536 characters. The largest N always has its table."""


def render(run: Run, answer: Answer) -> str:
    """The text."""
    lines = [f"## {markdown(run.name)}", "", *(_alarm(answer.alarm) if answer.alarm else [])]
    for statement in (*answer.statements, answer.scope):
        lines += [f"- {_sentence(statement)}", *(f"  {line}" for line in code(statement.command))]
    lines += [f"- {markdown(text)}." for text in answer.remarks]
    rows = 0
    for place, group in enumerate(answer.groups):
        rows += len(group.rows)
        if place and rows > MOST_ROWS:
            lines += ["", "The tables of smaller N are in report.html."]
            break
        lines += ["", f"### {markdown(group.title)}", "", *group.table.markdown()]
        lines.append(f"{markdown(group.legend)}.")
    return "\n".join([*lines, *_how_to_reproduce(run)])


def _alarm(finding: Finding) -> list[str]:
    """An alert, with what to do about it."""
    kind = "CAUTION" if finding.level is Level.WARNING else "NOTE"
    return [f"> [!{kind}]", f"> {_sentence(finding)}", *(f"> {line}" for line in code(finding.command)), ""]


def _sentence(finding: Finding) -> str:
    return f"**{markdown(finding.topic)}.** {markdown(finding.sentence)}"


def _how_to_reproduce(run: Run) -> list[str]:
    """Where the numbers come from, and the command that measures them again."""
    manifest = run.manifest
    digest = f"; SHA-256 of the journal: `{run.digest}`" if run.digest else ""
    command = shlex.join(map(str, manifest.get("command") or ["python", "-m", "bench", "run"]))
    return ["", f"**To reproduce.** {markdown(commit_sentence(manifest))}{digest}.", "", *code(command), ""]


def code(command: str) -> list[str]:
    """A command as a block of code, whatever it contains; nothing if there is none."""
    if not command:
        return []
    fence = "~~~" if "```" in command else "```"
    return [f"{fence}sh", " ".join(command.split()), fence]
