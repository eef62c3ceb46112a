"""Verdicts on two cells: faster, slower, same, ambiguous, not comparable; each with a reason and what to do next.

A verdict starts as ambiguous, and evidence upgrades it:

- same: the whole 95 % interval of the ratio is inside the margin, and Holm's adjusted p-value of the equivalence is
  below 5 %. It comes first, since a difference smaller than the margin does not matter to the reader.
- faster, slower: the interval excludes 1, and Holm's adjusted p-value of the difference is below 5 %.

The A/A pair, the same cell twice, checks the instrument: its interval should contain 1. If it does not, every interval
is widened on both sides by what it lacks (``excess``). It is no second noise term, since the interval of a ratio has
the noise of both cells already; docs/statistics.md has the error rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from bench.formatting import plural
from bench.judge.evidence import CellEvidence
from bench.judge.statistics import MARGIN, MIN_TRIALS, SAME_WIDTH, Interval, equivalent, holm, ratio

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

    DIFFERENT = "different"
    """The interval excludes 1."""
    INSIDE_MARGIN = "inside margin"
    """The interval is inside the margin."""
    WIDE = "wide interval"
    """The interval contains 1 and does not fit into the margin."""
    MANY = "many verdicts"
    """The evidence suffices for one comparison, but not for as many as the report has."""
    NO_CONTROL = "no A/A pair"
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
    Reason.DIFFERENT: "cite the ratio with its interval",
    Reason.INSIDE_MARGIN: "cite it together with the margin",
    Reason.WIDE: "add repeats: --max-repeats, --budget, or a smaller --interval-width",
    Reason.MANY: "add repeats, or compare fewer cells",
    Reason.NO_CONTROL: f"run again with the A/A pair and at least {MIN_TRIALS} repeats",
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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The evidence on two cells, and the verdict on it."""

    time: Interval | None
    """The ratio of their step times, widened by the A/A pair's excess; None if there is none to be cited."""
    control: Interval | None
    """Ratio of the run's A/A pair."""
    margin: float = MARGIN
    cycles: Interval | None = None
    """The ratio in clock cycles."""
    blocked: bool = False
    """Whether something forbids a verdict: the reason."""
    verdict: Verdict = Verdict.AMBIGUOUS
    reason: Reason = Reason.FEW_TRIALS
    details: tuple[str, ...] = ()
    """What was found, the first part first."""
    p_different: float | None = None
    p_same: float | None = None
    """After Holm's correction over all comparisons of the report."""

    @property
    def detail(self) -> str:
        """All details in one line."""
        return "; ".join(self.details)


BLOCKS = frozenset(
    {Reason.NO_TRIALS, Reason.PRECISION, Reason.ACCUMULATION, Reason.WORK, Reason.GATE, Reason.DISTURBED}
)
"""Reasons that make a comparison ``not comparable``; the others leave it ambiguous."""

MORE_HELPS = frozenset({Reason.WIDE, Reason.MANY, Reason.NO_CONTROL, Reason.FEW_TRIALS})
"""Reasons for which repeats can be added."""


def compare(a: CellEvidence, b: CellEvidence, control: Interval | None, margin: float = MARGIN) -> Comparison:
    """The evidence on two cells, for ``judge_all``. The ratio is the step time of ``a`` over that of ``b``."""
    blocked, time, cycles = _blocked(a, b), None, None
    if blocked is None or blocked[0] not in BLOCKS:
        by = excess(control)
        time = ratio(a.sample, b.sample, margin).widened(by)
        if a.cycles and b.cycles:
            cycles = ratio(a.cycles, b.cycles, margin).widened(by)
    found = Comparison(time=time, control=control, margin=margin, cycles=cycles)
    if blocked is None:
        return found
    reason, details = blocked
    verdict = Verdict.NOT_COMPARABLE if reason in BLOCKS else Verdict.AMBIGUOUS
    return replace(found, blocked=True, verdict=verdict, reason=reason, details=details)


def _blocked(a: CellEvidence, b: CellEvidence) -> tuple[Reason, tuple[str, ...]] | None:
    """What forbids a verdict, the gravest reason first."""
    for reason, ours, theirs in (
        (Reason.WORK, a.work, b.work),
        (Reason.PRECISION, a.precision, b.precision),
        (Reason.ACCUMULATION, a.accumulation_dtype, b.accumulation_dtype),
    ):
        if ours != theirs:
            return reason, (f"{a.label} has {ours or 'none'}, {b.label} has {theirs or 'none'}",)
    if found := (*a.obstacles, *b.obstacles):
        return Reason.GATE if a.failed_gates or b.failed_gates else Reason.DISTURBED, found
    for side in (a, b):
        if not side.sample.trials:
            return Reason.NO_TRIALS, (f"{side.label}: {plural(side.num_failed, 'trial')}, none of which succeeded",)
    failed = tuple(
        f"{side.label}: {side.num_failed} of {plural(side.num_failed + len(side.sample.trials), 'trial')} failed"
        for side in (a, b)
        if side.num_failed
    )
    if not failed:
        return None
    return Reason.FAILED_TRIALS, failed


def judge_all(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """All comparisons of one report with their verdicts, corrected by Holm for how many there are.

    Those that cannot be judged count too, with a p-value of 1.
    """
    every = list(comparisons)
    times = [comparison.time for comparison in every]
    different = holm([_p_or_1(time.p_different) if time else 1.0 for time in times])
    same = holm([_p_or_1(time.p_same) if time else 1.0 for time in times])
    corrected = [replace(c, p_different=p, p_same=q) for c, p, q in zip(every, different, same, strict=True)]
    return [c if c.blocked else _judged(c) for c in corrected]


def _p_or_1(p_value: float | None) -> float:
    """A p-value; 1 where there is none."""
    return 1.0 if p_value is None else p_value


def _judged(comparison: Comparison) -> Comparison:
    time, control = comparison.time, comparison.control
    if time is None:
        return replace(comparison, reason=Reason.FEW_TRIALS, details=("no ratio",))
    if time.low is None:
        return replace(comparison, reason=Reason.FEW_TRIALS, details=(time.reason,))
    if control is None:
        return replace(comparison, reason=Reason.NO_CONTROL, details=("there is no A/A pair",))
    if control.low is None:
        return replace(comparison, reason=Reason.NO_CONTROL, details=(f"A/A pair: {control.reason}",))
    verdict, reason = _of_interval(time, comparison)
    details = [f"{time.ratio:.4f} [{time.low:.4f}, {time.high:.4f}]"]
    if (cycles := comparison.cycles) is not None and verdict is not Verdict.AMBIGUOUS:
        # Whatever Holm said of the seconds goes for the cycles: what must agree is where the interval is.
        other = Verdict.AMBIGUOUS
        if cycles.low is not None:
            other, _ = _of_interval(cycles, comparison)
        if other is not verdict:
            details.append(f"in cycles {cycles.ratio:.4f}, which is {other}")
            verdict, reason = Verdict.AMBIGUOUS, Reason.CLOCKS
    return replace(comparison, verdict=verdict, reason=reason, details=tuple(details))


def excess(control: Interval | None) -> float:
    """How far the interval of the A/A pair stays from 1, as a logarithm; 0 if it contains 1 or is not known."""
    if control is None or control.low is None or control.high is None:
        return 0.0
    return max(0.0, math.log(control.low), -math.log(control.high))


def _of_interval(time: Interval, found: Comparison) -> tuple[Verdict, Reason]:
    assert time.low is not None and time.high is not None, "callers look first"
    assert found.p_same is not None and found.p_different is not None
    fits, apart = equivalent(time, found.margin), not time.low <= 1 <= time.high
    if fits and found.p_same < ALPHA:
        return Verdict.SAME, Reason.INSIDE_MARGIN
    if apart and found.p_different < ALPHA:
        return Verdict.FASTER if time.high < 1 else Verdict.SLOWER, Reason.DIFFERENT
    if fits or apart:
        return Verdict.AMBIGUOUS, Reason.MANY
    return Verdict.AMBIGUOUS, Reason.WIDE


def next_precision(found: Sequence[Comparison], precision: float) -> float | None:
    """Width of the intervals to go on to; None if the repeats are enough.

    First all intervals, the A/A pair's among them, must be narrower than the precision. Comparisons that are then
    still ambiguous for want of evidence are extended, once, until SAME_WIDTH of the margin. Neither depends on where
    the intervals are, and so repeats are not added until a wanted verdict comes up.
    """
    intervals = [interval for each in found for interval in (each.time, each.control) if interval is not None]
    widest = max((interval.width for interval in intervals), default=math.inf)
    if widest >= precision:
        return precision
    extended = min(precision, SAME_WIDTH * MARGIN)
    is_open = any(each.verdict is Verdict.AMBIGUOUS and each.reason in MORE_HELPS for each in found)
    if is_open and widest >= extended:
        return extended
    return None
