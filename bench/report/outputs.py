"""Everything that is written after a run, from its journal: tables, plots, short report and page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bench import files
from bench.errors import BAD, GOOD, InputError
from bench.findings import Finding, Level
from bench.formatting import markdown
from bench.judge.analysis import Analysis
from bench.judge.gates import defect_of_trial
from bench.judge.next_steps import on_each_node
from bench.judge.pairs import frame_of_pairs
from bench.judge.pool import load_pool
from bench.plan.cell import Status
from bench.report.answer import Answer, answer
from bench.report.citation import commit_sentence
from bench.report.progress import emit
from bench.report.terminal import show
from bench.run.journal import Journal, read_manifest

if TYPE_CHECKING:
    from bench.report.sections import PageSection


def rebuild(folder: Path) -> int:
    """Make the tables of a run from its journal alone; returns the exit status that its trials deserve."""
    data = _load(folder)
    with files.writing(str(folder), "make room, or make it writable"):
        paths = _write_tables(data)
    print(*paths, sep="\n")
    return _status(data)


def write_outputs(
    folder: Path,
    plots: Path,
    further: Callable[[Analysis], PageSection | None] | None = None,
    *,
    others: Sequence[Path] = (),
    as_json: bool = False,
) -> int:
    """Write tables, plots, short report and page of a run; returns the exit status that its trials deserve.

    Its times and ratios are those of a pool if there are ``others``. ``further`` makes the last section of the page,
    for a wing; ``as_json`` prints the answer as one object.
    """
    from bench.report import page
    from bench.report.figures import draw

    data = _load(folder, others)
    try:
        plots.mkdir(parents=True, exist_ok=True)
        _write_tables(data)
        found = answer(data)
        drawn = draw(data, plots)
        short = files.write(folder / REPORT, in_short(data, found))
        whole = files.write(folder / page.PAGE, page.render(data, found, drawn, further and further(data)))
    except OSError as error:
        place = f"--plots {plots}" if str(error.filename).startswith(str(plots)) else str(folder)
        raise InputError(f"{place}: cannot be written ({error.strerror}); name a folder that can") from error
    status = _status(data)
    if as_json:
        statements = [finding.to_dict() for finding in found.all]
        emit("report", status=status, folder=str(folder), plots=str(plots), page=str(whole), statements=statements)
        return status
    console = Console()
    show(console, found)
    print(f"tables: {folder}/*.parquet\nplots:  {plots} ({len(drawn)} files)\nreport: {whole} (in short: {short})")
    if status == GOOD and data.run.tables.trials["status"].isin([Status.INVALID]).any():
        console.print("exit status 0: all invalid trials are due to documented defects of frameworks, as expected")
    return status


def _load(folder: Path, others: Sequence[Path] = ()) -> Analysis:
    """The run. Raises InputError if no trial has finished, or the journal was edited, or the others are unlike it."""
    read_manifest(folder)
    journal = Journal(folder).path
    if not journal.exists() or not journal.stat().st_size:  # ``load`` refuses one without a whole line
        raise InputError(f"{folder}: no trial has finished yet; go on with: python -m bench run --resume {folder}")
    return Analysis.of(load_pool([folder, *others]), folder)


def _write_tables(data: Analysis) -> list[Path]:
    paths = data.run.tables.write(data.folder)
    if data.verdicts:
        paths.append(data.folder / "ratios.parquet")
        frame_of_pairs(data.verdicts).to_parquet(paths[-1], index=False)
    return paths


def _status(data: Analysis) -> int:
    """0 if every trial that could run is good, or invalid by a documented defect of its backend; 1 otherwise."""
    trials = data.run.tables.trial_rows
    bad = [row for row in trials if row.status not in (Status.OK, Status.UNSUPPORTED)]
    return GOOD if all(defect_of_trial(data.run.manifest, row) for row in bad) else BAD


REPORT = "report.md"
MOST_ROWS = 60
"""Cells in all tables, since a comment may have 65,536 characters. The largest N always has its table."""


def in_short(data: Analysis, answer: Answer) -> str:
    """A run as Markdown for a pull request: the answer, a table for each N, and how to repeat the run."""
    lines = [f"## {markdown(data.run.name)}", "", *(_alarm(answer.alarm) if answer.alarm else [])]
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
    return "\n".join([*lines, *_how_to_reproduce(data)])


def _alarm(finding: Finding) -> list[str]:
    kind = "CAUTION" if finding.level is Level.WARNING else "NOTE"
    return [f"> [!{kind}]", f"> {_sentence(finding)}", *(f"> {line}" for line in code(finding.command)), ""]


def _sentence(finding: Finding) -> str:
    return f"**{markdown(finding.topic)}.** {markdown(finding.sentence)}"


def _how_to_reproduce(data: Analysis) -> list[str]:
    """Where the numbers come from, and the command that measures them again."""
    run, manifest = data.run, data.run.manifest
    digest = f"; SHA-256 of the journal: `{run.digest}`" if run.digest else ""
    for other in data.others:
        digest += f"; pooled with the run of {markdown(other.manifest.started[:10])}, `{other.digest}`"
    command = on_each_node(run, shlex.join(manifest.command or ["python", "-m", "bench", "run"]))
    return ["", f"**To reproduce.** {markdown(commit_sentence(manifest))}{digest}.", "", *code(command), ""]


def code(command: str) -> list[str]:
    """A command as a block of code, whatever it contains; nothing if there is none."""
    if not command:
        return []
    fence = "~~~" if "```" in command else "```"
    return [f"{fence}sh", " ".join(command.split()), fence]
