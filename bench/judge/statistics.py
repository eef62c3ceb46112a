"""Ratios of step times with intervals. docs/statistics.md has the simulations behind each choice.

1. A trial counts once, with the median of its steps: they share what varies between process groups.
2. Logarithms are averaged: differences within blocks if both cells ran in the same blocks, which
   removes shared drift, else each cell on its own. So a ratio is one of geometric means.
3. Interval and p-values are Student's t of paired differences, or Welch's of two samples
   (Biometrika 34, 1947).
4. Of several runs, each counts once, with its ratio: they share what varies between days (Kalibera
   and Jones, ISMM 2013: the highest level with random variation is the one to repeat).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

LEVEL = 0.95

MIN_TRIALS = 5
"""Least number of trials, or of blocks with both cells, for an interval: of fewer the spread is
hardly known."""
MIN_RUNS = 3
"""Least number of runs for an interval over runs."""
MIN_REPEATS, MAX_REPEATS = 10, 600
"""Default numbers of blocks at which an adaptive run looks first and stops at the latest;
docs/statistics.md."""

MARGIN = 0.02
"""Two cells are the same if their ratio is between 1 / (1 + MARGIN) and 1 + MARGIN."""
PRECISION = 0.02
"""A run stops when intervals are narrower than this, from end to end, relative to the ratio."""
SAME_WIDTH = 0.65
"""Width w of an interval, relative to the margin, that shows a difference of half the margin to be
inside the margin in five cases of six: (margin/2 - w/2) / (w/2/1.96) = 1.06 standard errors to
spare."""


@dataclass(frozen=True)
class Sample:
    """The step times of one cell."""

    trials: Sequence[float]
    """Seconds per optimizer step of each trial: the median of its steps after warm-up."""
    blocks: Sequence[int] = ()
    """Block of each trial: trials of one block ran next to each other in time. Empty if there were
    no blocks."""

    @cached_property
    def logs(self) -> Array:
        """Logarithms of the seconds; they must be above 0 and finite."""
        seconds = np.asarray(self.trials, dtype=float)
        if not (np.isfinite(seconds) & (seconds > 0)).all():
            raise ValueError("step times must be above 0 s")
        return np.asarray(np.log(seconds))

    def scaled(self, factor: float) -> Sample:
        """The sample if every trial had taken ``factor`` times as long."""
        return Sample([seconds * factor for seconds in self.trials], self.blocks)

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
    """Two-sided p-value of the hypothesis that the ratio is 1: below 0.05 if and only if the
    interval excludes 1."""
    p_same: float | None = None
    """p-value of the hypothesis that the ratio is outside the margin: two one-sided tests
    (Schuirmann 1987)."""
    num_trials: int
    """Number of blocks if paired, else of trials of the cell with fewer; of several runs, their
    number."""
    paired: bool
    freedom: float | None = None
    """Degrees of freedom of the standard error, as Welch has them for unpaired trials; None for
    num_trials - 1."""
    runs: tuple[float, ...] = ()
    """The ratio of each run, if there are several: all else is then of their mean. Empty for a
    single run."""
    next_low: float | None = None
    next_high: float | None = None
    """Where the next run's ratio falls in 95 of 100 cases; None with fewer than MIN_RUNS runs."""

    @property
    def num_runs(self) -> int:
        """How many runs the ratio is of."""
        if not self.runs:
            return 1
        return len(self.runs)

    @property
    def reason(self) -> str:
        """Why there is no interval, as from ``too_few``; empty if there is one."""
        if self.low is not None:
            return ""
        if self.runs:
            return too_few(len(self.runs), "run", least=MIN_RUNS)
        if self.paired:
            return too_few(self.num_trials, "block", " with both cells")
        return too_few(self.num_trials)

    @property
    def width(self) -> float:
        """high / low - 1; infinite without an interval."""
        if self.low is None or self.high is None:
            return math.inf
        return self.high / self.low - 1

    @property
    def words(self) -> str:
        """The ratio with its interval, which must exist: ``1.0123 (1.0010 to 1.0238)``."""
        return f"{self.ratio:.4f} ({self.low:.4f} to {self.high:.4f})"

    @property
    def may_turn(self) -> bool:
        """Whether the next run may show the opposite of the mean, or no difference."""
        return (
            self.next_low is not None
            and self.next_high is not None
            and self.next_low <= 1 <= self.next_high
        )


def ratio(a: Sample, b: Sample, margin: float = MARGIN) -> Interval:
    """The step time of ``a`` relative to that of ``b``.

    Trials of a common block are paired, which removes shared drift; with fewer than MIN_TRIALS such
    pairs, all trials are used unpaired.
    """
    if not len(a.trials) or not len(b.trials):
        raise ValueError("a ratio needs a trial on either side")
    blocks = [block for block in a.by_block if block in b.by_block]
    paired = len(blocks) >= MIN_TRIALS
    if max(len(a.trials), len(b.trials)) < MIN_TRIALS:  # no interval either way
        paired = len(blocks) > 0
    logs = [a.logs, b.logs]
    if paired:
        logs = [np.array([a.by_block[block] - b.by_block[block] for block in blocks])]
    n = min(map(len, logs))
    if n < MIN_TRIALS:
        centre = float(logs[0].mean())
        if not paired:
            centre -= float(b.logs.mean())
        return Interval(ratio=math.exp(centre), num_trials=n, paired=paired)
    return interval_of(LogMean.of(*logs), margin, n, paired=paired)


def interval_of(found: LogMean, margin: float, n: int, *, paired: bool) -> Interval:
    """The ratio whose logarithm is this mean, of n trials, blocks or runs."""
    low, high = found.interval()
    return Interval(
        ratio=math.exp(found.centre),
        low=math.exp(low),
        high=math.exp(high),
        p_different=float(found.p_different()),
        p_same=float(found.p_same(margin)),
        num_trials=n,
        paired=paired,
        freedom=float(found.freedom),
    )


def over_runs(alone: Sequence[Interval], margin: float = MARGIN) -> Interval:
    """The ratio over several runs, from that of each, and where the next run falls.

    It is their geometric mean. With k runs, whose logarithms have the mean m and the standard
    deviation s, the mean's interval is exp(m +- t s / sqrt k), the next run's
    exp(m +- t s sqrt(1 + 1 / k)), t being Student's with k - 1 degrees of freedom.

    What runs differ by contains the noise within each, but of a few runs s can be smaller than that
    noise by chance. So the mean's interval is at least as wide, and p-values are at least as large,
    as the noise within the runs makes them: the same formula with the root mean square of the runs'
    standard errors for s, and Welch's degrees of freedom (``within_runs``). Random-effects models
    have the same bound: their variance between runs is at least 0 (DerSimonian and Laird,
    "Meta-analysis in clinical trials", 1986). The next run's interval contains the mean's.
    """
    ratios, k = tuple(each.ratio for each in alone), len(alone)
    logs = np.log(np.asarray(ratios))
    if k < MIN_RUNS:
        return Interval(ratio=math.exp(logs.mean()), num_trials=k, paired=True, runs=ratios)
    every = [LogMean.of(logs)]
    known = [each for each in alone if each.low is not None]
    if known:
        errors = np.array([standard_error(each) for each in known])
        freedom = np.array([freedom_of(each) for each in known])
        every.append(within_runs(every[0].centre, errors, freedom, k))
    low, high = wider(every)
    next_low, next_high = wider([every[0].of_next(k), *every])
    return Interval(
        ratio=math.exp(logs.mean()),
        low=math.exp(low),
        high=math.exp(high),
        p_different=max(float(found.p_different()) for found in every),
        p_same=max(float(found.p_same(margin)) for found in every),
        num_trials=k,
        paired=True,
        runs=ratios,
        next_low=math.exp(next_low),
        next_high=math.exp(next_high),
    )


def within_runs(centre: Array, errors: Array, freedom: Array, k: int) -> LogMean:
    """A mean over k runs whose error is the noise within the runs alone.

    ``errors`` are the standard errors of the runs that have one, along the first axis, and
    ``freedom`` their degrees of freedom.
    """
    squares = errors**2
    error = np.sqrt(squares.mean(axis=0) / k)
    weights = (squares**2).T / freedom
    welch = squares.sum(axis=0) ** 2 / np.maximum(weights.sum(axis=-1), np.finfo(float).tiny)
    least = np.finfo(float).tiny
    return LogMean(centre, np.maximum(error, least), np.maximum(welch, 1.0))


def wider(every: Sequence[LogMean]) -> tuple[Array, Array]:
    """The ends that contain the intervals of all these means."""
    ends = np.array([found.interval() for found in every])
    return ends[:, 0].min(axis=0), ends[:, 1].max(axis=0)


def between_days(a: Sequence[float], b: Sequence[float], margin: float = MARGIN) -> Interval | None:
    """The step time of ``a`` relative to that of ``b``, from seconds in runs on different days.

    Student's t of two samples with one variance, of at least MIN_RUNS runs of a side: a side of one
    run is then compared with what the runs of the other differ by. None with too few runs.
    """
    if max(len(a), len(b)) < MIN_RUNS:
        return None
    ours, theirs = np.log(np.asarray(a, dtype=float)), np.log(np.asarray(b, dtype=float))
    freedom = len(ours) + len(theirs) - 2
    squares = ((ours - ours.mean()) ** 2).sum() + ((theirs - theirs.mean()) ** 2).sum()
    error = math.sqrt(squares / freedom * (1 / len(ours) + 1 / len(theirs)))
    found = LogMean(ours.mean() - theirs.mean(), np.asarray(error), np.asarray(float(freedom)))
    return interval_of(found, margin, min(len(ours), len(theirs)), paired=False)


def allowing_for_days(
    interval: Interval, deviation: float, freedom: int, margin: float = MARGIN
) -> Interval:
    """A ratio of one run to another one, with what days differ by in its interval.

    ``deviation`` is the standard deviation of the logarithm of one cell's step time over runs,
    known with ``freedom`` degrees of freedom; those of the sum are Welch's. An interval that does
    not exist stays so.
    """
    if interval.low is None or interval.high is None:
        return interval
    n = interval.num_trials
    of_run, of_days = standard_error(interval) ** 2, 2 * deviation**2
    variance = of_run + of_days
    welch = variance**2 / (of_run**2 / freedom_of(interval) + of_days**2 / freedom)
    found = LogMean(
        np.asarray(math.log(interval.ratio)), np.asarray(math.sqrt(variance)), np.asarray(welch)
    )
    return interval_of(found, margin, n, paired=interval.paired)


def standard_error(interval: Interval) -> float:
    """That of the logarithm of a ratio in one run. Raises ValueError if the ratio has no interval."""
    if interval.low is None or interval.high is None:
        raise ValueError("a ratio without an interval has no known error")
    reach = float(special.stdtrit(freedom_of(interval), (1 + LEVEL) / 2))
    return math.log(interval.high / interval.low) / (2 * reach)


def freedom_of(interval: Interval) -> float:
    """The degrees of freedom of its standard error."""
    if interval.freedom is None:
        return interval.num_trials - 1
    return interval.freedom


def too_few(n: int, what: str = "trial", which: str = "", least: int = MIN_TRIALS) -> str:
    """Why n values give no interval: how many are needed, and how many there are."""
    verb = "are"
    if n == 1:
        verb = "is"
    return f"an interval needs {least} {what}s{which}; there {verb} {n}"


@dataclass(frozen=True, slots=True)
class LogMean:
    """A mean of logarithms, or the difference of two; arrays if of many comparisons at once."""

    centre: Array
    error: Array
    """Standard error, at least the least positive float."""
    freedom: Array
    """Degrees of freedom of Student's t."""

    @classmethod
    def of(cls, a: Array, b: Array | None = None) -> LogMean:
        """Of ``a`` along its last axis, or of ``a`` less ``b``.

        Without ``b``, ``a`` has paired differences or a single sample.
        """
        least = np.finfo(float).tiny
        of_a = a.var(axis=-1, ddof=1) / a.shape[-1]
        if b is None:
            error = np.maximum(np.sqrt(of_a), least)
            return cls(a.mean(axis=-1), error, np.asarray(a.shape[-1] - 1.0))
        of_b = b.var(axis=-1, ddof=1) / b.shape[-1]
        error = np.maximum(np.sqrt(of_a + of_b), least)
        variance = np.maximum(of_a + of_b, least)
        inverse = (of_a / variance) ** 2 / (a.shape[-1] - 1)
        inverse += (of_b / variance) ** 2 / (b.shape[-1] - 1)
        welch = 1 / np.maximum(inverse, 1e-9)
        return cls(a.mean(axis=-1) - b.mean(axis=-1), error, np.asarray(welch))

    def interval(self) -> tuple[Array, Array]:
        """Ends of the 95 % interval."""
        reach = self.error * special.stdtrit(self.freedom, (1 + LEVEL) / 2)
        return self.centre - reach, self.centre + reach

    def of_next(self, k: int) -> LogMean:
        """Where the next run falls, if this is the mean over k runs."""
        return replace(self, error=self.error * math.sqrt(k + 1))

    def p_different(self) -> Array:
        """Two-sided p-value of the hypothesis that the centre is 0.

        It is below 5 % if and only if the interval lacks 0.
        """
        return np.asarray(2 * special.stdtr(self.freedom, -np.abs(self.centre) / self.error))

    def p_same(self, margin: float) -> Array:
        """p-value of the hypothesis that the centre is outside the margin.

        The larger of two one-sided ones.
        """
        return np.asarray(
            special.stdtr(self.freedom, (np.abs(self.centre) - math.log1p(margin)) / self.error)
        )


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for multiple testing: Holm, Scandinavian Journal of Statistics 6, 1979.

    The i-th smallest of m is multiplied by m - i + 1, made monotone, and bounded by 1.
    """
    values = np.asarray(p_values, dtype=float)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(
        1, np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    )
    found: list[float] = adjusted.tolist()
    return found


def equivalent(interval: Interval, margin: float = MARGIN) -> bool:
    """Whether the whole 95 % interval is inside the margin: two one-sided tests ask for less."""
    low, high = interval.low, interval.high
    return low is not None and high is not None and 1 / (1 + margin) <= low and high <= 1 + margin


def trials_to_show(interval: Interval) -> int:
    """About how many trials, or blocks, show a difference of 5 % with a power of 80 %.

    The normal approximation of a two-sided test at 5 %: n (z + z') ** 2 (s / log(1.05)) ** 2, s
    being the standard error with n, from the width of the interval (Chow, Shao, Wang and
    Lokhnygina, Sample Size Calculations in Clinical Research, section 3.1).
    """
    n, error = interval.num_trials, standard_error(interval)
    scores = special.ndtri((1 + LEVEL) / 2) + special.ndtri(0.8)
    return math.ceil(n * float(scores * error / math.log1p(0.05)) ** 2)


def required_trials(interval: Interval, precision: float = PRECISION) -> int:
    """How many more trials, or blocks, will make the interval narrower than the precision.

    0 if it already is. The width falls with the square root of their number. The result at most
    doubles the number: with few trials the noise is not known well enough to plan further ahead.
    """
    if interval.width < precision:
        return 0
    n = interval.num_trials
    if interval.low is None:
        return max(1, MIN_REPEATS - n)
    return max(1, min(n, math.ceil(n * (interval.width / precision) ** 2) - n))
