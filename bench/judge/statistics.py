"""Ratios of step times with intervals: the trial is the unit of replication, and drift is shared within a block.

How an interval is made, and why so; docs/statistics.md has the simulations behind each choice:

1. A trial is reduced to the median of its steps after ``warmup``. Steps of one trial are no replicates of each other:
   what a fresh process group adds (placement, neighbours) is the same for all of them.
2. Logarithms of the medians are combined: log a - log b within each block if both cells ran in the same blocks, else
   each cell on its own. The centre is the 20 % trimmed mean, which costs 6 % more trials than the mean if the noise is
   normal, and fewer if it is not (a median of trials would cost 50 % more).
3. ``scipy.stats.bootstrap`` resamples the trials. Steps are not resampled within them: a trial's median holds their
   noise already, which a second level would count twice (Davison and Hinkley 1997, section 3.8).
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
    Bootstrap,
    bootstrap,
    bootstrap_many,
    difference_of_centres,
    trimmed_mean,
)
from bench.run.warmup import Array, warmup

MIN_TRIALS = 5
"""Trials, or blocks with both cells, below which there is no interval: four values have no 95 % to speak of."""
MIN_REPEATS, MAX_REPEATS = 10, 600
"""Blocks that an adaptive run starts with and ends at, by default. The study finds what they cost."""

MARGIN = 0.02
"""Two cells are the same if their ratio is between 1 / (1 + MARGIN) and 1 + MARGIN."""
PRECISION = 0.02
"""Whole width of an interval, relative to the ratio, at which a run stops."""
SAME_WIDTH = 0.65
"""Of the margin: width w of an interval that shows a difference of half the margin to be inside it in five cases of
six, being (margin/2 - w/2) / (w/2/1.96) = 1.06 standard errors away from not."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The step times of one cell."""

    trials: Sequence[Sequence[float]]
    """Seconds of the optimizer steps of each trial, the maximum over ranks; a micro-batch is no step."""
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
    """How many times the step time of b that of a is, and how sure that is."""

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
    """That ``p_same`` is about."""
    num_trials: int
    """Trials, of the cell that has fewer, or blocks if paired."""
    paired: bool
    reason: str = ""
    """Why there is no interval."""

    @property
    def width(self) -> float:
        """high / low - 1; infinite without an interval."""
        return math.inf if self.low is None or self.high is None else self.high / self.low - 1

    def inverse(self) -> Interval:
        """The same seen from b."""
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return replace(self, ratio=1 / self.ratio, low=low, high=high)


def trial_median(seconds: Sequence[float]) -> float:
    """Median of a trial's steps after warm-up; they must be above 0 and finite."""
    steps = np.asarray(seconds, dtype=float)
    if steps.ndim != 1 or not steps.size or not (np.isfinite(steps) & (steps > 0)).all():
        raise ValueError("a trial is a list of step times, all above 0 s")
    return float(np.median(steps[warmup(seconds) :]))


def ratio(a: Sample, b: Sample, *, margin: float = MARGIN, resamples: int = RESAMPLES, seed: int = SEED) -> Interval:
    """How many times the step time of ``b`` that of ``a`` is.

    Trials of a block that both ran in are paired, which removes the drift that they share; where that leaves fewer
    than MIN_TRIALS pairs, all trials are used and none is paired. ``ratio(b, a)`` is exactly the inverse: of the two,
    always the same one is resampled.
    """
    ours, theirs, swap = _resampled(a, b, np.log(a.medians), np.log(b.medians))
    found = _interval(ours, theirs, margin, resamples, seed)
    return found.inverse() if swap else found


def ratios(
    pairs: Sequence[tuple[Sample, Sample]], *, margin: float = MARGIN, resamples: int = RESAMPLES, seed: int = SEED
) -> list[Interval]:
    """``ratio`` of many pairs, up to rounding: those of equally many blocks are resampled together, equal ones once.

    A pair and its inverse are equal: of both, the same one is resampled.
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
            drawn = bootstrap_many(np.stack([those[name] for name in part]), resamples=resamples, seed=seed)
            found |= zip([(size, name) for name in part], _intervals(drawn, size, margin), strict=True)
    return [found[key].inverse() if swap else found[key] for key, swap in zip(keys, swapped, strict=True)]


def _intervals(drawn: Bootstrap, size: int, margin: float) -> list[Interval]:
    """The interval of each row of paired samples of that many blocks."""
    columns = (np.exp(drawn.centres), *map(np.exp, drawn.interval()), drawn.p_different(), drawn.p_same(margin))
    return [
        Interval(
            ratio=centre,
            low=low,
            high=high,
            p_different=different,
            p_same=same,
            margin=margin,
            num_trials=size,
            paired=True,
        )
        for centre, low, high, different, same in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _resampled(a: Sample, b: Sample, logs_a: Array, logs_b: Array) -> tuple[Array, Array | None, bool]:
    """What is resampled: differences of logarithms by block, or both samples; and whether they are those of b to a."""
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
    """Mean of a cell's trials in each block: ABBA has two."""
    if list(blocks) == list(wanted):
        return values
    own = np.asarray(blocks)
    return np.array([values[own == block].mean() for block in wanted])


def too_few(n: int, what: str, which: str = "") -> str:
    """Why n of something make no interval."""
    return f"no interval: {n} {what}{'' if n == 1 else 's'}{which}, and {MIN_TRIALS} are needed"


def _interval(a: Array, b: Array | None, margin: float, resamples: int, seed: int) -> Interval:
    paired = b is None
    n = len(a) if b is None else min(len(a), len(b))
    centre = float(trimmed_mean(a) if b is None else difference_of_centres(a, b))
    found = Interval(ratio=math.exp(centre), num_trials=n, paired=paired, margin=margin)
    if n < MIN_TRIALS:
        what, which = ("block", " with both cells") if paired else ("trial", "")
        return replace(found, reason=too_few(n, what, which))
    drawn = bootstrap(a[None], None if b is None else b[None], resamples=resamples, seed=seed)
    low, high = (float(end[0]) for end in drawn.interval())
    return replace(
        found,
        low=math.exp(low),
        high=math.exp(high),
        p_different=float(drawn.p_different()[0]),
        p_same=float(drawn.p_same(margin)[0]),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for how many there are: Holm, Scandinavian Journal of Statistics 6, 1979.

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

    The 95 % interval, not the 90 % one that would do for two one-sided tests at 5 %: it is the interval that is
    printed, and a run that is extended once because it was ambiguous still stays below 5 % of false "same".
    """
    if interval.low is None or interval.high is None:
        return False
    return 1 / (1 + margin) <= interval.low and interval.high <= 1 + margin


def enough(interval: Interval, precision: float = PRECISION) -> bool:
    """Whether an interval is narrower than the precision, from end to end."""
    return interval.width < precision


def required_trials(interval: Interval, precision: float = PRECISION) -> int:
    """How many more trials, or blocks, make the interval narrower than the precision; 0 if it is already.

    The width falls with the square root of their number. At most as many as there are: with few trials the noise is
    not known well enough to plan farther ahead, so look again then.
    """
    if enough(interval, precision):
        return 0
    n = interval.num_trials
    if interval.low is None:
        return max(1, MIN_REPEATS - n)
    return max(1, min(n, math.ceil(n * (interval.width / precision) ** 2) - n))
