"""Runs on this machine whose right verdicts are known: a cell against itself, and against itself with a sleep.

``python -m studies.realtrials`` measures runs of two designs: one small cell on one rank in results/noise, and the
published one, two ranks with the model, batch and windows of the matrix ``cpu``, in results/planted. It goes on where
it was stopped, and keeps of each run what the study reads: in runs.json its manifest, and in trials.csv the median step
of each trial after warm-up, with what was really slept. Both together take two hours on an idle machine;
``--design NAME``, ``--runs N`` and ``--budget S`` make less.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from rich.console import Console

from bench import files
from bench.backends.base import EXTRA_BACKENDS, registry
from bench.errors import InputError
from bench.judge.analysis import Analysis
from bench.judge.baseline import control_of, interim_analysis
from bench.judge.loading import Run, load
from bench.judge.pairs import ComparedPair
from bench.judge.pool import Pool
from bench.judge.tables import build
from bench.launch.launcher import Launcher
from bench.plan import matrix as matrix_file
from bench.plan.cell import Cell, Device
from bench.plan.expand import expand
from bench.report.progress import Display
from bench.run import start
from bench.run.journal import MANIFEST, read_document, read_manifest
from bench.run.manifest import parse_manifest
from bench.run.runner import Observer, Runner
from bench.run.start import Planned
from bench.run.trial_record import parse_records
from studies import ROOT
from tests.delayed import SLEPT, Delayed
from tests.factories import make_record

REAL, PLANTED = ROOT / "results" / "noise", ROOT / "results" / "planted"
"""The runs that docs/statistics.md shows: of one rank, and of the published design."""
RUN_FILE, TRIAL_FILE = "runs.json", "trials.csv"
KEPT = ("cell_id", "repeat", "step_time_s", "foreign_cores", "stolen_cores")
"""Columns of trials.csv after the run."""
UNREAD = {"distributions", "environment", "packages", "remarks", "torch_build"}
"""Keys of a manifest that the study does not read."""
RUNS = 10
THIRD = "third"
"""Label of the cell that is compared with itself; the A/A pair is another twin, as in any run."""
DOCUMENT: dict[str, Any] = {
    "description": "a cell against itself, and against itself with a sleep of 5 % per step",
    "device": "cpu",
    "repeats": 10,
    "max_repeats": 200,
    "precision": 0.03,
    "budget_s": 340,
    "threads": 1,
    "baseline": "ddp-deferred",
    "workload": {"model": "micro", "sequence_length": 32, "global_batch_size": 8},
    "training": {"timed_windows": 40, "warmup_windows": 3},
    "axes": {"backend": ["ddp-deferred", Delayed.name], "accumulate": [2], "world_size": [1]},
}
"""One rank with one thread, and a model that fits into a core's caches: trials are short, and only the machine's noise
is compared. With two threads on two virtual cores, the same small step takes one of two times, a factor of 1.5 apart,
for as long as a process lives; that is real, but it drowns 5 %."""
PUBLISHED: dict[str, Any] = DOCUMENT | {
    "workload": {"model": "tiny", "sequence_length": 64, "global_batch_size": 16},
    "training": {"timed_windows": 4, "warmup_windows": 2},
    "axes": {"backend": ["ddp-deferred", Delayed.name], "accumulate": [8], "world_size": [2]},
}
"""Two ranks, and the model, batch and windows of bench/matrices/cpu.toml at its largest N."""
DESIGNS: Mapping[str, tuple[Path, dict[str, Any]]] = {
    "one-rank": (REAL, DOCUMENT),
    "published": (PLANTED, PUBLISHED),
}


def measure(folder: Path, number: int, observer: Observer, document: dict[str, Any]) -> None:
    """Measure the run of that number, or go on with it; its seed is its number."""
    path = folder / f"run-{number}"
    if (path / MANIFEST).exists() and read_manifest(path).finished is not None:
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), os.environ.get("PYTHONPATH", "")]
    )  # for the ranks
    os.environ[EXTRA_BACKENDS] = f"{Delayed.__module__}:{Delayed.__name__}"
    backends = registry()
    if not (path / MANIFEST).exists():
        chosen = matrix_file.parse(document, name="real", source="studies/realtrials.py").override(
            "training.seed", number, "seed"
        )
        start.create(path, Planned(chosen, backends, cells(chosen)), cold=False)
    with files.run_folder(path, str(path)), Launcher(Device.CPU) as launcher:
        manifest = start.reopen(path, backends)
        Runner(path, manifest, backends, launcher, observer, interim_analysis).run()


def cells(chosen: matrix_file.Matrix) -> list[Cell]:
    """Those of the matrix, and the third."""
    found = expand(chosen, registry(), 0).cells
    (twin,) = [cell for cell in found if cell.twin]
    return [*found, dataclasses.replace(twin, twin=THIRD)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """One run, and what it said of what is known."""

    run: Run
    control: ComparedPair
    same: ComparedPair
    """The cell against itself, which must not be called faster or slower."""
    slower: ComparedPair
    """Against itself with the sleep, which must be called slower."""
    slept: float | None
    """The median share of a step that was really slept; None for runs that did not record it."""


def keep(folder: Path) -> None:
    """Write both files from the runs in the folder, each of which must have trials that are ok only."""
    manifests, trials = [], []
    for path in sorted(folder.glob("run-*"), key=lambda path: (len(path.name), path.name)):
        run = load(path)
        if set(run.tables.trials["status"]) != {"ok"}:
            raise InputError(f"{path}: has trials that are not ok; measure it again")
        manifests.append(
            {"name": path.name} | {k: v for k, v in read_document(path).items() if k not in UNREAD}
        )
        slept = {
            (record.cell.cell_id, record.repeat): record.time.settings.get(SLEPT)
            for record in run.records
            if record.time is not None
        }
        kept = run.tables.trials[list(KEPT)].assign(run=path.name)
        keys = zip(kept["cell_id"], kept["repeat"], strict=True)
        trials.append(kept.assign(**{SLEPT: [slept.get(key) for key in keys]}))
    lines = ",\n".join(json.dumps(manifest, separators=(",", ":")) for manifest in manifests)
    (folder / RUN_FILE).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    pd.concat(trials)[["run", *KEPT, SLEPT]].to_csv(
        folder / TRIAL_FILE, index=False, float_format="%.9g"
    )


def stored(folder: Path) -> Iterator[Run]:
    """The runs of both files, with as many equal steps in each trial as it had; the gates were asked by ``keep``."""
    every = pd.read_csv(folder / TRIAL_FILE).groupby("run")
    for document in json.loads((folder / RUN_FILE).read_text(encoding="utf-8")):
        manifest = parse_manifest(document, str(folder / RUN_FILE))
        known = {cell.cell_id: cell for cell in manifest.cells}
        records = []
        for row in every.get_group(document["name"]).to_dict("records"):
            cell = known[row["cell_id"]]
            host = {"num_cpus": manifest.machine.cores, "own_cores": 0.0} | {
                name: row[name] for name in KEPT[3:]
            }
            time = {
                "step_seconds": [row["step_time_s"]] * cell.timed_windows,
                "warmup_seconds": [],
                "host": host,
            }
            records.append(make_record(cell, row["repeat"], time=time))
        tables = build(parse_records(records, folder / TRIAL_FILE), manifest)
        yield Run(name=manifest.run_id, tables=tables, cells=known, manifest=manifest)


def read(folder: Path) -> Iterator[Known]:
    """The runs that were measured. Raises InputError if one is not of this kind."""
    slept = _slept(folder)
    for run in stored(folder):
        control, rows = control_of(Pool(runs=(run,))), Analysis(run=run).verdicts
        same = [row for row in rows if row.b.twin == THIRD]
        slower = [row for row in rows if row.b.backend == Delayed.name]
        if control is None or len(same) != 1 or len(slower) != 1:
            raise InputError(f"{folder}: {run.name} is not a run of the study; measure it again")
        yield Known(
            run=run,
            control=control,
            same=same[0],
            slower=slower[0],
            slept=slept.get(run.name),
        )


def _slept(folder: Path) -> dict[str, float]:
    """By run, the median over trials of what was really slept."""
    trials = pd.read_csv(folder / TRIAL_FILE)
    if SLEPT not in trials:
        return {}
    return {
        str(name): float(median(of_run))
        for name, of_run in trials.dropna(subset=[SLEPT]).groupby("run")[SLEPT]
    }


def main() -> None:
    """Measure the runs of each design that are not there yet, and keep them."""
    parser = argparse.ArgumentParser(prog="python -m studies.realtrials", description=__doc__)
    parser.add_argument("--design", choices=DESIGNS, action="append")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N")
    parser.add_argument("--budget", type=float, default=DOCUMENT["budget_s"], metavar="S")
    arguments = parser.parse_args()
    for design in arguments.design or DESIGNS:
        folder, document = DESIGNS[design]
        for number in range(arguments.runs):
            with Display(Console(stderr=True), {}) as display:
                measure(folder, number, display, document | {"budget_s": arguments.budget})
        keep(folder)
        for path in folder.glob("run-*"):
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
