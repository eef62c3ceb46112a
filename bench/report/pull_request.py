"""A run in short, as Markdown for a pull request: the answer, the table, what failed, and how to run it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from bench.judge.loading import Run
from bench.judge.remarks import note
from bench.judge.samples import NAME
from bench.judge.standing import Standing
from bench.plan.cell import Status
from bench.report import figure_data
from bench.report.answer import answer, cut
from bench.report.overview import Overview, overview
from bench.words import markdown

REPORT = "report.md"
MOST_ROWS, MOST_FAILURES = 60, 12
"""Cells in the table, and different failures that are listed: a comment on a pull request has 65,536 characters."""


def write(folder: Path, run: Run, standings: Mapping[str, Standing], cells: pd.DataFrame) -> Path:
    """Write it into the run's folder; returns the path. ``cells`` has a row per cell: ``terminal.by_cell``."""
    path = folder / REPORT
    draft = path.with_suffix(".tmp")
    draft.write_text(render(run, standings, cells), encoding="utf-8")
    draft.replace(path)
    return path


def render(run: Run, standings: Mapping[str, Standing], cells: pd.DataFrame) -> str:
    """The text."""
    words = figure_data.FigureData(run.tables, dict(run.manifest)).words("")
    lines = [f"## {markdown(run.name)}", "", f"{markdown(words.subtitle)}.", ""]
    lines += [f"- {markdown(sentence)}" for sentence in answer(run, standings, cells)]
    lines += ["", f"s/step: {NAME} over a cell's good trials, as it is cited.", ""]
    lines += _cells(overview(run, standings, cells))
    lines += [*_failures(run, cells), *_again(run)]
    return "\n".join(lines)


def _cells(found: Overview) -> list[str]:
    """The table; what could be compared comes first if not all cells have room."""
    shown = found.lines
    if len(shown) > MOST_ROWS:
        decided = sorted(shown, key=lambda line: line.fields["ratio"].value is None)
        chosen = {line.cell_id for line in decided[:MOST_ROWS]}
        shown = tuple(line for line in shown if line.cell_id in chosen)
    keys = [column.key for column in found.columns if column.key != "memory"]
    header = [column.title for column in found.columns if column.key != "memory"]
    rows = [
        [
            *(markdown(line.fields[key].text) for key in keys),
            markdown(line.fields["ratio"].text),
            markdown(line.fields["interval"].text),
            markdown(line.fields["verdict"].text),
            markdown(line.fields["memory"].text),
            markdown(line.ended),
        ]
        for line in shown
    ]
    titles = [markdown(f"time / {found.baseline}'s"), "95 % interval", "verdict", "peak memory", "validity"]
    left = len(found.lines) - len(shown)
    more = [f"... and {left} more cells: see report.html.", ""] if left else []
    return [*table([*map(markdown, header), *titles], rows), *more]


def _failures(run: Run, cells: pd.DataFrame) -> list[str]:
    """What failed, each reason once with its cells."""
    bad = cells[cells["status"] != Status.OK]
    if bad.empty:
        return []
    found: dict[tuple[str, str], list[str]] = {}
    for cell in bad.to_dict("records"):
        known = note(run.manifest, cell)
        reason = cut(str(cell["reason"]) or "no reason was recorded") + (f". This is {known}" if known else "")
        key = str(cell["status"]), reason
        found.setdefault(key, []).append(run.cells[cell["cell_id"]].label)
    lines = ["**Failed cells**", ""]
    for (status, reason), labels in list(found.items())[:MOST_FAILURES]:
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        lines.append(f"- {markdown(status)}: {markdown(', '.join(labels[:3]))}{more}: {markdown(reason)}")
    left = len(found) - MOST_FAILURES
    return [*lines, *([f"- and {left} more reasons: see report.html"] if left > 0 else []), ""]


def _again(run: Run) -> list[str]:
    """Where the numbers come from, and the command that makes them again."""
    manifest = run.manifest
    git = manifest.get("git") or {}
    changes = " with uncommitted changes" if git.get("clean") is False else ""
    commit = f"commit {git['commit']}{changes}" if git.get("commit") else "an unknown commit"
    digest = manifest.get("journal_sha256")
    command = shlex.join(map(str, manifest.get("command") or ["python", "-m", "bench", "run"]))
    fence = "~~~" if "```" in command else "```"
    said = f"Made by accumulation-bench at {markdown(commit)}"
    said += f"; SHA-256 of the journal: `{digest}`" if digest else ""
    return [f"**To reproduce.** {said}.", "", f"{fence}sh", " ".join(command.split()), fence, ""]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, and an empty one after it."""
    return [
        f"| {' | '.join(header)} |",
        "|" + " --- |" * len(header),
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]
