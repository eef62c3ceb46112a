"""How other benchmark tools would judge the same data: their published rules, on arrays of comparisons.

A rule takes seconds of the steps of two cells, arrays over comparisons, trials and steps, and uses as many trials as
its tool runs by default. A word for "the same" is in none of them: what is not called different counts as that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bench.judge.statistics import Array

Signs = NDArray[np.int_]
"""What a rule says of each comparison: 1 for slower, -1 for faster, 0 for not different."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One tool's rule."""

    name: str
    trials: int
    judge: Callable[[Array, Array], Signs]
    about: str


def _sign(ratio: Array, different: NDArray[np.bool_]) -> Signs:
    return np.where(different, np.where(ratio > 1, 1, -1), 0)


def one_mean(a: Array, b: Array) -> Signs:
    """Means of the steps of one run each, different if they are more than 2 % apart."""
    ratio = a[:, 0].mean(axis=1) / b[:, 0].mean(axis=1)
    return _sign(ratio, np.abs(np.log(ratio)) > np.log(1.02))


def hyperfine(a: Array, b: Array) -> Signs:
    """Means of 10 runs, with ratio * sqrt((s/m)^2 + (s/m)^2), the scatter of runs; different if 1 is beyond it."""
    runs = [cell[:, :10].mean(axis=2) for cell in (a, b)]
    mean_a, mean_b = (run.mean(axis=1) for run in runs)
    sd_a, sd_b = (run.std(axis=1, ddof=1) for run in runs)
    ratio = mean_a / mean_b
    sigma = ratio * np.sqrt((sd_a / mean_a) ** 2 + (sd_b / mean_b) ** 2)
    return _sign(ratio, np.abs(ratio - 1) > sigma)


def pyperf(processes: int) -> Callable[[Array, Array], Signs]:
    """The rule for a number of processes: Student's t on 3 values each after 1 to warm up, all taken as independent."""

    def judge(a: Array, b: Array) -> Signs:
        values = [cell[:, :processes, 1:4].reshape(len(cell), -1) for cell in (a, b)]
        mean_a, mean_b = (value.mean(axis=1) for value in values)
        sd_a, sd_b = (value.std(axis=1, ddof=1) for value in values)
        n = values[0].shape[1]
        error = np.sqrt((sd_a**2 + sd_b**2) / n)
        reach = error * stats.t.ppf(0.975, 2 * n - 2)
        return _sign(mean_a / mean_b, np.abs(mean_a - mean_b) > reach)

    return judge


def asv(factor: float) -> Callable[[Array, Array], Signs]:
    """The rule for a factor: U test on 10 steps of 2 processes with p < 0.002, and medians farther apart than that."""

    def judge(a: Array, b: Array) -> Signs:
        ours, theirs = (cell[:, :2, :10].reshape(len(cell), -1) for cell in (a, b))
        p_values = stats.mannwhitneyu(ours, theirs, axis=1, method="asymptotic").pvalue
        ratio = np.median(ours, axis=1) / np.median(theirs, axis=1)
        different = (p_values < 0.002) & (np.abs(np.log(ratio)) > np.log(factor))
        return _sign(ratio, different)

    return judge


RULES: tuple[Rule, ...] = (
    Rule(
        "mean of one run",
        1,
        one_mean,
        "means of one trial each more than 2 % apart",
    ),
    Rule(
        "asv",
        2,
        asv(1.1),
        "its default: U test with p < 0.002 on 2 processes, and medians over 10 % apart",
    ),
    Rule("asv, factor 1.02", 2, asv(1.02), "the same, and medians over 2 % apart"),
    Rule("hyperfine", 10, hyperfine, "10 runs; 1 is not within the ratio +- its sigma"),
    Rule(
        "pyperf",
        20,
        pyperf(20),
        "20 processes of 3 values; Student's t on all 60 as if independent, p < 0.05",
    ),
    Rule(
        "pyperf, 100 processes",
        100,
        pyperf(100),
        "the same: values of one process are not independent",
    ),
)
