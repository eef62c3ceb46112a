"""Verdicts on two cells: faster, slower, same, ambiguous, not comparable; each with a reason and what to do next.

A verdict starts as ambiguous, and evidence upgrades it:

- same: the whole 95 % interval of the ratio is inside the margin, and Holm's adjusted p-value of the equivalence is
  below 5 %. It comes first, since a difference smaller than the margin does not matter to the reader.
- faster, slower: the interval excludes 1, and Holm's adjusted p-value of the difference is below 5 %.

The A/A pair, the same cell twice, checks the instrument. If it is off, by more than the margin and with an interval
that excludes 1, nothing is called faster, slower or the same. It is no noise term: the interval of a ratio has the
noise of both cells already. docs/statistics.md has the error rates.

A verdict is on one run, or on the mean of several: ``Comparison.words`` says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from bench.formatting import plural
from bench.judge.evidence import CellEvidence
from bench.judge.statistics import (
    MARGIN,
    MIN_RUNS,
    MIN_TRIALS,
    SAME_WIDTH,
    Interval,
    equivalent,
    holm,
    over_runs,
    ratio,
)

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
    CONTROL_OFF = "A/A pair off"
    """A cell differs from its own copy, so the times are suspect."""
    FEW_RUNS = "few runs"
    """Two runs show no more than two values."""
    DAYS = "other days"
    """Two runs of different days are compared, and how much such runs differ is not known."""
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
    Reason.CONTROL_OFF: "distrust these times, and run again on a machine where nothing else runs",
    Reason.FEW_RUNS: f"pool at least {MIN_RUNS} runs, of different days",
    Reason.DAYS: f"name a folder of at least {MIN_RUNS} runs as A, or run both commits in turn: run --against COMMIT",
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
    """The ratio of their step times; None if there is none to be cited."""
    control: Interval | None
    """Ratio of the run's A/A pair."""
    margin: float = MARGIN
    cycles: Interval | None = None
    """The ratio in clock cycles."""
    allows_for_days: bool = False
    """Whether what runs of different days differ by is in the interval."""
    blocked: bool = False
    """Whether something forbids a verdict: the reason."""
    verdict: Verdict = Verdict.AMBIGUOUS
    reason: Reason = Reason.FEW_TRIALS
    details: tuple[str, ...] = ()
    """What was found, the first part first."""
    p_different: float | None = None
    p_same: float | None = None
    """After Holm's correction over the comparisons of the report that are judged; None if this one is not."""

    @property
    def detail(self) -> str:
        """All details in one line."""
        return "; ".join(self.details)

    @property
    def is_judged(self) -> bool:
        """Whether it counts in Holm's correction: nothing forbids a verdict, and there is an interval."""
        return not self.blocked and self.time is not None and self.time.p_different is not None

    @property
    def words(self) -> str:
        """The verdict and where it holds: ``slower in this run``, ``faster over 3 runs, may differ on another day``."""
        return f"{self.verdict}{self.scope}"

    @property
    def scope(self) -> str:
        """Where a verdict of faster, slower or the same holds, in words that follow it; else empty."""
        if self.verdict not in DECIDED or self.time is None:
            return ""
        if self.allows_for_days:
            return ACROSS_DAYS
        return scope_words(len(self.time.runs) or 1) + (MAY_DIFFER if self.may_differ else "")

    @property
    def may_differ(self) -> bool:
        """Whether the verdict may be another one on another day: the next run's interval contains 1."""
        is_apart = self.verdict in (Verdict.FASTER, Verdict.SLOWER)
        return is_apart and self.time is not None and self.time.may_turn


DECIDED = (Verdict.FASTER, Verdict.SLOWER, Verdict.SAME)
MAY_DIFFER = ", may differ on another day"
ACROSS_DAYS = ", allowing for what days differ by"


def scope_words(num_runs: int) -> str:
    """Where the verdicts of a report hold, in words that follow one."""
    return " in this run" if num_runs == 1 else f" over {num_runs} runs"


BLOCKS = frozenset(
    {
        Reason.NO_TRIALS,
        Reason.PRECISION,
        Reason.ACCUMULATION,
        Reason.WORK,
        Reason.GATE,
        Reason.DISTURBED,
    }
)
"""Reasons that make a comparison ``not comparable``; the others leave it ambiguous."""

MORE_HELPS = frozenset({Reason.WIDE, Reason.MANY, Reason.NO_CONTROL, Reason.FEW_TRIALS})
"""Reasons for which repeats can be added."""


def compare(
    sides: Mapping[str, tuple[CellEvidence, CellEvidence]],
    control: Interval | None,
    margin: float = MARGIN,
) -> Comparison:
    """The evidence on two cells, for ``judge_all``: both sides in each run, by the run's name.

    The ratio is the step time of the first side over that of the second.
    """
    blocked = _blocked_in_any(sides)
    time, cycles = None, None
    if blocked is None or blocked[0] not in BLOCKS:
        time = _over([ratio(a.sample, b.sample, margin) for a, b in sides.values()], margin)
        clocked = [(a.cycles, b.cycles) for a, b in sides.values()]
        known = [ratio(ours, theirs, margin) for ours, theirs in clocked if ours and theirs]
        if len(known) == len(sides):
            cycles = _over(known, margin)
    found = Comparison(time=time, control=control, margin=margin, cycles=cycles)
    if blocked is None:
        return found
    reason, details = blocked
    verdict = Verdict.NOT_COMPARABLE if reason in BLOCKS else Verdict.AMBIGUOUS
    return replace(found, blocked=True, verdict=verdict, reason=reason, details=details)


def _over(found: Sequence[Interval], margin: float) -> Interval:
    """The ratio of the only run, or over all of them."""
    if len(found) == 1:
        return found[0]
    return over_runs([each.ratio for each in found], margin)


def _blocked_in_any(
    sides: Mapping[str, tuple[CellEvidence, CellEvidence]],
) -> tuple[Reason, tuple[str, ...]] | None:
    """What forbids a verdict in the first run that has such a thing."""
    for run, (a, b) in sides.items():
        if blocked := _blocked(a, b):
            reason, details = blocked
            if len(sides) > 1:
                details = tuple(f"{run}: {text}" for text in details)
            return reason, details
    return None


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
            return Reason.NO_TRIALS, (
                f"{side.label}: {plural(side.num_failed, 'trial')}, none of which succeeded",
            )
    failed = tuple(
        f"{side.label}: {side.num_failed} of {plural(side.num_failed + len(side.sample.trials), 'trial')} failed"
        for side in (a, b)
        if side.num_failed
    )
    if not failed:
        return None
    return Reason.FAILED_TRIALS, failed


def judge_all(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """All comparisons of one report with their verdicts, corrected by Holm for the number that are judged."""
    every = list(comparisons)
    family = [place for place, comparison in enumerate(every) if comparison.is_judged]
    times = [time for place in family if (time := every[place].time) is not None]
    different = holm([time.p_different for time in times if time.p_different is not None])
    same = holm([time.p_same for time in times if time.p_same is not None])
    for place, p_different, p_same in zip(family, different, same, strict=True):
        every[place] = replace(every[place], p_different=p_different, p_same=p_same)
    return [c if c.blocked else _judged(c) for c in every]


def num_judged(comparisons: Iterable[Comparison]) -> int:
    """The number of comparisons that Holm's correction counts."""
    return sum(comparison.is_judged for comparison in comparisons)


def _judged(comparison: Comparison) -> Comparison:
    time, control = comparison.time, comparison.control
    if time is None:
        return replace(comparison, reason=Reason.FEW_TRIALS, details=("no ratio",))
    if time.low is None:
        reason = Reason.FEW_RUNS if time.runs else Reason.FEW_TRIALS
        return replace(comparison, reason=reason, details=(time.reason,))
    if control is None:
        return replace(comparison, reason=Reason.NO_CONTROL, details=("there is no A/A pair",))
    if control.low is None:
        return replace(
            comparison, reason=Reason.NO_CONTROL, details=(f"A/A pair: {control.reason}",)
        )
    if is_off(control):
        assert control.high is not None, "both ends are known, or neither"
        ends = f"{control.ratio:.4f} ({control.low:.4f} to {control.high:.4f})"
        return replace(comparison, reason=Reason.CONTROL_OFF, details=(f"A/A pair: {ends}",))
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


def is_off(control: Interval | None) -> bool:
    """Whether the A/A pair shows that a cell differs from itself: by more than the margin, and not by its noise."""
    if control is None or control.low is None or control.high is None:
        return False
    return not control.low <= 1 <= control.high and abs(math.log(control.ratio)) > math.log1p(
        MARGIN
    )


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
    intervals = [
        interval for each in found for interval in (each.time, each.control) if interval is not None
    ]
    widest = max((interval.width for interval in intervals), default=math.inf)
    if widest >= precision:
        return precision
    extended = min(precision, SAME_WIDTH * MARGIN)
    is_open = any(each.verdict is Verdict.AMBIGUOUS and each.reason in MORE_HELPS for each in found)
    if is_open and widest >= extended:
        return extended
    return None
