"""The sides of comparisons: what a run's tables say of each cell, and what forbids comparing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from bench.backends.base import Lossy
from bench.formatting import plural, within
from bench.grouping import grouped
from bench.judge.columns import WORK
from bench.judge.statistics import Sample
from bench.judge.tables import Tables
from bench.judge.trial_columns import TrialRow
from bench.measure.host import IDLE_SHARE
from bench.plan.cell import Cell, Status

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class CellEvidence:
    """One side of a comparison: what was measured, and what must be equal on both sides."""

    label: str
    sample: Sample
    cycles: Sample | None = None
    """The same trials in clock cycles: seconds times SM clock. None if a clock is not known."""
    status: str = Status.OK
    """Of the cell: invalid if one of its trials is, else that of the first trial that is not ok, ok
    if all are."""
    reason: str = ""
    """Why the status is not ok."""
    num_ok: int = 0
    num_trials: int = 0
    failures: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """How many trials ended neither ok nor invalid, by status and reason."""
    precision: str = ""
    accumulation_dtype: str = ""
    work: str = ""
    """What is trained, in any form that is equal for equal work."""
    failed_gates: Sequence[tuple[str, ...]] = ()
    """What failed gates found of a trial, each once."""
    disturbed: Sequence[str] = ()
    """How the machine was disturbed."""
    peak_memory_bytes: int | None = None
    """The largest of the good trials."""
    peak_memory_sources: frozenset[str] = frozenset()
    optimizer_steps: int | None = None
    is_wrong: bool = False
    """Whether a gate found more than that its world has no times."""
    barred: Sequence[str] = ()
    """Why none of its numbers may be cited; that its world has no times is no such reason."""
    lossy: Lossy | None = None
    """What its backend declares to lose on purpose."""

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why no time of this side may be compared, in clauses.

        The first of each reason names the cell.
        """
        found: list[str] = []
        for first, *more in self.failed_gates:
            found += [f"{self.label}: {first}", *more]
        for text in self.disturbed:
            found.append(f"{self.label}: {text}")
        return tuple(found)

    @property
    def outcome(self) -> str:
        """How the cell ended, in what is shown: ``ok``, ``oom``, or ``crashed, 12 of 13 ok``."""
        if 0 < self.num_ok < self.num_trials:
            return f"{self.status}, {self.num_ok} of {self.num_trials} ok"
        if self.lossy is not None and self.status == Status.OK:
            return f"{self.status}, {within(self.lossy.tolerance)}"
        return self.status


class EvidenceByCell:
    """The sides of a run's cells, from tables that the gates have judged; cached.

    With a ``letter``, for comparing two runs, labels start with it, and repeats are not shared
    blocks, since the runs were not interleaved.
    """

    def __init__(self, tables: Tables, letter: str = "") -> None:
        self._letter = letter
        trials = sorted(tables.trial_rows, key=lambda row: row.repeat)
        self._trials = grouped((row.cell.cell_id, row) for row in trials)
        self._failures = tables.failures
        self._num_steps = Counter((row.cell_id, row.repeat) for row in tables.step_rows)
        # By cell, not by id: computing an id takes time.
        self._found: dict[Cell, CellEvidence] = {}

    def of(self, cell: Cell) -> CellEvidence:
        """The side of a cell.

        A repeat is a block: the runner runs each cell once per repeat, in random order. Failed
        trials are counted; invalid ones forbid the comparison, with their reason.
        """
        if cell not in self._found:
            self._found[cell] = self._of(cell)
        return self._found[cell]

    def _of(self, cell: Cell) -> CellEvidence:
        trials = self._trials.get(cell.cell_id)
        if not trials:
            raise ValueError(f"the run has no cell {cell.cell_id}")
        good: list[TrialRow] = []
        failures: Counter[tuple[str, str]] = Counter()
        for row in trials:
            if row.status is Status.OK:
                good.append(row)
            elif row.status is not Status.INVALID:
                failures[str(row.status), row.reason] += 1
        gates = self._failed_gates(cell, trials)
        worst = _worst(trials)
        disturbed = tuple(restless(good))
        wrong_results: list[str] = []
        for told, is_wrong in gates.items():
            if is_wrong:
                wrong_results += told
        barred = list(wrong_results)
        if cell.world.is_timed:
            barred += disturbed
        timed = [row for row in good if not self._wrong_steps(cell, row)]
        return CellEvidence(
            label=self._letter + cell.label,
            sample=self._sample(timed),
            cycles=self._cycles(timed),
            status=str(worst.status),
            reason=worst.reason,
            num_ok=len(good),
            num_trials=len(trials),
            failures=failures,
            precision=cell.precision,
            accumulation_dtype=cell.accumulation_dtype,
            work=", ".join(f"{name} {getattr(cell, name)}" for name in WORK),
            failed_gates=tuple(gates),
            disturbed=disturbed,
            peak_memory_bytes=max(_present(row.peak_memory_bytes for row in good), default=None),
            peak_memory_sources=frozenset(_present(row.peak_memory_source for row in good)),
            optimizer_steps=max(
                _present(row.optimizer_steps_observed for row in good), default=None
            ),
            is_wrong=bool(wrong_results),
            barred=tuple(barred),
            lossy=trials[0].facts.lossy,
        )

    def _failed_gates(self, cell: Cell, trials: Sequence[TrialRow]) -> dict[tuple[str, ...], bool]:
        """What failed gates found, each once, and whether it is a wrong result."""
        found: dict[tuple[str, ...], bool] = {}
        for row in trials:
            wrong = self._wrong_steps(cell, row)
            is_invalid = row.status is Status.INVALID
            if is_invalid or (row.status is Status.OK and wrong):
                reason = row.reason
                if not reason:
                    reason = wrong
                told = self._failures.get(row.key, (reason,))
                found[told] = is_invalid or cell.world.is_timed
        return found

    def _sample(self, timed: Sequence[TrialRow]) -> Sample:
        return self._of_seconds(timed, [_seconds(row) for row in timed])

    def _cycles(self, timed: Sequence[TrialRow]) -> Sample | None:
        """The trials in clock cycles; None if a clock is not known."""
        cycles: list[float] = []
        for row in timed:
            if row.sm_clock_mhz is None:
                return None
            cycles.append(_seconds(row) * (1e6 * row.sm_clock_mhz))
        if not cycles:
            return None
        return self._of_seconds(timed, cycles)

    def _of_seconds(self, timed: Sequence[TrialRow], seconds: Sequence[float]) -> Sample:
        blocks: tuple[int, ...] = ()
        if not self._letter:
            blocks = tuple(row.repeat for row in timed)
        return Sample(tuple(seconds), blocks)

    def _wrong_steps(self, cell: Cell, row: TrialRow) -> str:
        """What is wrong with the number of steps of a good trial.

        Each optimizer step after the warm-up is timed.
        """
        number = self._num_steps[row.key]
        if not number and cell.world.is_timed:
            return "no step was timed"
        if not number:
            return cell.world.caveat
        if number == cell.timed_windows:
            return ""
        return f"{number} steps were timed, {cell.timed_windows} were expected"


def _worst(rows: Sequence[TrialRow]) -> TrialRow:
    """The first invalid trial; if there is none, the first that is not ok; else the first."""
    for row in rows:
        if row.status is Status.INVALID:
            return row
    for row in rows:
        if row.status is not Status.OK:
            return row
    return rows[0]


def _seconds(row: TrialRow) -> float:
    """The step time of a trial whose steps were timed."""
    assert row.step_time_s is not None, "it has timed steps"
    return row.step_time_s


def _present(values: Iterable[T | None]) -> list[T]:
    """The values that are not missing."""
    return [value for value in values if value is not None]


COOL = frozenset({"SwPowerCap"})
"""Slowdowns that are normal on a fully used GPU. Their effect on the clock shows in the cycles."""


def restless(trials: Sequence[TrialRow]) -> list[str]:
    """Disturbances in at least half of a cell's good trials.

    Other load, lowered clocks, other processes on the GPU.
    """
    found: list[str] = []
    shares = _present(map(others_share, trials))
    if shares and median(shares) > IDLE_SHARE:
        taken = f"{100 * median(shares):.0f} % of its CPUs (limit {100 * IDLE_SHARE:g} %)"
        found.append(f"the machine was not idle: others took {taken}")
    reasons: set[str] = set()
    num_slowed = num_watched = num_shared = 0
    for row in trials:
        lowered = row.slowdown_reasons - COOL
        reasons |= lowered
        if lowered:
            num_slowed += 1
        if row.foreign_gpu_processes is not None:
            num_watched += 1
            if row.foreign_gpu_processes:
                num_shared += 1
    if trials and num_slowed >= len(trials) / 2:
        found.append(f"the GPU's clocks were held down: {', '.join(sorted(reasons))}")
    if num_watched and num_shared >= num_watched / 2:
        shared = f"{num_shared} of {plural(num_watched, 'trial')}"
        found.append(f"another process was on the GPU in {shared}")
    return found


def others_share(trial: TrialRow) -> float | None:
    """The share of the CPUs that others used during a trial; None if it was not measured."""
    if trial.foreign_cores is None or trial.stolen_cores is None or trial.num_cpus is None:
        return None
    return float((trial.foreign_cores + trial.stolen_cores) / trial.num_cpus)
