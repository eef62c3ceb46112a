"""The sides of comparisons: what the tables of a run say of each cell, and what forbids comparing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.judge.statistics import Sample
from bench.judge.tables import WORLD, Tables, rows_of, world_of
from bench.measure.host import IDLE_SHARE
from bench.plan.cell import Cell, Status
from bench.plan.columns import WORK
from bench.words import plural

COLUMNS = [
    "cell_id",
    "repeat",
    "status",
    "reason",
    "optimizer_steps_expected",
    "optimizer_steps_observed",
    "peak_memory_bytes",
    "peak_memory_source",
    *WORLD,
    "sm_clock_mhz",
    "num_cpus",
    "foreign_cores",
    "stolen_cores",
    "clock_slowdowns",
    "foreign_gpu_processes",
]
"""Columns of trials that a side needs."""
Row = Mapping[str, Any]
"""A row of the trials table; missing values are None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One side of a comparison: what was measured, and what must be equal on both sides."""

    label: str
    sample: Sample
    cycles: Sample | None = None
    """The same trials in clock cycles: seconds times SM clock. None if a clock is not known."""
    num_failed: int = 0
    """Number of trials that ended neither ok nor invalid."""
    precision: str = ""
    accumulation_dtype: str = ""
    work: str = ""
    """What is trained, in any form that is equal for equal work."""
    failed_gates: Sequence[str] = ()
    """What each failed gate found."""
    disturbed: Sequence[str] = ()
    """How the machine was disturbed."""
    peak_memory_bytes: int | None = None
    """The largest of the good trials."""
    peak_memory_sources: frozenset[str] = frozenset()
    optimizer_steps: int | None = None

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why no time of this side may be compared."""
        return (*self.failed_gates, *self.disturbed)


class Sides:
    """The sides of a run's cells, from tables that the gates have judged; cached.

    With a ``letter``, for comparing two runs, labels start with it, and repeats are not shared blocks, since the runs
    were not interleaved. With ``force``, invalid trials count as good; the gates that they failed are still named.
    """

    def __init__(self, tables: Tables, letter: str = "", force: bool = False) -> None:
        self._letter, self._force = letter, force
        # Plain rows: many frames of a few rows each would take most of the time of a report.
        self._trials: dict[str, list[Row]] = {}
        for row in rows_of(tables.trials[COLUMNS].sort_values("repeat")):
            self._trials.setdefault(row["cell_id"], []).append(row)
        self._steps: dict[tuple[str, int], list[tuple[int, float]]] = {}
        steps = tables.steps
        columns = (steps[name].tolist() for name in ("cell_id", "repeat", "step", "seconds"))
        for cell_id, repeat, step, second in zip(*columns, strict=True):
            self._steps.setdefault((cell_id, repeat), []).append((step, second))
        # By cell, not by id: computing an id takes time.
        self._sides: dict[Cell, Side] = {}

    def side(self, cell: Cell) -> Side:
        """The side of a cell. A repeat is a block: the runner runs each cell once per repeat, in random order.

        Failed trials are counted; invalid ones forbid the comparison, with their reason.
        """
        if cell not in self._sides:
            self._sides[cell] = self._side(cell)
        return self._sides[cell]

    def _side(self, cell: Cell) -> Side:
        trials = self._trials.get(cell.cell_id)
        if not trials:
            raise ValueError(f"the run has no cell {cell.cell_id}")
        timed: dict[int, list[float]] = {}
        gates: dict[str, list[str]] = {}
        allowed = {Status.OK, Status.INVALID} if self._force else {Status.OK}
        good = [row for row in trials if row["status"] in allowed]
        for row in trials:
            steps = sorted(self._steps.get((row["cell_id"], row["repeat"]), ()))
            wrong = _wrong_steps(row, [step for step, _ in steps])
            if row["status"] == Status.INVALID or (row["status"] == Status.OK and wrong):
                gates.setdefault(row["reason"] or wrong, []).append(str(row["repeat"]))
            if row["status"] in allowed and not wrong:
                timed[row["repeat"]] = [second for _, second in steps]
        clocks = {row["repeat"]: row["sm_clock_mhz"] for row in good if row["repeat"] in timed}
        cycles = None
        if clocks and None not in clocks.values():
            cycles = self._sample({r: [s * 1e6 * clocks[r] for s in steps] for r, steps in timed.items()})
        return Side(
            label=self._letter + cell.label,
            sample=self._sample(timed),
            cycles=cycles,
            num_failed=sum(row["status"] not in {Status.OK, Status.INVALID} for row in trials),
            precision=cell.precision,
            accumulation_dtype=cell.accumulation_dtype,
            work=", ".join(f"{name} {getattr(cell, name)}" for name in WORK),
            failed_gates=tuple(f"repeat {', '.join(repeats)}: {text}" for text, repeats in gates.items()),
            disturbed=tuple(restless([row for row in trials if row["status"] == Status.OK])),
            peak_memory_bytes=max(_known(good, "peak_memory_bytes"), default=None),
            peak_memory_sources=frozenset(_known(good, "peak_memory_source")),
            optimizer_steps=max(_known(good, "optimizer_steps_observed"), default=None),
        )

    def _sample(self, timed: Mapping[int, Sequence[float]]) -> Sample:
        return Sample(tuple(map(tuple, timed.values())), () if self._letter else tuple(timed))


def _known(rows: Sequence[Row], name: str) -> list[Any]:
    """The values of a column that are not missing."""
    return [row[name] for row in rows if row[name] is not None]


RESTLESS = "the machine was not idle"
COOL = frozenset({"SwPowerCap"})
"""Slowdowns that are normal on a fully used GPU. Their effect on the clock shows in the cycles."""


def restless(trials: Sequence[Row]) -> list[str]:
    """Disturbances in at least half of a cell's good trials: other load, lowered clocks, other GPU processes."""
    found: list[str] = []
    loads = [[row[name] for name in ("foreign_cores", "stolen_cores", "num_cpus")] for row in trials]
    shares = [(foreign + stolen) / cpus for foreign, stolen, cpus in (row for row in loads if None not in row)]
    if shares and median(shares) > IDLE_SHARE:
        found.append(f"{RESTLESS}: others took {100 * median(shares):.0f} % of its CPUs (limit {100 * IDLE_SHARE:g} %)")
    slowed = [set((row["clock_slowdowns"] or "").split(",")) - COOL - {""} for row in trials]
    if trials and sum(map(bool, slowed)) >= len(trials) / 2:
        found.append(f"the GPU's clocks were held down: {', '.join(sorted(set().union(*slowed)))}")
    others = _known(trials, "foreign_gpu_processes")
    busy = sum(number > 0 for number in others)
    if others and busy >= len(others) / 2:
        found.append(f"another process was on the GPU in {busy} of {plural(len(trials), 'trial')}")
    return found


def _wrong_steps(row: Row, numbers: list[int]) -> str:
    """What is wrong with the steps of a good trial; it needs one per optimizer step, from the first timed one on."""
    if not numbers:
        world = world_of(row)
        return "no step was timed" if world.is_timed else world.caveat
    due = list(range(numbers[0], row["optimizer_steps_expected"]))
    return "" if numbers == due else f"{len(numbers)} steps were timed, {len(due)} were due"
