"""A run in short, as Markdown for a pull request: the answer, a table for each N, and how to repeat the run."""

from __future__ import annotations

import shlex

from bench.formatting import markdown
from bench.judge.loading import Run
from bench.report.answer import Answer, Statement
from bench.report.citation import commit

REPORT = "report.md"
MOST_ROWS = 60
"""Cells in all tables, since a comment may have 65,536 characters. The largest N always has its table."""


def render(run: Run, answer: Answer) -> str:
    """The text."""
    lines = [f"## {markdown(run.name)}", ""]
    for one in answer.all:
        lines += _statement(one)
    lines += [f"- {markdown(text)}." for text in answer.remarks]
    rows = 0
    for place, group in enumerate(answer.groups):
        rows += len(group.rows)
        if place and rows > MOST_ROWS:
            lines += ["", "The tables of smaller N are in report.html."]
            break
        lines += ["", f"### {markdown(group.title)}", "", *group.table.markdown()]
        lines += ["", f"{markdown(group.legend(answer.baseline))}."]
    return "\n".join([*lines, *_again(run)])


def _statement(one: Statement) -> list[str]:
    """A list item or an alert, with what to do about it."""
    said = f"**{markdown(one.title)}.** {markdown(one.sentence)}"
    command = code(one.command) if one.command else []
    if one.key == "alarm":
        return [f"> [!{'CAUTION' if one.is_warning else 'NOTE'}]", f"> {said}", *(f"> {line}" for line in command), ""]
    return [f"- {said}", *(f"  {line}" for line in command)]


def _again(run: Run) -> list[str]:
    """Where the numbers come from, and the command that measures them again."""
    manifest = run.manifest
    digest = manifest.get("journal_sha256")
    said = f"{markdown(commit(manifest))}"
    said += f"; SHA-256 of the journal: `{digest}`" if digest else ""
    command = shlex.join(map(str, manifest.get("command") or ["python", "-m", "bench", "run"]))
    return ["", f"**To reproduce.** {said}.", "", *code(command), ""]


def code(command: str) -> list[str]:
    """A command as a block of code, whatever it contains."""
    fence = "~~~" if "```" in command else "```"
    return [f"{fence}sh", " ".join(command.split()), fence]
