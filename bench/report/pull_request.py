"""A run in short, as Markdown for a pull request: the answer, the table for each N, and how to run it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from bench.judge.loading import Run
from bench.report.answer import Answer, Statement
from bench.report.ranking import Group
from bench.report.terminal import legend
from bench.words import markdown

REPORT = "report.md"
MOST_ROWS = 60
"""Cells in all tables together: a comment on a pull request has 65,536 characters. That of the largest N is whole."""


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
        lines += ["", f"### {markdown(group.title)}", "", *_table(group), "", f"{markdown(legend(answer, group))}."]
    return "\n".join([*lines, *_again(run)])


def _statement(one: Statement) -> list[str]:
    """As an item of a list, or an alert, with what to do about it."""
    said = f"**{markdown(one.title)}.** {markdown(one.sentence)}"
    command = code(one.command) if one.command else []
    if one.key == "alarm":
        return [f"> [!{'CAUTION' if one.is_warning else 'NOTE'}]", f"> {said}", *(f"> {line}" for line in command), ""]
    return [f"- {said}", *(f"  {line}" for line in command)]


def _table(group: Group) -> Iterator[str]:
    yield f"| {' | '.join(markdown(column.title) for column in group.columns)} |"
    yield "|" + "".join(" ---: |" if column.is_number else " --- |" for column in group.columns)
    for row in group.rows:
        texts = row.texts
        yield f"| {' | '.join(markdown(texts[column.key]) for column in group.columns)} |"


def _again(run: Run) -> list[str]:
    """Where the numbers come from, and the command that makes them again."""
    manifest = run.manifest
    git = manifest.get("git") or {}
    changes = " with uncommitted changes" if git.get("clean") is False else ""
    commit = f"commit {git['commit']}{changes}" if git.get("commit") else "an unknown commit"
    digest = manifest.get("journal_sha256")
    said = f"Made by accumulation-bench at {markdown(commit)}"
    said += f"; SHA-256 of the journal: `{digest}`" if digest else ""
    command = shlex.join(map(str, manifest.get("command") or ["python", "-m", "bench", "run"]))
    return ["", f"**To reproduce.** {said}.", "", *code(command), ""]


def code(command: str) -> list[str]:
    """A command as a block of code, whatever is in it."""
    fence = "~~~" if "```" in command else "```"
    return [f"{fence}sh", " ".join(command.split()), fence]
