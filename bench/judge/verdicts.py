"""Verdicts on two cells: faster, slower, same, ambiguous, not comparable; each with a reason and what to do next.

A verdict starts as ambiguous, and evidence upgrades it:

- same: the whole 95 % interval is inside the margin, the margin is no smaller than the noise floor, and Holm's
  adjusted p-value of the equivalence is below 5 %. It comes first, since a difference smaller than the
  margin does not matter to the reader.
- faster, slower: the interval has nothing in common with the band of the A/A noise floor, and Holm's adjusted p-value
  of the difference is below 5 %.

The band reaches as far from 1, on either side, as the farther end of the A/A pair's interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.judge.evidence import CellEvidence
from bench.judge.statistics import MARGIN, MIN_TRIALS, SAME_WIDTH, Interval, equivalent, holm, ratio
from bench.words import plural

ALPHA = 0.05


class Verdict(StrEnum):
    """How the first cell's step time compares with the second's."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    AMBIGUOUS = "ambiguous"
    NOT_COMPARABLE = "not comparable"


class Reason(StrEnum):
    """Why a verdict is what it is."""

    OUTSIDE_FLOOR = "outside floor"
    """The interval is outside the band of the noise floor."""
    INSIDE_MARGIN = "inside margin"
    """The interval is inside the margin."""
    INSIDE_FLOOR = "inside floor"
    """The interval excludes 1 but overlaps the band: equal cells differ as much on this machine."""
    WIDE = "wide interval"
    """The interval contains 1 and does not fit into the margin."""
    MANY = "many verdicts"
    """The evidence suffices for one comparison, but not for as many as the report has."""
    FLOOR_ABOVE_MARGIN = "floor above margin"
    """The interval is inside the margin, but the noise floor could hide a difference as large as the margin."""
    NO_FLOOR = "no floor"
    """The run has no A/A pair, or too few trials of it."""
    CLOCKS = "clocks"
    """The verdict in clock cycles differs from the one in seconds."""
    FEW_TRIALS = "few trials"
    """Too few trials for an interval."""
    FAILED_TRIALS = "failed trials"
    """Some trials failed, so those that succeeded may be a biased sample."""
    NO_TRIALS = "no trials"
    """One side has no successful trial."""
    PRECISION = "precision"
    """The two sides compute in different dtypes."""
    ACCUMULATION = "accumulation dtype"
    """The two sides sum gradients in different dtypes."""
    WORK = "work"
    """The two sides do not train the same."""
    GATE = "gate"
    """A gate failed."""
    DISTURBED = "machine disturbed"
    """Other programs used the machine, or its clocks were held down."""


NEXT: dict[Reason, str] = {
    Reason.OUTSIDE_FLOOR: "cite the ratio with its interval and the noise floor",
    Reason.INSIDE_MARGIN: "cite it together with the margin",
    Reason.INSIDE_FLOOR: "make the machine quieter (idle, fixed clocks) or add repeats: both lower the noise floor",
    Reason.WIDE: "add repeats: --max-repeats, --budget, or a smaller --interval-width",
    Reason.MANY: "add repeats, or compare fewer cells",
    Reason.FLOOR_ABOVE_MARGIN: "make the machine quieter, add repeats, or give a wider --margin",
    Reason.NO_FLOOR: f"run again with the A/A pair and at least {MIN_TRIALS} repeats",
    Reason.CLOCKS: "lock the clocks, or let the machine cool down, and run again",
    Reason.FEW_TRIALS: f"run at least {MIN_TRIALS} repeats",
    Reason.FAILED_TRIALS: "see why trials failed, fix it, and resume the run",
    Reason.NO_TRIALS: "see why trials failed, fix it, and resume the run",
    Reason.PRECISION: "run both sides with the same precision",
    Reason.ACCUMULATION: "run both sides with the same accumulation dtype",
    Reason.WORK: "give both sides the same workload, batch, sequence length and optimizer",
    Reason.GATE: "see which gate failed: the time of a wrong result means nothing",
    Reason.DISTURBED: "run again on an idle machine; doctor says what else runs there",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The evidence on two cells."""

    time: Interval | None
    """The ratio of their step times; None if there is none to be cited."""
    floor: Interval | None
    """Ratio of the run's A/A pair."""
    margin: float = MARGIN
    cycles: Interval | None = None
    blocked: tuple[Reason, str] | None = None
    """What forbids a verdict, and the details."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """A verdict with its reason."""

    comparison: Comparison
    verdict: Verdict
    reason: Reason
    detail: str
    p_different: float | None = None
    p_same: float | None = None
    """After Holm's correction over all comparisons of the report."""

    @property
    def next(self) -> str:
        """What to do next."""
        return NEXT[self.reason]


BLOCKS = frozenset(
    {Reason.NO_TRIALS, Reason.PRECISION, Reason.ACCUMULATION, Reason.WORK, Reason.GATE, Reason.DISTURBED}
)
"""Reasons that make a comparison ``not comparable``; the others leave it ambiguous."""

MORE_HELPS = frozenset(
    {Reason.INSIDE_FLOOR, Reason.WIDE, Reason.MANY, Reason.FLOOR_ABOVE_MARGIN, Reason.NO_FLOOR, Reason.FEW_TRIALS}
)
"""Reasons for which repeats can be added."""


def compare(
    a: CellEvidence, b: CellEvidence, floor: Interval | None, margin: float = MARGIN, *, force: bool = False
) -> Comparison:
    """The evidence on two cells, for ``judge_all``. The ratio is the step time of ``a`` over that of ``b``.

    With ``force`` the ratio of what is not comparable is calculated too, where it can be; it stays not comparable.
    """
    blocked, time, cycles = _blocked(a, b), None, None
    if a.sample.trials and b.sample.trials and (force or blocked is None or blocked[0] not in BLOCKS):
        time = ratio(a.sample, b.sample, margin)
        cycles = ratio(a.cycles, b.cycles, margin) if a.cycles and b.cycles else None
    return Comparison(time=time, floor=floor, margin=margin, cycles=cycles, blocked=blocked)


def _blocked(a: CellEvidence, b: CellEvidence) -> tuple[Reason, str] | None:
    """What forbids a verdict, the gravest reason first."""
    for reason, ours, theirs in (
        (Reason.WORK, a.work, b.work),
        (Reason.PRECISION, a.precision, b.precision),
        (Reason.ACCUMULATION, a.accumulation_dtype, b.accumulation_dtype),
    ):
        if ours != theirs:
            return reason, f"{a.label} has {ours or 'none'}, {b.label} has {theirs or 'none'}"
    found = [f"{side.label}: {text}" for side in (a, b) for text in side.obstacles]
    if found:
        wrong = a.failed_gates or b.failed_gates
        return Reason.GATE if wrong else Reason.DISTURBED, "; ".join(found)
    for side in (a, b):
        if not len(side.sample.trials):
            return Reason.NO_TRIALS, f"{side.label}: {plural(side.num_failed, 'trial')}, none of which succeeded"
    failed = [
        f"{side.label}: {side.num_failed} of {plural(side.num_failed + len(side.sample.trials), 'trial')} failed"
        for side in (a, b)
        if side.num_failed
    ]
    return (Reason.FAILED_TRIALS, "; ".join(failed)) if failed else None


def judge_all(comparisons: Iterable[Comparison]) -> list[Judgement]:
    """Verdicts on all comparisons of one report, corrected by Holm for how many there are.

    Those that cannot be judged count too, with a p-value of 1.
    """
    every = list(comparisons)
    different, same = (
        holm([1.0 if (p := getattr(c.time, name, None)) is None else p for c in every])
        for name in ("p_different", "p_same")
    )
    return [
        Judgement(comparison=c, verdict=verdict, reason=reason, detail=detail, p_different=p, p_same=q)
        for c, p, q in zip(every, different, same, strict=True)
        for verdict, reason, detail in [_verdict(c, p, q)]
    ]


def _verdict(comparison: Comparison, p_different: float, p_same: float) -> tuple[Verdict, Reason, str]:
    if comparison.blocked:
        reason, words = comparison.blocked
        return (Verdict.NOT_COMPARABLE if reason in BLOCKS else Verdict.AMBIGUOUS), reason, words
    time, floor = comparison.time, comparison.floor
    if time is None or time.low is None or time.high is None:
        return Verdict.AMBIGUOUS, Reason.FEW_TRIALS, time.reason if time else "no ratio"
    if floor is None or floor.low is None or floor.high is None:
        why = "there is no A/A pair" if floor is None else f"A/A pair: {floor.reason}"
        return Verdict.AMBIGUOUS, Reason.NO_FLOOR, why
    found, reason = _of_interval(time, band(floor), comparison.margin, p_different, p_same)
    words = f"{time.ratio:.4f} [{time.low:.4f}, {time.high:.4f}], A/A floor {100 * (band(floor) - 1):.2g}%"
    if comparison.cycles is not None and found is not Verdict.AMBIGUOUS:
        cycles = comparison.cycles
        # Whatever Holm said of the seconds goes for the cycles: what must agree is where the interval is.
        other = Verdict.AMBIGUOUS
        if cycles.low is not None:
            other = _of_interval(cycles, band(floor), comparison.margin, p_different, p_same)[0]
        if other is not found:
            return Verdict.AMBIGUOUS, Reason.CLOCKS, f"{words}; in cycles {cycles.ratio:.4f}, which is {other}"
    return found, reason, words


def band(floor: Interval) -> float:
    """Upper end of the noise floor's band, which begins at 1 / band."""
    assert floor.low is not None and floor.high is not None, "callers look first"
    return math.exp(max(abs(math.log(floor.low)), abs(math.log(floor.high))))


def _of_interval(
    time: Interval, noise: float, margin: float, p_different: float, p_same: float
) -> tuple[Verdict, Reason]:
    assert time.low is not None and time.high is not None, "callers look first"
    fits = equivalent(time, margin)
    if fits and noise <= 1 + margin and p_same < ALPHA:
        return Verdict.SAME, Reason.INSIDE_MARGIN
    apart = time.high < 1 / noise or time.low > noise
    if apart and p_different < ALPHA:
        return (Verdict.FASTER if time.high < 1 else Verdict.SLOWER), Reason.OUTSIDE_FLOOR
    if fits:
        return Verdict.AMBIGUOUS, (Reason.FLOOR_ABOVE_MARGIN if noise > 1 + margin else Reason.MANY)
    if apart:
        return Verdict.AMBIGUOUS, Reason.MANY
    inside = time.low > 1 or time.high < 1
    return Verdict.AMBIGUOUS, (Reason.INSIDE_FLOOR if inside else Reason.WIDE)


def next_precision(judgements: Sequence[Judgement], precision: float, margin: float = MARGIN) -> float | None:
    """Width of the intervals to go on to; None if the repeats are enough.

    First all intervals, the noise floor's among them, must be narrower than the precision. Comparisons that are then
    still ambiguous for want of evidence are extended, once, until SAME_WIDTH of the margin. Neither depends on where
    the intervals are, and so repeats are not added until a wanted verdict comes up.
    """
    intervals = [i for one in judgements for i in (one.comparison.time, one.comparison.floor) if i is not None]
    widest = max((interval.width for interval in intervals), default=math.inf)
    if widest >= precision:
        return precision
    extended = min(precision, SAME_WIDTH * margin)
    open_still = any(one.verdict is Verdict.AMBIGUOUS and one.reason in MORE_HELPS for one in judgements)
    return extended if open_still and widest >= extended else None


class Exact(StrEnum):
    """A verdict on counts and bytes, which have no noise."""

    EQUAL = "equal"
    MORE = "more"
    FEWER = "fewer"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exactly:
    """Bytes or steps on both sides, compared without statistics: one byte more is more."""

    a: int | None = None
    b: int | None = None
    alike: bool = True
    """Whether both sides were measured in the same way."""

    @property
    def verdict(self) -> Exact:
        """The verdict on b."""
        if self.a is None or self.b is None or not self.alike:
            return Exact.UNKNOWN
        return Exact.EQUAL if self.a == self.b else Exact.MORE if self.b > self.a else Exact.FEWER

    @property
    def ratio(self) -> float | None:
        """b / a; None if one is not known, or a is 0."""
        return None if self.verdict is Exact.UNKNOWN or not self.a or self.b is None else self.b / self.a
