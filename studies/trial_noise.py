"""The noise of real trials: residuals of the committed runs' step times, and reports made by resampling them.

Blocks are resampled in runs of consecutive ones (moving-block bootstrap, Kuensch, Annals of Statistics 17, 1989), with
all cells of a block together. So bursts, drift and two modes stay as they were measured, and so does what the cells of
a block share. Each draw gets a random sign (wild bootstrap, Wu, Annals of Statistics 14, 1986), so that the true ratio
of any two cells is 1: the residuals' own means are up to 2.6 % away from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.judge.baseline import baseline_of
from bench.judge.loading import Run, load
from bench.judge.statistics import Array
from bench.plan.cell import Status
from studies import ROOT, realtrials

RUNS = ("cpu", "popular")
"""Committed runs of several cells, under results/."""
BLOCKS = 2
"""Consecutive blocks that are drawn together: the order of cells is reversed in every second one."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Residuals of one source: logarithms of trials' step times less their cell's mean."""

    name: str
    parts: tuple[Array, ...]
    """Of each run: blocks x cells."""

    @property
    def cells(self) -> int:
        return min(part.shape[1] for part in self.parts)

    @property
    def blocks(self) -> int:
        return min(len(part) for part in self.parts)

    @property
    def deviation(self) -> float:
        """Standard deviation of the difference of two cells in a block."""
        differences = [part[:, 1:] - part[:, :1] for part in self.parts]
        return float(np.mean([part.std(axis=0, ddof=1).mean() for part in differences]))

    def reports(self, number: int, cells: int, blocks: int, rng: np.random.Generator) -> Array:
        """Residuals of reports x blocks x cells; the cells of a report are different ones."""
        found = np.empty((number, blocks, cells))
        for i in range(number):
            part = self.parts[rng.integers(len(self.parts))]
            rows, columns = part.shape
            chosen = rng.choice(columns, size=cells, replace=False)
            starts = rng.integers(rows, size=-(-blocks // BLOCKS))
            places = (starts[:, None] + np.arange(BLOCKS)).ravel()[:blocks] % rows
            signs = np.repeat(rng.choice((-1.0, 1.0), size=len(starts)), BLOCKS)[:blocks]
            found[i] = signs[:, None] * part[places][:, chosen]
        return found


def residuals(run: Run) -> Array:
    """The residuals of a run: blocks in which all compared cells ran x these cells."""
    trials = run.tables.trials
    known = trials[(trials["status"] == Status.OK) & trials["cell_id"].isin(compared(run))]
    seconds = known.pivot_table(index="repeat", columns="cell_id", values="step_time_s").astype(
        float
    )
    seconds = seconds.loc[:, seconds.notna().sum() >= seconds.notna().sum().median()].dropna()
    logs = np.log(seconds.to_numpy())
    return np.asarray(logs - logs.mean(axis=0))


def compared(run: Run) -> Sequence[str]:
    """Ids of the cells that a report compares, and of the A/A pair: a baseline elsewhere is compared with nothing."""
    baseline, cells = baseline_of(run.manifest), run.cells.items()
    paired = {dataclasses.replace(cell, twin="").cell_id for _, cell in cells if cell.twin}
    known = [(cell_id, cell) for cell_id, cell in cells if not cell.is_reference]
    return [
        cell_id
        for cell_id, cell in known
        if cell.twin or cell.backend != baseline or cell_id in paired
    ]


def sources() -> Iterator[Noise]:
    """The noise of each committed run of several cells, and of the runs of one cell together."""
    for name in RUNS:
        yield Noise(name, (residuals(load(ROOT / "results" / name)),))
    yield Noise("noise", tuple(map(residuals, realtrials.stored(realtrials.REAL))))


def steps(name: str = RUNS[0]) -> Array:
    """Step times of the trials of a committed run less their median, as logarithms: trials x steps after warm-up."""
    steps: pd.DataFrame = load(ROOT / "results" / name).tables.steps
    rows = [
        np.log(group.to_numpy(dtype=float))
        for _, group in steps.groupby(["cell_id", "repeat"])["seconds"]
    ]
    longest = max(map(len, rows))
    return np.array([row - np.median(row) for row in rows if len(row) == longest])
