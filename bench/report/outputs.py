"""Everything that is written after a run, from its journal: tables, plots, report and page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench import files
from bench.errors import BAD, GOOD, InputError
from bench.findings import Finding, Level
from bench.formatting import markdown
from bench.judge.analysis import Analysis
from bench.judge.gates import defect_of_trial
from bench.judge.next_steps import on_each_node
from bench.judge.pairs import frame_of_pairs
from bench.judge.pool import load_pool
from bench.plain_stream import harmless
from bench.plan.cell import Status
from bench.report.answer import Answer, answer
from bench.report.citation import commit_sentence
from bench.report.progress import emit
from bench.report.terminal import show
from bench.run.journal import Journal, read_manifest
from bench.screen import Screen

if TYPE_CHECKING:
    from bench.report.sections import PageSection


def rebuild(folder: Path) -> int:
    """Make the tables of a run from its journal alone.

    Returns the exit status that its trials deserve.
    """
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
    """Write tables, plots, short report and page of a run.

    Returns the exit status that its trials deserve. Its times and ratios are those of a pool if
    there are ``others``. ``further`` makes the last section of the page, for a wing; ``as_json``
    prints the answer as one object.
    """
    from bench.report import page
    from bench.report.figures import draw

    data = _load(folder, others)
    section = None
    try:
        if plots.parent == folder:
            files.subfolder(folder, plots.name)  # what a stranger's folder may hold as a link
        plots.mkdir(parents=True, exist_ok=True)
        _write_tables(data)
        found = answer(data)
        drawn = draw(data, plots)
        short = files.write(folder / REPORT, in_short(data, found))
        if further is not None:
            section = further(data)
        text = page.render(data, found, drawn, section)
        whole = files.write(folder / page.PAGE, harmless(text))
    except OSError as error:
        place = str(folder)
        if str(error.filename).startswith(str(plots)):
            place = f"--plots {plots}"
        text = f"{place}: cannot be written ({error.strerror}); name a folder that can"
        raise InputError(text) from error
    status = _status(data)
    if as_json:
        emit(
            "report",
            status=status,
            folder=str(folder),
            plots=str(plots),
            page=str(whole),
            statements=[finding.to_dict() for finding in found.all],
        )
        return status
    console = Screen()
    show(console, found)
    written = (
        f"tables: {folder}/*.parquet",
        f"plots:  {plots} ({len(drawn)} files)",
        f"report: {whole} (in short: {short})",
    )
    for line in written:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    some_are_invalid = data.run.tables.trials["status"].isin([Status.INVALID]).any()
    if status == GOOD and some_are_invalid:
        console.print(EXPECTED_DEFECTS)
    return status


def _load(folder: Path, others: Sequence[Path] = ()) -> Analysis:
    """The run.

    Raises InputError if no trial has finished, or the journal was edited, or the others are unlike
    it.
    """
    read_manifest(folder)
    journal = Journal(folder).path
    if not journal.exists() or not journal.stat().st_size:
        # ``load`` refuses one without a whole line.
        command = f"python -m bench run --resume {folder}"
        raise InputError(f"{folder}: no trial has finished yet; go on with: {command}")
    return Analysis.of(load_pool([folder, *others]), folder)


def _write_tables(data: Analysis) -> list[Path]:
    paths = data.run.tables.write(data.folder)
    if data.verdicts:
        path = data.folder / "ratios.parquet"
        with files.replacing(path) as draft:
            frame_of_pairs(data.verdicts).to_parquet(draft, index=False)
        paths.append(path)
    return paths


def _status(data: Analysis) -> int:
    """0 if every trial that could run is good, or invalid by a documented defect of its backend.

    1 otherwise.
    """
    for row in data.run.tables.trial_rows:
        if row.status in (Status.OK, Status.UNSUPPORTED):
            continue
        if not defect_of_trial(data.run.manifest, row):
            return BAD
    return GOOD


EXPECTED_DEFECTS = (
    "exit status 0: all invalid trials are due to documented defects of frameworks, as expected"
)
REPORT = "report.md"
MOST_ROWS = 60
"""Cells in all tables, since a comment may have 65,536 characters. The largest N has its table in
any case."""


def in_short(data: Analysis, answer: Answer) -> str:
    """A run as Markdown for a pull request.

    The answer, a table for each N, and how to repeat the run.
    """
    lines = [f"## {markdown(data.run.name)}", ""]
    if answer.alarm is not None:
        lines += _alarm(answer.alarm)
    for statement in (*answer.statements, answer.scope):
        lines.append(f"- {_sentence(statement)}")
        for line in code(statement.command):
            lines.append(f"  {line}")
    for text in answer.remarks:
        lines.append(f"- {markdown(text)}.")
    num_rows = 0
    for place, group in enumerate(answer.groups):
        num_rows += len(group.rows)
        is_first = place == 0
        if num_rows > MOST_ROWS and not is_first:
            lines += ["", "More tables are in report.html."]
            break
        lines += ["", f"### {markdown(group.title)}", "", *group.table.markdown()]
        lines.append(f"{markdown(group.legend)}.")
        if notes := group.footnote:
            lines += ["", f"{markdown(notes)}."]
    return "\n".join([*lines, *_how_to_reproduce(data)])


def _alarm(finding: Finding) -> list[str]:
    kind = "NOTE"
    if finding.level is Level.WARNING:
        kind = "CAUTION"
    lines = []
    for line in (f"[!{kind}]", _sentence(finding), *code(finding.command)):
        lines.append(f"> {line}")
    return [*lines, ""]


def _sentence(finding: Finding) -> str:
    return f"**{markdown(finding.topic)}.** {markdown(finding.sentence)}"


def _how_to_reproduce(data: Analysis) -> list[str]:
    """Where the numbers come from, and the command that measures them again."""
    run, manifest = data.run, data.run.manifest
    text = markdown(commit_sentence(manifest))
    if run.pin:
        text += f"; SHA-256 of run.json and journal: `{run.pin}`"
    for other in data.others:
        day = markdown(other.manifest.started[:10])
        text += f"; pooled with the run of {day}, `{other.pin}`"
    command = manifest.command
    if not command:
        command = ("python", "-m", "bench", "run")
    block = code(on_each_node(run, shlex.join(command)))
    return ["", f"**To reproduce.** {text}.", "", *block, ""]


def code(command: str) -> list[str]:
    """A command as a block of code, whatever it contains; nothing if there is none."""
    if not command:
        return []
    fence = "```"
    if fence in command:
        fence = "~~~"
    return [f"{fence}sh", " ".join(command.split()), fence]
