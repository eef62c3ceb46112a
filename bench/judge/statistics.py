"""Ratios of step times with intervals. docs/statistics.md has the simulations behind each choice.

1. A trial counts once, with the median of its steps: they share what varies between process groups.
2. Logarithms are combined: differences within blocks if both cells ran in the same blocks, which removes shared drift,
   else each cell on its own. The centre is the 20 % trimmed mean.
3. The bootstrap resamples trials, and no steps within them (Davison and Hinkley 1997, section 3.8).
4. The percentile interval is expanded for few trials: the quantile Phi(-sqrt(n / (n - 1)) t(1 - alpha/2, n - 1))
   instead of alpha/2 (Hesterberg, The American Statistician 69(4), 2015).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

LEVEL = 0.95
TRIM = 0.2
"""Share of the trials trimmed on each side: Wilcox, Introduction to Robust Estimation and Hypothesis Testing."""
RESAMPLES = 9999
SEED = 20

MIN_TRIALS = 5
"""Least number of trials, or of blocks with both cells, for an interval: four values do not support a 95 % level."""
MIN_REPEATS, MAX_REPEATS = 10, 600
"""Default numbers of blocks at which an adaptive run looks first and stops at the latest; docs/statistics.md."""

MARGIN = 0.02
"""Two cells are the same if their ratio is between 1 / (1 + MARGIN) and 1 + MARGIN."""
PRECISION = 0.02
"""A run stops when intervals are narrower than this, from end to end, relative to the ratio."""
SAME_WIDTH = 0.65
"""Width w of an interval, relative to the margin, that shows a difference of half the margin to be inside the margin in
five cases of six: (margin/2 - w/2) / (w/2/1.96) = 1.06 standard errors to spare."""


@dataclass(frozen=True)
class Sample:
    """The step times of one cell."""

    trials: Sequence[float]
    """Seconds per optimizer step of each trial: the median of its steps after warm-up."""
    blocks: Sequence[int] = ()
    """Block of each trial: trials of one block ran next to each other in time. Empty if there were no blocks."""

    @cached_property
    def logs(self) -> Array:
        """Logarithms of the seconds; they must be above 0 and finite."""
        seconds = np.asarray(self.trials, dtype=float)
        if not (np.isfinite(seconds) & (seconds > 0)).all():
            raise ValueError("step times must be above 0 s")
        return np.asarray(np.log(seconds))

    @cached_property
    def by_block(self) -> dict[int, float]:
        """Mean logarithm of the trials of each block; an ABBA block has two."""
        blocks = np.asarray(self.blocks)
        return {block: self.logs[blocks == block].mean() for block in sorted(set(self.blocks))}


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The step time of a relative to that of b, with its uncertainty."""

    ratio: float
    """Best estimate; below 1 if a is faster."""
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval; None with fewer than MIN_TRIALS trials."""
    p_different: float | None = None
    """Two-sided p-value of the hypothesis that the ratio is 1: below 0.05 if and only if the interval excludes 1."""
    p_same: float | None = None
    """p-value of the hypothesis that the ratio is outside the margin: two one-sided tests (Schuirmann 1987)."""
    num_trials: int
    """Number of blocks if paired, else of trials of the cell with fewer."""
    paired: bool

    @property
    def lacks(self) -> tuple[str, ...]:
        """Why there is no interval, as from ``too_few``; empty if there is one."""
        if self.low is not None:
            return ()
        return too_few(self.num_trials, "block", " with both cells") if self.paired else too_few(self.num_trials)

    @property
    def reason(self) -> str:
        """The same in one clause."""
        return ", and ".join(self.lacks)

    @property
    def width(self) -> float:
        """high / low - 1; infinite without an interval."""
        return math.inf if self.low is None or self.high is None else self.high / self.low - 1

    def widened(self, by: float) -> Interval:
        """The interval with both ends farther out by a logarithm; p_different is 1 if it contains 1 then."""
        if not by or self.low is None or self.high is None:
            return self
        low, high = self.low * math.exp(-by), self.high * math.exp(by)
        p_different = 1.0 if low <= 1 <= high else self.p_different
        return replace(self, low=low, high=high, p_different=p_different)

    def inverse(self) -> Interval:
        """The interval of b relative to a."""
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return replace(self, ratio=1 / self.ratio, low=low, high=high)


def ratio(a: Sample, b: Sample, margin: float = MARGIN) -> Interval:
    """The step time of ``a`` relative to that of ``b``.

    Trials of a common block are paired, which removes shared drift; with fewer than MIN_TRIALS such pairs, all trials
    are used unpaired. ``ratio(b, a)`` is exactly the inverse, since the same direction of the two is resampled.
    """
    logs, swapped = _logs(a, b)
    found = _interval(margin, *(tuple(values.tolist()) for values in logs))
    return found.inverse() if swapped else found


@lru_cache(maxsize=16384)  # every pair of a report comes twice, with either cell as the baseline
def _interval(margin: float, *resampled: tuple[float, ...]) -> Interval:
    """The interval of what ``_logs`` returns."""
    logs = [np.array(values) for values in resampled]
    n, paired = min(map(len, logs)), len(logs) == 1
    if n >= MIN_TRIALS:
        drawn = bootstrap(*(values[None] for values in logs))
        (low,), (high,) = drawn.interval()
        return Interval(
            ratio=math.exp(drawn.centres[0]),
            low=math.exp(low),
            high=math.exp(high),
            p_different=float(drawn.p_different()[0]),
            p_same=float(drawn.p_same(margin)[0]),
            num_trials=n,
            paired=paired,
        )
    centre = float(trimmed_mean(logs[0]) - (0 if paired else trimmed_mean(logs[1])))
    return Interval(ratio=math.exp(centre), num_trials=n, paired=paired)


def _logs(a: Sample, b: Sample) -> tuple[list[Array], bool]:
    """What is resampled: differences of logarithms by block, or both samples; and whether they describe b over a."""
    if not len(a.trials) or not len(b.trials):
        raise ValueError("a ratio needs a trial on either side")
    blocks = [block for block in a.by_block if block in b.by_block]
    if len(blocks) >= MIN_TRIALS or (blocks and max(len(a.trials), len(b.trials)) < MIN_TRIALS):
        apart = np.array([a.by_block[block] - b.by_block[block] for block in blocks])
        swap = sorted(apart.tolist()) > sorted((-apart).tolist())
        return [-apart if swap else apart], swap
    ours, theirs = a.logs, b.logs
    swap = (len(ours), sorted(ours.tolist())) > (len(theirs), sorted(theirs.tolist()))
    return ([theirs, ours] if swap else [ours, theirs]), swap


def too_few(n: int, what: str = "trial", which: str = "") -> tuple[str, str]:
    """Why n values give no interval: how many there are, and how many are needed."""
    return f"no interval: {n} {what}{'' if n == 1 else 's'}{which}", f"{MIN_TRIALS} are needed"


def trimmed_mean(values: Array) -> Array:
    """Mean along the last axis without the smallest and the largest TRIM share of the values."""
    n = values.shape[-1]
    out = int(TRIM * n)
    return np.asarray(np.sort(values, axis=-1)[..., out : n - out].mean(axis=-1))


@dataclass(frozen=True)
class Bootstrap:
    """Resampled centres of many comparisons, as logarithms: one row per comparison."""

    centres: Array
    draws: Array
    inflation: Array
    """Factor by which the bootstrap underestimates the standard error, per comparison: sqrt(n / (n - 1)) if paired."""
    freedom: Array
    """Degrees of freedom of Student's t, per comparison."""

    def interval(self) -> tuple[Array, Array]:
        """Ends of the expanded percentile intervals."""
        tails = special.ndtr(-self.inflation * special.stdtrit(self.freedom, (1 + LEVEL) / 2))
        ends = [np.quantile(draws, (tail, 1 - tail)) for draws, tail in zip(self.draws, tails, strict=True)]
        low, high = np.array(ends).reshape(-1, 2).T
        return np.asarray(low), np.asarray(high)

    def p_different(self) -> Array:
        """Two-sided p-values of the hypothesis that the centre is 0; consistent with ``interval``."""
        return np.asarray(np.minimum(1, 2 * np.minimum(self._p(0, 1), self._p(0, -1))))

    def p_same(self, margin: float) -> Array:
        """p-values of the hypothesis that the centre is outside the margin: the larger of two one-sided ones."""
        edge = math.log1p(margin)
        return np.asarray(np.maximum(self._p(-edge, 1), self._p(edge, -1)))

    @cached_property
    def _errors(self) -> Array:
        """Standard errors of the centres."""
        return np.asarray(self.draws.std(axis=1))

    def _p(self, value: float, sign: int) -> Array:
        """One-sided p-values of the hypothesis that the centre is at most the value; with sign -1, at least.

        From the share of draws on the wrong side, or from a normal tail if there are too few such draws.
        """
        wrong = self.draws <= value if sign > 0 else self.draws >= value
        tails, few = np.count_nonzero(wrong, axis=1) / wrong.shape[1], 5 / wrong.shape[1]
        with np.errstate(divide="ignore", invalid="ignore"):
            normal = sign * (self.centres - value) / self._errors
        normal = np.where(np.isnan(normal), 0, normal)
        reach = -special.ndtri(few)
        scores = np.where(tails < few, np.maximum(normal, reach), -special.ndtri(np.maximum(tails, few)))
        return np.asarray(special.stdtr(self.freedom, -scores / self.inflation))


def bootstrap(a: Array, b: Array | None = None, *, resamples: int = RESAMPLES, seed: int = SEED) -> Bootstrap:
    """Resample comparisons: one row per comparison, one column per trial or block.

    The centre is the trimmed mean of ``a``, which has single samples or paired differences, or that mean minus the one
    of ``b``. The draws are those of ``scipy.stats.bootstrap``, computed faster for thousands of rows. With two samples,
    the degrees of freedom are Welch's, and the inflation is the ratio of the unbiased variance to the bootstrap's.
    """
    rows, n = a.shape
    draws = resampled_means(a, int(TRIM * n), resamples, seed)
    if b is None:
        full = np.ones(rows)
        return Bootstrap(trimmed_mean(a), draws, full * math.sqrt(n / (n - 1)), full * (n - 1))
    draws = draws - resampled_means(b, int(TRIM * b.shape[1]), resamples, seed + 1)
    sizes = n, b.shape[1]
    parts = [np.maximum(s.var(axis=1, ddof=1), np.finfo(float).tiny) / s.shape[1] for s in (a, b)]
    biased = sum(part * (size - 1) / size for part, size in zip(parts, sizes, strict=True))
    welch = sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
    both = sum(parts)
    with np.errstate(invalid="ignore", divide="ignore"):
        freedom = np.where(welch > 0, np.square(both) / welch, min(sizes) - 1)
    return Bootstrap(trimmed_mean(a) - trimmed_mean(b), draws, np.sqrt(both / biased), freedom)


def resampled_means(a: Array, out: int, resamples: int, seed: int) -> Array:
    """Means of resamples of each row without the ``out`` smallest and largest values.

    All rows are resampled with the same random numbers, which pick the same order statistics of every row: the mean
    of a resample is a weighted sum of the sorted row, with the same weights for every row.
    """
    return np.asarray(np.sort(a, axis=1) @ _weights(a.shape[1], out, resamples, seed).T)


@lru_cache(maxsize=4)
def _weights(n: int, out: int, resamples: int, seed: int) -> Array:
    """Weights of the n order statistics in each resample without its ``out`` smallest and largest values."""
    picked = np.sort(np.random.default_rng(seed).integers(0, n, (resamples, n)), axis=1)[:, out : n - out]
    places = picked + n * np.arange(resamples)[:, None]
    return np.asarray(np.bincount(places.ravel(), minlength=n * resamples).reshape(resamples, n) / (n - 2 * out))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for multiple testing: Holm, Scandinavian Journal of Statistics 6, 1979.

    The i-th smallest of m is multiplied by m - i + 1, made monotone, and bounded by 1.
    """
    values = np.asarray(p_values, dtype=float)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)))
    return [float(value) for value in adjusted]


def equivalent(interval: Interval, margin: float = MARGIN) -> bool:
    """Whether the whole 95 % interval is inside the margin, which two one-sided tests at 5 % would not even need."""
    low, high = interval.low, interval.high
    return low is not None and high is not None and 1 / (1 + margin) <= low and high <= 1 + margin


def trials_to_show(interval: Interval, difference: float = 0.05, power: float = 0.8) -> int:
    """About how many trials, or blocks, show a difference with this power, from the width of an interval.

    The normal approximation of a two-sided test at 5 %: n (z + z') ** 2 (s / log(1 + difference)) ** 2, s being the
    standard error with n (Chow, Shao, Wang and Lokhnygina, Sample Size Calculations in Clinical Research, section 3.1).
    """
    n = interval.num_trials
    error = math.log1p(interval.width) / (2 * special.stdtrit(n - 1, (1 + LEVEL) / 2))
    scores = special.ndtri((1 + LEVEL) / 2) + special.ndtri(power)
    return math.ceil(n * float(scores * error / math.log1p(difference)) ** 2)


def required_trials(interval: Interval, precision: float = PRECISION) -> int:
    """How many more trials, or blocks, will make the interval narrower than the precision; 0 if it already is.

    The width falls with the square root of their number. The result at most doubles the number: with few trials the
    noise is not known well enough to plan further ahead.
    """
    if interval.width < precision:
        return 0
    n = interval.num_trials
    if interval.low is None:
        return max(1, MIN_REPEATS - n)
    return max(1, min(n, math.ceil(n * (interval.width / precision) ** 2) - n))
