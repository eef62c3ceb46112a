"""The step time of a cell with its interval, and tests of the sample: outliers, drift, bimodality and imbalance.

Summary, report, plots, frames and citations all show this step time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import pandas as pd

from bench.judge.statistics import MIN_TRIALS, SEED, TRIM, Array, bootstrap, too_few, trimmed_mean
from bench.judge.tables import good_trials

NAME = f"{100 * TRIM:g} % trimmed mean"
"""Name of the estimate in headers and captions. It is a mean of logarithms, so a geometric one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Seconds of an optimizer step: the trimmed mean of the logarithms of trials' medians, as in ``ratio``."""

    seconds: float
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval over the trials of the run; None with fewer than MIN_TRIALS trials."""
    num_trials: int
    reason: str = ""
    """Why there is no interval."""


@lru_cache(maxsize=4096)  # quotes, tables and figures of a report ask for the same cells
def estimate(medians: tuple[float, ...]) -> Estimate:
    """The estimate from the seconds of each trial, at least one. Its interval covers this run, not other days."""
    if not medians:
        raise ValueError("an estimate needs a trial")
    logs, n = np.log(np.array([medians], dtype=float)), len(medians)
    seconds = math.exp(trimmed_mean(logs)[0])
    if n < MIN_TRIALS:
        return Estimate(seconds=seconds, num_trials=n, reason=too_few(n, "trial"))
    (low,), (high,) = bootstrap(logs).interval()
    return Estimate(seconds=seconds, low=math.exp(low), high=math.exp(high), num_trials=n)


def step_times(trials: pd.DataFrame) -> dict[str, Estimate]:
    """The estimate of each cell, by id, over its ok trials, from rows of the trials table.

    If none is ok, over all trials with a step time; such a cell is shown with its status. A cell without step times is
    left out.
    """
    seconds = trials["step_time_s"].to_numpy(dtype=float, na_value=np.nan)
    used = good_trials(trials[np.isfinite(seconds) & (seconds > 0)])
    return {
        str(cell_id): estimate(tuple(values.astype(float)))
        for cell_id, values in used.groupby("cell_id", sort=False)["step_time_s"]
    }


OUTLIER = 14.826
"""Limit in median absolute deviations: ten standard deviations of a normal distribution, as in hyperfine's
outlier_detection.rs."""
ALPHA = 0.01
"""Significance level of the tests for drift and bimodality, which are run for every cell of a report."""
MIN_BIMODAL = 8
"""Least number of trials to tell two modes from chance."""
NULLS = 4000
"""Number of simulated unimodal samples per kind of noise."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Change of step times in the course of a run."""

    change: float
    """Relative change from the first to the last slot: 0.05 is 5 % slower at the end."""
    p_value: float
    """p-value of the hypothesis that there is no drift."""

    @property
    def found(self) -> bool:
        return self.p_value < ALPHA


@dataclass(frozen=True, slots=True)
class Modes:
    """The best split of values into two clusters."""

    ratio: float
    """Centre of the upper cluster over that of the lower."""
    share: float
    """Share of the values in the upper cluster."""
    p_value: float
    """p-value of the hypothesis that there is only one mode."""

    @property
    def found(self) -> bool:
        return self.p_value < ALPHA


def outliers(values: Sequence[float]) -> list[int]:
    """Indices of the values more than OUTLIER median absolute deviations from the median.

    Outliers are reported, never dropped. Empty if more than half of the values are equal.
    """
    if not len(values):
        return []
    distances = np.abs(np.asarray(values, dtype=float) - np.median(values))
    scale = np.median(distances)
    return [] if scale == 0 else [int(i) for i in np.flatnonzero(distances > OUTLIER * scale)]


def drift(slots: Sequence[float], medians: Sequence[float]) -> Drift:
    """Change of a cell's trial medians over the slots in which the trials ran.

    Theil-Sen slope of the logarithms (Sen 1968) over all slots, p-value of Kendall's tau; p = 1 below 5 trials.
    """
    from scipy import stats  # takes half a second to import, and only ``check`` asks for drift

    x, y = np.asarray(slots, dtype=float), np.log(np.asarray(medians, dtype=float))
    if len(x) < 5 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Drift(0.0, 1.0)
    slope = float(stats.theilslopes(y, x)[0])
    return Drift(math.expm1(slope * float(np.ptp(x))), float(stats.kendalltau(x, y).pvalue))


def bimodal(values: Sequence[float]) -> Modes | None:
    """Whether trial medians come from two modes, such as fast and slow placements; None with fewer than MIN_BIMODAL.

    The logarithms are split where the sum of squares within the two clusters is least; each cluster has at least two
    values and a tenth of all. The statistic is Ashman's D, sqrt(2) |m1 - m2| / sqrt(s1^2 + s2^2) (Ashman, Bird and
    Zepf, Astronomical Journal 108, 1994); its p-value is the largest of those under simulated normal noise, uniform
    noise and Student's t with 4 degrees of freedom, so that neither flat nor heavy-tailed noise passes for a second
    mode.
    """
    n = len(values)
    if n < MIN_BIMODAL:
        return None
    logs = np.sort(np.log(np.asarray(values, dtype=float)))
    found, at = _separation(logs[None])
    cut = int(at[0])
    p_value = max((1 + int((null >= found[0]).sum())) / (1 + NULLS) for null in _nulls(n))
    return Modes(math.exp(logs[cut:].mean() - logs[:cut].mean()), 1 - cut / n, p_value)


def _separation(ordered: Array) -> tuple[Array, Array]:
    """Ashman's D at the best split of each sorted row, and the index of the split."""
    n = ordered.shape[1]
    least = max(2, math.ceil(n / 10))
    cuts = np.arange(least, n - least + 1)
    x = ordered - ordered.mean(axis=1, keepdims=True)
    sums, squares = x.cumsum(axis=1)[:, cuts - 1], (x**2).cumsum(axis=1)[:, cuts - 1]
    total = (x**2).sum(axis=1, keepdims=True)
    means = sums / cuts, -sums / (n - cuts)
    spreads = squares / cuts - means[0] ** 2, (total - squares) / (n - cuts) - means[1] ** 2
    within = cuts * spreads[0] + (n - cuts) * spreads[1]
    best = within.argmin(axis=1)[:, None]
    apart, scatter = (np.take_along_axis(v, best, 1)[:, 0] for v in (means[1] - means[0], spreads[0] + spreads[1]))
    smallest = np.finfo(float).eps * np.maximum(total[:, 0], np.finfo(float).tiny)
    return math.sqrt(2) * apart / np.sqrt(np.maximum(scatter, smallest)), cuts[best[:, 0]]


@cache
def _nulls(n: int) -> tuple[Array, ...]:
    """Ashman's D of simulated unimodal samples, for each kind of noise."""
    rng = np.random.default_rng(SEED)
    kinds = rng.normal(size=(NULLS, n)), rng.uniform(size=(NULLS, n)), rng.standard_t(4, size=(NULLS, n))
    return tuple(_separation(np.sort(kind, axis=1))[0] for kind in kinds)


def imbalance(steps_of_ranks: Sequence[Sequence[float]]) -> float:
    """How much the slowest rank delays the others: the median over steps of the ratio of slowest to median rank.

    Takes a list of step times in seconds per rank, all of equal length.
    """
    ranks = np.asarray(steps_of_ranks, dtype=float)
    return float(np.median(ranks.max(axis=0) / np.median(ranks, axis=0)))


def slowest(steps_of_ranks: Sequence[Sequence[float]]) -> int:
    """The rank whose steps took longest in all; takes the same lists."""
    return max(range(len(steps_of_ranks)), key=lambda rank: sum(steps_of_ranks[rank]))
