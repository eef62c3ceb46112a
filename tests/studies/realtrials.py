"""Runs on this machine whose right verdicts are known: a cell against itself, and against itself with a sleep."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from bench import files
from bench.backends.base import EXTRA_BACKENDS, registry
from bench.judge.standing import look
from bench.launch.launcher import Launcher
from bench.plan import matrix as matrix_file
from bench.plan.cell import Cell, Device
from bench.plan.expand import expand
from bench.run import start
from bench.run.journal import MANIFEST, read_manifest
from bench.run.runner import Observer, Runner
from tests.conftest import ROOT
from tests.delayed import Delayed
from tests.studies.known import THIRD

RUNS = 10
DOCUMENT = {
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
"""One rank of one thread, and a model that fits into a core's caches: a trial is short, and what is compared is the
machine's noise alone. With two threads on two virtual cores the same small step takes one of two times, 1.5 apart,
for as long as a process lives; that is real, but drowns 5 %."""


def measure(folder: Path, number: int, observer: Observer) -> None:
    """Measure the run of that number, or go on with it; its seed is its number."""
    path = folder / f"run-{number}"
    if (path / MANIFEST).exists() and "finished" in read_manifest(path):
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # for the ranks
    os.environ[EXTRA_BACKENDS] = f"{Delayed.__module__}:{Delayed.__name__}"
    backends = registry()
    if not (path / MANIFEST).exists():
        chosen = matrix_file.parse(DOCUMENT, name="real", source="tests/studies/realtrials.py").override(
            "training.seed", number, "seed"
        )
        start.create(path, chosen, cells(chosen), backends, cold=False)
    with files.run_folder(path, str(path)), Launcher(Device.CPU) as launcher:
        manifest = start.reopen(path, backends)
        Runner(path, manifest, backends, launcher, observer, look).run()


def cells(chosen: matrix_file.Matrix) -> Sequence[Cell]:
    """Those of the matrix, and the third."""
    found = expand(chosen, registry(), 0)
    (twin,) = [cell for cell in found if cell.twin]
    return [*found, dataclasses.replace(twin, twin=THIRD)]
