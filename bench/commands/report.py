"""``report``: a run's tables, plots and summary, from its journal."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cell import Status
from bench.errors import BAD, GOOD, InputError
from bench.folders import plots_folder

if TYPE_CHECKING:
    from bench.analysis.baseline import Standing
    from bench.tables import Tables

SUMMARY_WIDTH = 160


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("report", help="write a run's tables and plots again from its journal")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, e.g. results/<run>")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="where to draw (default: as run did)")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Write and show."""
    folder = arguments.run
    return finish(folder, arguments.plots or plots_folder(folder))


def finish(folder: Path, plots: Path) -> int:
    """Tables, plots and the summary of a run; the exit status that its trials deserve."""
    from rich.console import Console

    from bench.analysis.baseline import run_of, standing
    from bench.journal import Journal, read_manifest
    from bench.report.comparison import frame
    from bench.report.plots import draw
    from bench.report.summary import show

    manifest = read_manifest(folder)
    records = Journal(folder).read()
    if not records:
        raise InputError(f"{folder}: no trial has finished yet; go on with: python -m bench run --resume {folder}")
    run = run_of(records, manifest)
    judged, found = run.tables, standing(run)
    try:
        plots.mkdir(parents=True, exist_ok=True)
        judged.write(folder)
        if found.rows:
            frame(found.rows).to_parquet(folder / "ratios.parquet", index=False)
        _store_floor(folder, manifest, found)
        drawn = draw(judged, manifest, plots, found)
    except OSError as error:
        place = f"--plots {plots}" if str(error.filename).startswith(str(plots)) else str(folder)
        raise InputError(f"{place}: cannot be written ({error.strerror}); name a folder that can") from error
    console = Console(width=max(SUMMARY_WIDTH, Console().width))  # better wrapped by the terminal than cut off
    show(console, judged, found, manifest)
    console.print(f"tables: {folder}/*.parquet\nplots:  {plots} ({len(drawn)} files)", highlight=False, soft_wrap=True)
    return _status(judged, manifest)


def _store_floor(folder: Path, manifest: dict[str, Any], found: Standing) -> None:
    """Note the A/A pair's ratio in the manifest, if it is not there already."""
    from bench.journal import write_manifest

    floor = found.floor
    if floor is None:
        return
    ids = {"cell_id": floor.cell.cell_id, "twin_id": floor.twin.cell_id, "reason": floor.reason}
    noted = ids | ({} if floor.interval is None else dataclasses.asdict(floor.interval))
    if manifest.get("noise_floor") != noted:
        write_manifest(folder, manifest | {"noise_floor": noted})


def _status(judged: Tables, manifest: dict[str, Any]) -> int:
    """0 if every trial that could run is good, or invalid by a defect that its backend is known for; 1 otherwise."""
    bad = judged.trials[~judged.trials["status"].isin([Status.OK, Status.UNSUPPORTED])]
    for _, trial in bad.iterrows():
        known = manifest["backends"][trial["backend"]]["defect"]
        cause = f"the loss is divided by N = {trial['accumulate']} twice"
        only = trial["reason"].startswith("the update is off")  # it is named last
        if not (known and trial["status"] == Status.INVALID and only and cause in trial["reason"]):
            return BAD
    return GOOD
