"""Two runs, or two backends of one run, cell by cell: pairs, evidence, verdicts, regressions.

B is compared with A, the baseline: a ratio above 1 says that B takes longer. Reference cells of two
runs are left out: the gates need them, but they do not compete. Either side may be a pool of runs.
An A/A pair describes one run: it does not cover how the machine changed between two, so what runs
of the machine differ by goes into the interval.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from types import MappingProxyType

import pandas as pd

from bench.judge.columns import dtypes, labels
from bench.judge.evidence import CellEvidence, EvidenceByCell
from bench.judge.loading import Run
from bench.judge.pool import Pool
from bench.judge.run_spread import spread_of
from bench.judge.statistics import (
    MARGIN,
    Interval,
    allowing_for_days,
    between_days,
    holm,
    ratio,
)
from bench.judge.verdicts import (
    ALPHA,
    NEXT,
    Comparison,
    Reason,
    Verdict,
    compare,
    judge_all,
    over_all,
)
from bench.plan.cell import Cell, Status

SLOWER, MEMORY = "slower", "memory"
"""What can regress."""

ENDED_WELL = frozenset({Status.OK, Status.INTERRUPTED})
"""An interruption is not a cell's failure."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two cells to be compared."""

    a: Cell
    b: Cell
    name: str = ""
    """What distinguishes the pair from the others of its report."""
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class ComparedPair(Pair, Comparison):
    """A pair with its verdict, its exact numbers and its regressions."""

    memory: tuple[int | None, int | None] = (None, None)
    """Peak bytes of A and of B, which have no noise."""
    memory_ratio: float | None = None
    """B over A; None if one is not known, or they were measured in different ways."""
    steps: tuple[int | None, int | None] = (None, None)
    """Optimizer steps of A and of B."""
    regressions: tuple[str, ...] = ()
    """SLOWER and MEMORY, if they are certainly worse than their threshold allows."""
    unchecked: tuple[str, ...] = ()
    """Those of the two that have a threshold and could not be checked."""

    @property
    def has_interval(self) -> bool:
        return self.time is not None and self.time.low is not None


def pairs_of_backends(run: Run, baseline: str, backend: str) -> list[Pair]:
    """The cells of two backends of one run, matched by everything but the backend.

    Those of HSDP are matched by replicas too, if both have some.
    """
    bases: dict[tuple[tuple[str, object], ...], list[Cell]] = {}
    for cell in run.cells.values():
        if cell.backend == baseline:
            bases.setdefault(_key(cell), []).append(cell)
    found: list[Pair] = []
    for cell in run.cells.values():
        if cell.backend != backend:
            continue
        for base in bases.get(_key(cell), ()):
            if not cell.replicate or base.replicate in (0, cell.replicate):
                group = f"W={cell.world_size} {cell.precision}"
                found.append(Pair(a=base, b=cell, group=group))
    named = _named(found, prefix=f"{backend} ")
    return sorted(
        named, key=lambda pair: (pair.b.world_size, pair.b.precision, pair.b.accumulate, pair.name)
    )


@lru_cache(maxsize=4096)
def _key(cell: Cell) -> tuple[tuple[str, object], ...]:
    """What must be equal in two cells whose backends are compared."""
    fields = cell.to_dict()
    del fields["backend"], fields["replicate"]
    return tuple(fields.items())


def pairs_of_commits(pool: Pool) -> list[Pair]:
    """Each cell with its baseline: the same cell as another commit of the bench trains it."""
    found = []
    for other in pool.first.cells.values():
        cell = replace(other, twin="")
        if other.other_commit and pool.has(cell, other):
            found.append(Pair(a=other, b=cell, group=cell.backend))
    return sorted(_named(found), key=_by_backend)


def pairs_of_runs(a: Run, b: Run) -> list[Pair]:
    """The cells that both runs have, without references and twins."""
    found = []
    for cell_id, cell in b.cells.items():
        if cell_id in a.cells and not cell.twin and not cell.is_reference:
            found.append(Pair(a=cell, b=cell, group=cell.backend))
    return sorted(_named(found), key=_by_backend)


def _by_backend(pair: Pair) -> tuple[str, int, int, str]:
    """Where a pair stands among those of all backends."""
    return pair.b.backend, pair.b.accumulate, pair.b.world_size, pair.name


def _named(pairs: Sequence[Pair], prefix: str = "") -> list[Pair]:
    """The pairs, each with the label of its second cell, without the prefix."""
    names = labels(pair.b for pair in pairs)
    return [replace(pair, name=names[pair.b].removeprefix(prefix)) for pair in pairs]


def measured(run: Run, cell: Cell) -> bool:
    """Whether a cell was run at all: any of its trials is not ``unsupported``."""
    side = run.evidence.of(cell)
    return side.num_ok > 0 or side.status != Status.UNSUPPORTED


def judge_pairs(
    a: Pool,
    b: Pool,
    pairs: Sequence[Pair],
    *,
    thresholds: Mapping[str, float] = MappingProxyType({}),
    margin: float = MARGIN,
    control: Interval | None = None,
) -> list[ComparedPair]:
    """The verdicts of one report, corrected by Holm for the number of pairs that are judged.

    The cells of one pool are compared run by run, and each run counts once. Of two, the runs of A
    are compared with those of B.
    ``thresholds`` says by how much SLOWER and MEMORY may be worse: 0.05 for 5 %. A step time is
    certainly worse if the whole interval is, and Holm's adjusted p-value of the hypothesis that it
    is not, tested like a difference, is below 5 %; peak memory is if it is in bytes. A time that is
    not comparable, or has failed trials, is never certain.
    """
    ours = [run.evidence for run in a.runs]
    theirs = ours
    if a is not b:
        ours = [EvidenceByCell(run.tables, "A ") for run in a.runs]
        theirs = [EvidenceByCell(run.tables, "B ") for run in b.runs]
    every: list[Sides] = []
    unjudged: list[Comparison] = []
    for pair in pairs:
        sides = Sides(
            a=tuple(evidence.of(pair.a) for evidence in ours),
            b=tuple(evidence.of(pair.b) for evidence in theirs),
        )
        every.append(sides)
        if a is b:
            unjudged.append(compare(sides.by_run(a.titles), control, margin))
        else:
            unjudged.append(_between_days(a, b, sides, control, margin))
    judged = judge_all(unjudged)
    slower = [False] * len(pairs)
    if SLOWER in thresholds:
        slower = _certainly_slower(a, b, every, judged, thresholds[SLOWER])
    rows: list[ComparedPair] = []
    for pair, sides, found, is_slower in zip(pairs, every, judged, slower, strict=True):
        rows.append(_compared(pair, *sides.shown, found, is_slower, thresholds))
    return rows


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The evidence on a pair in each run of A and in each of B, the same runs or others."""

    a: tuple[CellEvidence, ...]
    b: tuple[CellEvidence, ...]

    @property
    def shown(self) -> tuple[CellEvidence, CellEvidence]:
        """A's and B's in the first run."""
        return self.a[0], self.b[0]

    def by_run(self, titles: Sequence[str]) -> dict[str, tuple[CellEvidence, CellEvidence]]:
        """B's and A's, as ratios are of B over A, by the run that has both."""
        return dict(zip(titles, zip(self.b, self.a, strict=True), strict=True))


def _between_days(
    a: Pool, b: Pool, sides: Sides, control: Interval | None, margin: float
) -> Comparison:
    """The evidence on a cell in runs of different days, with what days differ by in the interval.

    That follows from the runs themselves, if a side has enough, else it is what was found of this
    class of machines.
    """
    every = [compare({"": both}, control, margin) for both in product(sides.b, sides.a)]
    blocked = [found for found in every if found.blocked]
    for found in blocked:
        if found.verdict is Verdict.NOT_COMPARABLE:
            return found
    if blocked:
        return blocked[0]
    found = every[0]
    if found.time is None:
        return found
    time = _allowing_for_days(a, b, sides, margin)
    if time is not None:
        return replace(found, time=time, cycles=None, allows_for_days=True)
    details = ("how much runs of different days differ on this machine is not known",)
    return replace(found, blocked=True, reason=Reason.DAYS, details=details)


def _allowing_for_days(
    a: Pool, b: Pool, sides: Sides, margin: float, allowed: float = 1.0
) -> Interval | None:
    """The ratio of B to ``allowed`` times A; None if it is not known what days differ by."""
    ours = [_seconds(side) * allowed for side in sides.a]
    theirs = [_seconds(side) for side in sides.b]
    if (over_days := between_days(theirs, ours, margin)) is not None:
        return over_days
    spread = spread_of(a.first.manifest)
    if spread is None or spread_of(b.first.manifest) != spread:
        return None
    base, cell = sides.shown
    of_first = ratio(cell.sample, base.sample.scaled(allowed), margin)
    return allowing_for_days(of_first, spread.of_times, spread.freedom, margin)


def _seconds(side: CellEvidence) -> float:
    """The step time of a cell in a run."""
    return math.exp(float(side.sample.logs.mean()))


def _compared(
    pair: Pair,
    base: CellEvidence,
    cell: CellEvidence,
    found: Comparison,
    is_slower: bool,
    thresholds: Mapping[str, float],
) -> ComparedPair:
    """A judged pair with its bytes, steps and regressions."""
    # Bytes and counts have no noise: what others did on the machine does not matter to them.
    unlike = found.verdict is Verdict.NOT_COMPARABLE and found.reason is not Reason.DISTURBED
    memory: tuple[int | None, int | None] = (None, None)
    steps: tuple[int | None, int | None] = (None, None)
    if not unlike:
        memory = (base.peak_memory_bytes, cell.peak_memory_bytes)
        steps = (base.optimizer_steps, cell.optimizer_steps)
    share = None
    # What a ledger tracked is not what an allocator holds.
    is_of_one_source = len(base.peak_memory_sources | cell.peak_memory_sources) == 1
    if memory[0] and memory[1] is not None and is_of_one_source:
        share = memory[1] / memory[0]
    regressions: list[str] = []
    unchecked: list[str] = []
    if is_slower:
        regressions.append(SLOWER)
    if SLOWER in thresholds and not _is_checked(found):
        unchecked.append(SLOWER)
    if MEMORY in thresholds:
        if share is None:
            unchecked.append(MEMORY)
        elif share > 1 + thresholds[MEMORY]:
            regressions.append(MEMORY)
    return ComparedPair(
        **vars(pair),
        **vars(found),
        memory=memory,
        memory_ratio=share,
        steps=steps,
        regressions=tuple(regressions),
        unchecked=tuple(unchecked),
    )


def _certainly_slower(
    a: Pool, b: Pool, every: Sequence[Sides], judged: Sequence[Comparison], threshold: float
) -> list[bool]:
    """Whether B takes longer than 1 + threshold times as long as A, of each pair."""
    family: list[int] = []
    values: list[float] = []
    for place, (sides, found) in enumerate(zip(every, judged, strict=True)):
        if not _is_checked(found):
            continue
        shifted = _relative_to(a, b, sides, 1 + threshold)
        assert shifted is not None and shifted.p_different is not None, (
            "there are as many trials as for the interval"
        )
        family.append(place)
        values.append(shifted.p_different)
    certain = [False] * len(judged)
    for place, p_value in zip(family, holm(values), strict=True):
        time = judged[place].time
        assert time is not None and time.low is not None, "only those that are judged"
        certain[place] = time.low > 1 + threshold and p_value < ALPHA
    return certain


def _relative_to(a: Pool, b: Pool, sides: Sides, allowed: float) -> Interval | None:
    """The ratio of B to ``allowed`` times A, in one pool or between two."""
    if a is not b:
        return _allowing_for_days(a, b, sides, MARGIN, allowed)
    ratios: list[Interval] = []
    for cell, base in zip(sides.b, sides.a, strict=True):
        ratios.append(ratio(cell.sample, base.sample.scaled(allowed)))
    return over_all(ratios, MARGIN)


def _is_checked(found: Comparison) -> bool:
    """Whether a threshold on the time can be checked."""
    return found.is_judged and found.reason is not Reason.CONTROL_OFF


def record(row: ComparedPair) -> dict[str, object]:
    """One row as plain values: the columns of compare.parquet, and the ``cells`` of ``--json``."""
    values: dict[str, object] = {
        "cell": row.name,
        "group": row.group,
        "cell_id_a": row.a.cell_id,
        "cell_id_b": row.b.cell_id,
        "backend_a": row.a.backend,
        "backend_b": row.b.backend,
        "verdict": str(row.verdict),
        "reason": str(row.reason),
        "detail": row.detail,
        "next": NEXT[row.reason],
        "ratio": None,
        "low": None,
        "high": None,
        "num_trials": None,
        "paired": None,
        "p_different": row.p_different,
        "p_same": row.p_same,
        "num_runs": None,
        "next_low": None,
        "next_high": None,
        "no_interval": "",
        "peak_memory_a_bytes": row.memory[0],
        "peak_memory_b_bytes": row.memory[1],
        "peak_memory_ratio": row.memory_ratio,
        "optimizer_steps_a": row.steps[0],
        "optimizer_steps_b": row.steps[1],
        "regressions": list(row.regressions),
        "unchecked": list(row.unchecked),
    }
    if row.time is not None:
        values |= {
            "ratio": row.time.ratio,
            "low": row.time.low,
            "high": row.time.high,
            "num_trials": row.time.num_trials,
            "paired": row.time.paired,
            "num_runs": row.time.num_runs,
            "next_low": row.time.next_low,
            "next_high": row.time.next_high,
            "no_interval": row.time.reason,
        }
    return values


def frame_of_pairs(rows: Sequence[ComparedPair]) -> pd.DataFrame:
    """The rows, at least one, as a table: compare.parquet, and ratios.parquet of a run."""
    typed = {name: dtype for name, dtype in dtypes("ratios").items() if dtype != "string"}
    return pd.DataFrame([record(row) for row in rows]).astype(typed)


def partnerless(
    a: Run, b: Run, pairs: Sequence[Pair], backends: tuple[str | None, str | None]
) -> dict[str, list[str]]:
    """The labels of the cells without a partner.

    Of one run, only those of the two backends that are compared.
    """
    paired = set()
    for pair in pairs:
        paired |= {pair.a.cell_id, pair.b.cell_id}
    return {"only_a": _alone(a, paired, backends[0]), "only_b": _alone(b, paired, backends[1])}


def _alone(run: Run, paired: Collection[str], backend: str | None) -> list[str]:
    """The labels of a run's cells that are not paired, without references unless one is meant."""
    found = []
    for cell_id, cell in run.cells.items():
        if cell.twin or cell_id in paired:
            continue
        is_meant = not cell.is_reference
        if backend:
            is_meant = cell.backend == backend
        if is_meant:
            found.append(cell.label)
    return found


def newly_failed(a: Run, b: Run, pairs: Sequence[Pair]) -> list[str]:
    """The pairs of which trials failed in B and none in A, each with its name and outcome.

    Interruptions do not count.
    """
    found = []
    for pair in pairs:
        before, after = a.evidence.of(pair.a), b.evidence.of(pair.b)
        if before.status in ENDED_WELL and after.status not in ENDED_WELL:
            found.append(f"{pair.name} ({after.outcome})")
    return found
