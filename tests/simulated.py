"""Runs whose trials are simulated: everything is real but the launcher, which makes up step times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from bench.judge.baseline import interim_analysis
from bench.judge.loading import Run, load
from bench.launch.outcome import Outcome
from bench.plan.cell import REFERENCE, Cell, Status
from bench.plan.expand import expand
from bench.plan.task import Spec
from bench.report.outputs import finish
from bench.run import start
from bench.run.runner import Runner
from tests.factories import FakeLauncher, make_backend, make_matrix, make_rank, make_time

Change = Callable[[Cell, int, list[float]], list[float]]
"""From a cell, the number of the call and its step times to those that are handed back."""
STEP_S = 0.1


def simulate(
    folder: Path,
    factors: Mapping[str, float],
    *,
    noise: float = 0.004,
    seed: int = 0,
    change: Change | None = None,
    ranks: Callable[[Cell, list[dict[str, Any]]], list[dict[str, Any]]] | None = None,
    accumulate: tuple[int, ...] = (2,),
    once: Collection[str] = (),
    **values: Any,
) -> Run:
    """A run of made-up backends, the first one the baseline, whose steps take STEP_S times their factor.

    ``values`` are keys of the matrix; ``noise`` is the standard deviation of the logarithms of trials and of steps;
    ``once`` are the backends of one trial.
    """
    backends = {name: make_backend(name) for name in [REFERENCE, *factors]}
    overrides = {name.replace("__", "."): value for name, value in values.items()}
    matrix = make_matrix(
        {"training.timed_windows": 8, "training.warmup_windows": 2} | overrides,
        backend=list(factors),
        accumulate=list(accumulate),
    )
    cells = expand(matrix, backends, 0)
    alone = [cell.cell_id for cell in cells if cell.backend in once]
    manifest = start.create(folder, matrix, cells, backends, cold=False, once=alone)
    generator = random.Random(seed)

    def script(spec: Spec, number: int) -> Outcome | None:
        cell = spec.cell
        if cell.backend == REFERENCE:
            return None
        trial = math.exp(generator.gauss(0, noise))
        steps = [
            STEP_S * factors[cell.backend] * trial * math.exp(generator.gauss(0, noise))
            for _ in range(cell.timed_windows)
        ]
        steps = change(cell, number, steps) if change else steps
        results = [
            make_rank(cell, spec.passes, rank, time=make_time(cell, step_seconds=steps))
            for rank in range(cell.world_size)
        ]
        if ranks:
            results = ranks(cell, results)
        return Outcome(status=Status.OK, reason="", ranks=results, wall_s=1.0)

    Runner(folder, manifest, backends, FakeLauncher(script), Mock(), interim_analysis).run()  # type: ignore[arg-type]
    return load(folder)


def report(folder: Path) -> int:
    """Write the tables and plots of a simulated run; the exit status."""
    return finish(folder, folder / "plots")
