"""Verdicts on two cells: faster, slower, same, ambiguous, not comparable; with reason and advice.

A verdict starts as ambiguous, and evidence upgrades it:

- same: the whole 95 % interval of the ratio is inside the margin, and Holm's adjusted p-value of
  the equivalence is below 5 %. It comes first, since a difference smaller than the margin does not
  matter to the reader.
- faster, slower: the interval excludes 1, and Holm's adjusted p-value of the difference is below
  5 %.

The A/A pair, the same cell twice, checks the instrument. If it is off, by more than the margin and
with an interval that excludes 1, nothing is called faster, slower or the same. It is no noise term:
the interval of a ratio has the noise of both cells already. docs/statistics.md has the error rates.

A verdict is on one run, or on the mean of several: ``Comparison.words`` says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

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
    Reason.DAYS: f"name a folder of at least {MIN_RUNS} runs as A, or run both commits in turn: "
    "run --against COMMIT",
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
    """After Holm's correction over the comparisons of the report that are judged; None if this one
    is not."""

    @property
    def detail(self) -> str:
        """All details in one line."""
        return "; ".join(self.details)

    @property
    def is_judged(self) -> bool:
        """Whether Holm's correction counts it: it has an interval, and nothing forbids it."""
        return not self.blocked and self.time is not None and self.time.p_different is not None

    @property
    def words(self) -> str:
        """The verdict and where it holds.

        ``slower in this run``, ``faster over 3 runs, may differ on another day``.
        """
        return f"{self.verdict}{self.scope}"

    @property
    def scope(self) -> str:
        """Where a verdict of faster, slower or same holds, in words that follow it; else empty."""
        if self.verdict not in DECIDED or self.time is None:
            return ""
        if self.allows_for_days:
            return ACROSS_DAYS
        return scope_of([self], self.time.num_runs)

    @property
    def may_differ(self) -> bool:
        """Whether another day may have another verdict: the next run's interval contains 1."""
        is_apart = self.verdict in DIFFERENT
        return is_apart and self.time is not None and self.time.may_turn


DIFFERENT = frozenset({Verdict.FASTER, Verdict.SLOWER})
DECIDED = (Verdict.FASTER, Verdict.SLOWER, Verdict.SAME)
MAY_DIFFER = ", may differ on another day"
ACROSS_DAYS = ", allowing for what days differ by"


def scope_words(num_runs: int) -> str:
    """Where the verdicts of a report hold, in words that follow one."""
    return " in this run" if num_runs == 1 else f" over {num_runs} runs"


def scope_of(told: Sequence[Comparison], num_runs: int) -> str:
    """The same after verdicts that are told, with how many may be others on another day."""
    words = scope_words(num_runs)
    num_turning = sum(comparison.may_differ for comparison in told)
    if num_turning and len(told) == 1:
        return words + MAY_DIFFER
    if num_turning:
        return f"{words}; {plural(num_turning, 'verdict')}{MAY_DIFFER.removeprefix(',')}"
    return words


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
    obstacle = _first_obstacle(sides)
    time, cycles = None, None
    if obstacle is None or not obstacle.bars:
        in_seconds: list[Interval] = []
        in_cycles: list[Interval] = []
        for a, b in sides.values():
            in_seconds.append(ratio(a.sample, b.sample, margin))
            if a.cycles and b.cycles:
                in_cycles.append(ratio(a.cycles, b.cycles, margin))
        time = over_all(in_seconds, margin)
        if len(in_cycles) == len(sides):
            cycles = over_all(in_cycles, margin)
    found = Comparison(time=time, control=control, margin=margin, cycles=cycles)
    if obstacle is None:
        return found
    verdict = Verdict.AMBIGUOUS
    if obstacle.bars:
        verdict = Verdict.NOT_COMPARABLE
    return replace(
        found, blocked=True, verdict=verdict, reason=obstacle.reason, details=obstacle.details
    )


def over_all(ratios: Sequence[Interval], margin: float = MARGIN) -> Interval:
    """The ratio of the only run, or over several from that of each."""
    if len(ratios) == 1:
        return ratios[0]
    return over_runs(ratios, margin)


class Obstacle(NamedTuple):
    """What forbids a verdict."""

    reason: Reason
    details: tuple[str, ...]

    @property
    def bars(self) -> bool:
        """Whether the two cells are not comparable at all."""
        return self.reason in BLOCKS


def _first_obstacle(sides: Mapping[str, tuple[CellEvidence, CellEvidence]]) -> Obstacle | None:
    """The first that makes the two not comparable in a run, or else the first of all."""
    first = None
    for run, (a, b) in sides.items():
        found = _obstacle(a, b)
        if found is None:
            continue
        if len(sides) > 1:
            found = Obstacle(found.reason, tuple(f"{run}: {text}" for text in found.details))
        if found.bars:
            return found
        if first is None:
            first = found
    return first


def _obstacle(a: CellEvidence, b: CellEvidence) -> Obstacle | None:
    """The gravest one."""
    for reason, ours, theirs in (
        (Reason.WORK, a.work, b.work),
        (Reason.PRECISION, a.precision, b.precision),
        (Reason.ACCUMULATION, a.accumulation_dtype, b.accumulation_dtype),
    ):
        if ours != theirs:
            text = f"{a.label} has {ours}, {b.label} has {theirs}"
            return Obstacle(reason, (text,))
    if found := (*a.obstacles, *b.obstacles):
        reason = Reason.DISTURBED
        if a.failed_gates or b.failed_gates:
            reason = Reason.GATE
        return Obstacle(reason, found)
    failed: list[str] = []
    for side in (a, b):
        trials = plural(side.num_failed + len(side.sample.trials), "trial")
        if not side.sample.trials:
            text = f"{side.label}: {trials}, none of which succeeded"
            return Obstacle(Reason.NO_TRIALS, (text,))
        if side.num_failed:
            failed.append(f"{side.label}: {side.num_failed} of {trials} failed")
    if failed:
        return Obstacle(Reason.FAILED_TRIALS, tuple(failed))
    return None


def judge_all(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """All comparisons of one report with their verdicts, after Holm's correction.

    That counts the comparisons that are judged.
    """
    every = list(comparisons)
    family: list[int] = []
    different: list[float] = []
    same: list[float] = []
    for place, comparison in enumerate(every):
        time = comparison.time
        if comparison.is_judged and time is not None:
            assert time.p_different is not None and time.p_same is not None, "it has an interval"
            family.append(place)
            different.append(time.p_different)
            same.append(time.p_same)
    for place, p_different, p_same in zip(family, holm(different), holm(same), strict=True):
        every[place] = replace(every[place], p_different=p_different, p_same=p_same)
    for place, comparison in enumerate(every):
        if not comparison.blocked:
            every[place] = _judged(comparison)
    return every


def num_judged(comparisons: Iterable[Comparison]) -> int:
    """The number of comparisons that Holm's correction counts."""
    return sum(comparison.is_judged for comparison in comparisons)


def _judged(comparison: Comparison) -> Comparison:
    time, control = comparison.time, comparison.control
    if time is None:
        return replace(comparison, reason=Reason.FEW_TRIALS, details=("no ratio",))
    if time.low is None:
        reason = Reason.FEW_TRIALS
        if time.runs:
            reason = Reason.FEW_RUNS
        return replace(comparison, reason=reason, details=(time.reason,))
    if control is None:
        return replace(comparison, reason=Reason.NO_CONTROL, details=("there is no A/A pair",))
    if control.low is None:
        details = (f"A/A pair: {control.reason}",)
        return replace(comparison, reason=Reason.NO_CONTROL, details=details)
    if is_off(control):
        details = (f"A/A pair: {control.words}",)
        return replace(comparison, reason=Reason.CONTROL_OFF, details=details)
    verdict, reason = _of_interval(time, comparison)
    found = [f"{time.ratio:.4f} [{time.low:.4f}, {time.high:.4f}]"]
    if (cycles := comparison.cycles) is not None and verdict is not Verdict.AMBIGUOUS:
        # Holm's correction of the seconds goes for the cycles: what must agree is where both are.
        other = Verdict.AMBIGUOUS
        if cycles.low is not None:
            other, _ = _of_interval(cycles, comparison)
        if other is not verdict:
            found.append(f"in cycles {cycles.ratio:.4f}, which is {other}")
            verdict, reason = Verdict.AMBIGUOUS, Reason.CLOCKS
    return replace(comparison, verdict=verdict, reason=reason, details=tuple(found))


def is_off(control: Interval | None) -> bool:
    """Whether the A/A pair shows that a cell differs from itself.

    It is off by more than the margin, and not by its noise.
    """
    if control is None or control.low is None or control.high is None:
        return False
    is_apart = not control.low <= 1 <= control.high
    return is_apart and abs(math.log(control.ratio)) > math.log1p(MARGIN)


def _of_interval(time: Interval, found: Comparison) -> tuple[Verdict, Reason]:
    assert time.low is not None and time.high is not None, "callers look first"
    assert found.p_same is not None and found.p_different is not None
    fits, apart = equivalent(time, found.margin), not time.low <= 1 <= time.high
    if fits and found.p_same < ALPHA:
        return Verdict.SAME, Reason.INSIDE_MARGIN
    if apart and found.p_different < ALPHA:
        if time.high < 1:
            return Verdict.FASTER, Reason.DIFFERENT
        return Verdict.SLOWER, Reason.DIFFERENT
    if fits or apart:
        return Verdict.AMBIGUOUS, Reason.MANY
    return Verdict.AMBIGUOUS, Reason.WIDE


def next_precision(found: Sequence[Comparison], precision: float) -> float | None:
    """Width of the intervals to go on to; None if the repeats are enough.

    First all intervals, the A/A pair's among them, must be narrower than the precision. Comparisons
    that are then still ambiguous for want of evidence are extended, once, until SAME_WIDTH of the
    margin. Neither depends on where the intervals are, and so repeats are not added until a wanted
    verdict comes up.
    """
    widths: list[float] = []
    is_open = False
    for each in found:
        for interval in (each.time, each.control):
            if interval is not None:
                widths.append(interval.width)
        if each.verdict is Verdict.AMBIGUOUS and each.reason in MORE_HELPS:
            is_open = True
    widest = max(widths, default=math.inf)
    if widest >= precision:
        return precision
    extended = min(precision, SAME_WIDTH * MARGIN)
    if is_open and widest >= extended:
        return extended
    return None
