"""Everything that is written after a run, from its journal: tables, plots, short report and page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench import files
from bench.errors import BAD, GOOD, InputError
from bench.plan.cell import Status
from bench.run.journal import Journal, read_manifest

if TYPE_CHECKING:
    from bench.judge.analysis import Analysis
    from bench.report.sections import PageSection


def rebuild(folder: Path) -> int:
    """Make the tables of a run from its journal alone; returns the exit status that its trials deserve."""
    data = _load(folder)
    with files.writing(str(folder), "make room, or make it writable"):
        paths = _write_tables(data)
    print(*paths, sep="\n")
    return _status(data)


def write_outputs(
    folder: Path, plots: Path, further: Callable[[Analysis], PageSection | None] | None = None, *, as_json: bool = False
) -> int:
    """Write tables, plots, short report and page of a run; returns the exit status that its trials deserve.

    ``further`` makes the last section of the page, for a wing; ``as_json`` prints the answer as one object.
    """
    from rich.console import Console

    from bench.report import page, pull_request
    from bench.report.answer import answer
    from bench.report.figures import draw
    from bench.report.progress import emit
    from bench.report.terminal import show

    data = _load(folder)
    try:
        plots.mkdir(parents=True, exist_ok=True)
        _write_tables(data)
        found = answer(data)
        drawn = draw(data, plots)
        short = files.write(folder / pull_request.REPORT, pull_request.render(data.run, found))
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
    console.print(
        f"tables: {folder}/*.parquet\nplots:  {plots} ({len(drawn)} files)\nreport: {whole} (in short: {short})",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    if status == GOOD and data.run.tables.trials["status"].isin([Status.INVALID]).any():
        console.print("exit status 0: all invalid trials are due to documented defects of frameworks, as expected")
    return status


def _load(folder: Path) -> Analysis:
    """The run. Raises InputError if no trial has finished, or the journal was edited."""
    from bench.judge.analysis import Analysis
    from bench.judge.loading import load

    read_manifest(folder)
    journal = Journal(folder).path
    if not journal.exists() or not journal.stat().st_size:  # ``load`` refuses one without a whole line
        raise InputError(f"{folder}: no trial has finished yet; go on with: python -m bench run --resume {folder}")
    return Analysis(run=load(folder), folder=folder)


def _write_tables(data: Analysis) -> list[Path]:
    from bench.judge.pairs import frame_of_pairs

    paths = data.run.tables.write(data.folder)
    if data.verdicts:
        paths.append(data.folder / "ratios.parquet")
        frame_of_pairs(data.verdicts).to_parquet(paths[-1], index=False)
    return paths


def _status(data: Analysis) -> int:
    """0 if every trial that could run is good, or invalid by a documented defect of its backend; 1 otherwise."""
    from bench.judge.gates import known_defect
    from bench.judge.tables import rows_of

    trials = data.run.tables.trials
    bad = trials[~trials["status"].isin([Status.OK, Status.UNSUPPORTED])]
    return GOOD if all(known_defect(data.run.manifest, trial) for trial in rows_of(bad)) else BAD
