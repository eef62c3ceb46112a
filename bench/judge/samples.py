"""The step time of a cell with its interval, and tests of its trials.

Summary, report, plots, frames and citations all show this step time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from bench.judge.statistics import MIN_TRIALS, Array, Interval, LogMean, over_runs
from bench.plan.cell import Status

NAME = "geometric mean"
"""Name of the estimate in headers and captions."""


class Estimate(NamedTuple):
    """Seconds of an optimizer step: the geometric mean of trials' medians, as in ``ratio``."""

    seconds: float
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval over the trials of the run; None with fewer than MIN_TRIALS trials.

    Of several runs it is over runs, and None with fewer than MIN_RUNS.
    """


def estimate(medians: Sequence[float] | Array) -> Estimate:
    """The estimate from the seconds of each trial, at least one, with its interval in this run."""
    logs = np.log(np.asarray(medians, dtype=float))
    seconds = math.exp(logs.mean())
    if len(logs) < MIN_TRIALS:
        return Estimate(seconds)
    low, high = LogMean.of(logs).interval()
    return Estimate(seconds, math.exp(low), math.exp(high))


def estimate_over_runs(runs: Sequence[Sequence[float]]) -> Estimate:
    """The estimate from the trials of several runs, each of which counts once."""
    alone: list[Interval] = []
    for trials in runs:
        of_run, n = estimate(trials), len(trials)
        alone.append(
            Interval(
                ratio=of_run.seconds, low=of_run.low, high=of_run.high, num_trials=n, paired=False
            )
        )
    found = over_runs(alone)
    return Estimate(found.ratio, found.low, found.high)


OUTLIER = 14.826
"""Limit in median absolute deviations: ten standard deviations of a normal distribution, as in
hyperfine's outlier_detection.rs."""
ALPHA = 0.01
"""Significance level of the tests for drift and bimodality, which are run for every cell of a
report."""
MOST = 500
"""Trials of a cell in which drift and modes are looked for, since their time and memory grow with
the square."""
MIN_BIMODAL = 8
"""Least number of trials to tell two modes from chance."""
NULLS = 4000
"""Number of simulated unimodal samples per kind of noise."""
SEED = 20


class Tested(NamedTuple):
    """The size of an effect, and how surely there is one."""

    size: float
    p_value: float
    """Of the hypothesis that there is none."""
    share: float = 1.0
    """Of the values that have it."""

    @property
    def found(self) -> bool:
        return self.p_value < ALPHA


def block_effects(trials: pd.DataFrame) -> tuple[pd.Series, Tested] | None:
    """How much longer all cells together took in each block in which most cells ran.

    By block: the mean over cells of the logarithm of a trial's step time over its cell's mean; the
    size is the largest difference between two. The hypothesis is that blocks do not differ
    (Friedman, JASA 32, 1937). None with too few cells or blocks.
    """
    from scipy import stats

    known = trials[trials["step_time_s"].notna() & (trials["status"] == Status.OK)]
    seconds = known.pivot_table(index="repeat", columns="cell_id", values="step_time_s")
    logs = seconds.astype(float).map(math.log)
    logs = logs.loc[:, logs.notna().sum() == logs.notna().sum().max()].dropna()
    if len(logs) < 3 or logs.shape[1] < 3:
        return None
    effects = (logs - logs.mean()).mean(axis=1)
    with np.errstate(invalid="ignore"):  # all blocks alike: no p-value
        p_value = float(stats.friedmanchisquare(*logs.to_numpy()).pvalue)
    return effects, Tested(float(np.ptp(effects)), p_value)


def outliers(values: Sequence[float]) -> list[int]:
    """Indices of the values more than OUTLIER median absolute deviations from the median.

    Outliers are reported, never dropped. Empty if more than half of the values are equal.
    """
    if not len(values):
        return []
    distances = np.abs(np.asarray(values, dtype=float) - np.median(values))
    scale = np.median(distances)
    if scale == 0:
        return []
    found: list[int] = np.flatnonzero(distances > OUTLIER * scale).tolist()
    return found


def drift(slots: Sequence[float], medians: Sequence[float]) -> Tested:
    """Relative change of a cell's trial medians from first to last slot; 0.05 is 5 % slower.

    Theil-Sen slope of the logarithms (Sen 1968) over all slots, p-value of Kendall's tau; p = 1
    below 5 trials.
    """
    from scipy import stats  # takes half a second to import, and only ``check`` asks for drift

    x, y = _thinned(slots), np.log(_thinned(medians))
    if len(x) < 5 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Tested(0.0, 1.0)
    slope = float(stats.theilslopes(y, x)[0])
    return Tested(math.expm1(slope * float(np.ptp(x))), float(stats.kendalltau(x, y).pvalue))


def _thinned(values: Sequence[float]) -> Array:
    """The values, or MOST of them, evenly spaced: what is in so many is not missed for the rest."""
    every = np.asarray(values, dtype=float)
    if len(every) <= MOST:
        return every
    chosen: Array = every[np.linspace(0, len(every) - 1, MOST).round().astype(int)]
    return chosen


def bimodal(values: Sequence[float]) -> Tested | None:
    """Whether trial medians come from two modes, such as fast and slow placements.

    None with fewer than MIN_BIMODAL. The size is the centre of the upper cluster over that of the
    lower; the share is that of the upper. The logarithms are split where the sum of squares within
    the two clusters is least; each cluster has at least two values and a tenth of all. The
    statistic is Ashman's D, sqrt(2) |m1 - m2| / sqrt(s1^2 + s2^2) (Ashman, Bird and Zepf,
    Astronomical Journal 108, 1994); its p-value is the largest of those under simulated normal
    noise, uniform noise and Student's t with 4 degrees of freedom, so that neither flat nor
    heavy-tailed noise passes for a second mode.
    """
    if len(values) < MIN_BIMODAL:
        return None
    logs = np.sort(np.log(_thinned(values)))
    n = len(logs)
    found, at = _separation(logs[None])
    cut = int(at[0])
    p_value = 0.0
    for null in _nulls(n):
        num_above = int((null >= found[0]).sum())
        p_value = max(p_value, (1 + num_above) / (1 + NULLS))
    return Tested(math.exp(logs[cut:].mean() - logs[:cut].mean()), p_value, 1 - cut / n)


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
    apart = np.take_along_axis(means[1] - means[0], best, 1)[:, 0]
    scatter = np.take_along_axis(spreads[0] + spreads[1], best, 1)[:, 0]
    smallest = np.finfo(float).eps * np.maximum(total[:, 0], np.finfo(float).tiny)
    return math.sqrt(2) * apart / np.sqrt(np.maximum(scatter, smallest)), cuts[best[:, 0]]


@cache
def _nulls(n: int) -> tuple[Array, ...]:
    """Ashman's D of simulated unimodal samples, for each kind of noise."""
    rng = np.random.default_rng(SEED)
    kinds = (
        rng.normal(size=(NULLS, n)),
        rng.uniform(size=(NULLS, n)),
        rng.standard_t(4, size=(NULLS, n)),
    )
    return tuple(_separation(np.sort(kind, axis=1))[0] for kind in kinds)


def imbalance(steps_of_ranks: Sequence[Sequence[float]]) -> float:
    """How much the slowest rank delays the others: its ratio to the median one, median over steps.

    Takes a list of step times in seconds per rank, all of equal length.
    """
    ranks = np.asarray(steps_of_ranks, dtype=float)
    return float(np.median(ranks.max(axis=0) / np.median(ranks, axis=0)))


def slowest(steps_of_ranks: Sequence[Sequence[float]]) -> int:
    """The rank whose steps took longest in all; takes the same lists."""
    return max(range(len(steps_of_ranks)), key=lambda rank: sum(steps_of_ranks[rank]))
