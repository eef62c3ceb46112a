"""Ratios of step times with intervals: the trial is the unit of replication, and trials of a block share drift.

How an interval is computed, and why; docs/statistics.md has the simulations behind each choice:

1. A trial is reduced to the median of its steps after ``warmup``. Steps of one trial are not independent: they
   all share what varies between process groups (placement, neighbours).
2. Logarithms of the medians are combined: log a - log b within each block if both cells ran in the same blocks, else
   each cell on its own. The centre is the 20 % trimmed mean, which costs 6 % more trials than the mean if the noise is
   normal, and fewer if it is not (a median of trials would cost 50 % more).
3. ``scipy.stats.bootstrap`` resamples the trials, but not the steps within them: a trial's median already contains
   their noise, which a second level would count twice (Davison and Hinkley 1997, section 3.8).
4. The percentile interval is expanded for few trials: Hesterberg, "What Teachers Should Know About the Bootstrap",
   The American Statistician 69(4), 2015: instead of alpha/2, the quantile
   Phi(-sqrt(n / (n - 1)) t(1 - alpha/2, n - 1)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.judge.bootstrap import (
    BATCH,
    RESAMPLES,
    SEED,
    Array,
    Bootstrap,
    bootstrap_one_sample,
    bootstrap_two_samples,
    difference_of_centres,
    trimmed_mean,
)
from bench.run.record import warmup

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


@dataclass(frozen=True, slots=True)
class Sample:
    """The step times of one cell."""

    trials: Sequence[Sequence[float]]
    """Seconds of the optimizer steps of each trial, the maximum over ranks."""
    blocks: Sequence[int] = ()
    """Block of each trial: trials of one block ran next to each other in time. Empty if there were no blocks."""

    def __post_init__(self) -> None:
        if self.blocks and len(self.blocks) != len(self.trials):
            raise ValueError(f"{len(self.trials)} trials have {len(self.blocks)} blocks")

    @property
    def medians(self) -> Array:
        """Seconds per step of each trial: the median of its steps after warm-up."""
        return np.array([trial_median(trial) for trial in self.trials], dtype=float)


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
    margin: float = MARGIN
    """Margin of ``p_same``."""
    num_trials: int
    """Number of blocks if paired, else of trials of the cell with fewer."""
    paired: bool
    reason: str = ""
    """Why there is no interval."""

    @property
    def width(self) -> float:
        """high / low - 1; infinite without an interval."""
        return math.inf if self.low is None or self.high is None else self.high / self.low - 1

    def inverse(self) -> Interval:
        """The interval of b relative to a."""
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return replace(self, ratio=1 / self.ratio, low=low, high=high)


def trial_median(seconds: Sequence[float]) -> float:
    """Median of a trial's steps after warm-up; they must be above 0 and finite."""
    steps = np.asarray(seconds, dtype=float)
    if steps.ndim != 1 or not steps.size or not (np.isfinite(steps) & (steps > 0)).all():
        raise ValueError("a trial is a list of step times, all above 0 s")
    return float(np.median(steps[warmup(seconds) :]))


def ratio(a: Sample, b: Sample, *, margin: float = MARGIN, resamples: int = RESAMPLES, seed: int = SEED) -> Interval:
    """The step time of ``a`` relative to that of ``b``.

    Trials of a common block are paired, which removes shared drift; with fewer than MIN_TRIALS such pairs, all trials
    are used unpaired. ``ratio(b, a)`` is exactly the inverse, since the same direction of the two is resampled.
    """
    return ratios([(a, b)], margin=margin, resamples=resamples, seed=seed)[0]


def ratios(
    pairs: Sequence[tuple[Sample, Sample]], *, margin: float = MARGIN, resamples: int = RESAMPLES, seed: int = SEED
) -> list[Interval]:
    """``ratio`` of many pairs.

    Pairs with the same number of blocks are resampled together; equal pairs, or a pair and its inverse, only once.
    """
    logs: dict[int, Array] = {}
    swapped: list[bool] = []
    keys: list[tuple[int, bytes]] = []
    rows: dict[int, dict[bytes, Array]] = {}
    found: dict[tuple[int, bytes], Interval] = {}
    for number, (a, b) in enumerate(pairs):
        for sample in (a, b):
            if id(sample) not in logs:
                logs[id(sample)] = np.log(sample.medians)
        ours, theirs, swap = _resampled(a, b, logs[id(a)], logs[id(b)])
        together = theirs is None and len(ours) >= MIN_TRIALS
        key = (len(ours), np.sort(ours).tobytes()) if together else (-1, number.to_bytes(8, "big"))
        if together:
            rows.setdefault(len(ours), {})[key[1]] = ours
        else:
            found[key] = _interval(ours, theirs, margin, resamples, seed)
        keys.append(key)
        swapped.append(swap)
    for size, those in rows.items():
        each, names = max(1, BATCH // resamples), list(those)
        for start in range(0, len(names), each):
            part = names[start : start + each]
            drawn = bootstrap_one_sample(np.stack([those[name] for name in part]), resamples=resamples, seed=seed)
            found |= zip([(size, name) for name in part], _intervals(drawn, size, margin, paired=True), strict=True)
    return [found[key].inverse() if swap else found[key] for key, swap in zip(keys, swapped, strict=True)]


def _intervals(drawn: Bootstrap, num_trials: int, margin: float, *, paired: bool) -> list[Interval]:
    """The interval of each row."""
    columns = (np.exp(drawn.centres), *map(np.exp, drawn.interval()), drawn.p_different(), drawn.p_same(margin))
    return [
        Interval(
            ratio=centre,
            low=low,
            high=high,
            p_different=different,
            p_same=same,
            margin=margin,
            num_trials=num_trials,
            paired=paired,
        )
        for centre, low, high, different, same in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _resampled(a: Sample, b: Sample, logs_a: Array, logs_b: Array) -> tuple[Array, Array | None, bool]:
    """Differences of logarithms by block, or both samples; and whether they describe b relative to a."""
    if not len(a.trials) or not len(b.trials):
        raise ValueError("a ratio needs a trial on either side")
    blocks = sorted(set(a.blocks) & set(b.blocks))
    if len(blocks) >= MIN_TRIALS or (blocks and max(len(a.trials), len(b.trials)) < MIN_TRIALS):
        ours, theirs = (_by_block(values, s.blocks, blocks) for values, s in ((logs_a, a), (logs_b, b)))
        apart = ours - theirs
        swap = sorted(apart.tolist()) > sorted((-apart).tolist())
        return -apart if swap else apart, None, swap
    swap = (len(a.trials), sorted(logs_a.tolist())) > (len(b.trials), sorted(logs_b.tolist()))
    return (logs_b, logs_a, True) if swap else (logs_a, logs_b, False)


def _by_block(values: Array, blocks: Sequence[int], wanted: Sequence[int]) -> Array:
    """Mean over a cell's trials in each block; an ABBA block has two."""
    if list(blocks) == list(wanted):
        return values
    own = np.asarray(blocks)
    return np.array([values[own == block].mean() for block in wanted])


def too_few(n: int, what: str, which: str = "") -> str:
    """The reason why n values give no interval."""
    return f"no interval: {n} {what}{'' if n == 1 else 's'}{which}, and {MIN_TRIALS} are needed"


def _interval(a: Array, b: Array | None, margin: float, resamples: int, seed: int) -> Interval:
    """The interval of unpaired samples, or of too few blocks if ``b`` is None."""
    if b is not None and (n := min(len(a), len(b))) >= MIN_TRIALS:
        drawn = bootstrap_two_samples(a[None], b[None], resamples=resamples, seed=seed)
        return _intervals(drawn, n, margin, paired=False)[0]
    paired = b is None
    n = len(a) if b is None else min(len(a), len(b))
    centre = float(trimmed_mean(a) if b is None else difference_of_centres(a, b))
    reason = too_few(n, "block", " with both cells") if paired else too_few(n, "trial")
    return Interval(ratio=math.exp(centre), num_trials=n, paired=paired, margin=margin, reason=reason)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for multiple testing: Holm, Scandinavian Journal of Statistics 6, 1979.

    The i-th smallest of m is multiplied by m - i + 1, made monotone, and bounded by 1.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def equivalent(interval: Interval, margin: float = MARGIN) -> bool:
    """Whether the whole 95 % interval is inside 1 / (1 + margin) ... 1 + margin.

    Two one-sided tests at 5 % need only the 90 % interval. The 95 % interval is the one that is printed, and keeps
    false "same" verdicts below 5 % even if an ambiguous run is extended once.
    """
    if interval.low is None or interval.high is None:
        return False
    return 1 / (1 + margin) <= interval.low and interval.high <= 1 + margin


def enough(interval: Interval, precision: float = PRECISION) -> bool:
    """Whether the interval is narrower than the precision, from end to end."""
    return interval.width < precision


def required_trials(interval: Interval, precision: float = PRECISION) -> int:
    """How many more trials, or blocks, will make the interval narrower than the precision; 0 if it already is.

    The width falls with the square root of their number. The result at most doubles the number: with few trials the
    noise is not known well enough to plan further ahead.
    """
    if enough(interval, precision):
        return 0
    n = interval.num_trials
    if interval.low is None:
        return max(1, MIN_REPEATS - n)
    return max(1, min(n, math.ceil(n * (interval.width / precision) ** 2) - n))
