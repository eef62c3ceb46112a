"""Builds the sides of comparisons from the tables of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from bench.judge.statistics import Sample
from bench.judge.tables import WORLD, Tables, world_of
from bench.judge.verdicts import Side
from bench.plan.cell import Cell, Status
from bench.plan.columns import AXES, WORK
from bench.words import plural

COLUMNS = [
    "cell_id",
    "repeat",
    *AXES,
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
NUMBERS = ["optimizer_steps_observed", "peak_memory_bytes", "peak_memory_source"]
"""Columns of good trials that are compared besides their time."""
ROW = ["repeat", "status", "reason", "optimizer_steps_expected", *WORLD, "sm_clock_mhz"]


def side(tables: Tables, cell_id: str) -> Side:
    """A cell as one side of a comparison, from tables that the gates have judged.

    A repeat is a block: the runner runs each cell once per repeat, in random order. Failed trials are counted; invalid
    ones forbid the comparison, with their reason.
    """
    trials, steps = (table[table["cell_id"] == cell_id] for table in (tables.trials[COLUMNS], tables.steps))
    return _side(trials, steps, cell_id)


def _side(trials: pd.DataFrame, steps: pd.DataFrame, cell_id: str, label: str = "") -> Side:
    """``side`` from only the rows of the cell."""
    if trials.empty:
        raise ValueError(f"the run has no cell {cell_id}")
    if not trials["repeat"].is_monotonic_increasing:
        trials = trials.sort_values("repeat")
    # Plain lists: many frames of a few rows each would take most of the time of a report.
    timed: dict[int, list[tuple[int, float]]] = {}
    for repeat, step, second in zip(*(steps[name].tolist() for name in ("repeat", "step", "seconds")), strict=True):
        timed.setdefault(int(repeat), []).append((int(step), float(second)))
    good: dict[int, list[float]] = {}
    clocks: list[Any] = []
    gates: dict[str, list[str]] = {}
    for row in trials[ROW].to_dict("records"):
        if row["status"] == Status.INVALID:
            gates.setdefault(str(row["reason"]), []).append(str(row["repeat"]))
        elif row["status"] == Status.OK:
            own = sorted(timed.get(int(row["repeat"]), ()))
            wrong = _wrong_steps(row, [step for step, _ in own])
            if wrong:
                gates.setdefault(wrong, []).append(str(row["repeat"]))
            else:
                good[int(row["repeat"])] = [second for _, second in own]
                clocks.append(row["sm_clock_mhz"])
    first = trials.iloc[0]
    fine = trials["status"] == Status.OK
    ok = trials if fine.all() else trials[fine]
    cycles = None
    if good and not any(pd.isna(clock) for clock in clocks):
        scaled = (tuple(s * 1e6 * float(c) for s in steps) for steps, c in zip(good.values(), clocks, strict=True))
        cycles = Sample(tuple(scaled), tuple(good))
    return Side(
        label=label or f"{first['backend']} N={first['accumulate']} W={first['world_size']} {first['precision']}",
        sample=Sample(tuple(map(tuple, good.values())), tuple(good)),
        cycles=cycles,
        num_failed=len(trials) - len(good) - sum(map(len, gates.values())),
        precision=str(first["precision"]),
        accumulation_dtype=str(first["accumulation_dtype"]),
        work=", ".join(f"{name} {first[name]}" for name in WORK),
        failed_gates=tuple(f"repeat {', '.join(repeats)}: {text}" for text, repeats in gates.items()),
        disturbed=tuple(restless(ok)),
    )


class Sides:
    """The sides of a run's cells, cached.

    With ``apart``, for comparing two runs, labels start with the letter of the run, and repeats are not shared blocks,
    since the runs were not interleaved. With ``force``, invalid trials count as good.
    """

    def __init__(self, tables: Tables, apart: bool = False, letter: str = "", force: bool = False) -> None:
        self._tables, self._apart, self._letter, self.force = tables, apart, letter, force
        self._trials, self._steps = (
            {str(cell_id): rows for cell_id, rows in table.groupby("cell_id", sort=False)}
            for table in (tables.trials[COLUMNS], tables.steps)
        )
        # By cell, not by id: computing an id takes time.
        self._sides: dict[Cell, Side] = {}
        self._largest: dict[tuple[Cell, str], int | None] = {}
        self._sources: dict[Cell, frozenset[str]] = {}
        self._sound: dict[Cell, pd.DataFrame] = {}

    def side(self, cell: Cell) -> Side:
        """The side of a cell."""
        if cell not in self._sides:
            cell_id = cell.cell_id
            trials = self._trials.get(cell_id, self._tables.trials[COLUMNS].iloc[:0])
            steps = self._steps.get(cell_id, self._tables.steps.iloc[:0])
            found = _side(trials, steps, cell_id, self._letter + cell.label if self._apart else "")
            if self.force and found.failed_gates:
                forgiven = trials.copy()
                forgiven.loc[forgiven["status"] == Status.INVALID, "status"] = str(Status.OK)
                found = replace(found, sample=_side(forgiven, steps, cell_id).sample)
            self._sides[cell] = replace(found, sample=Sample(found.sample.trials)) if self._apart else found
        return self._sides[cell]

    def largest(self, cell: Cell, column: str) -> int | None:
        """The largest value among a cell's good trials, or also invalid ones with ``force``."""
        key = (cell, column)
        if key not in self._largest:
            values = self._good(cell)[column].dropna()
            self._largest[key] = None if values.empty else int(values.max())
        return self._largest[key]

    def sources(self, cell: Cell) -> frozenset[str]:
        """The sources of the cell's peak memory."""
        if cell not in self._sources:
            self._sources[cell] = frozenset(self._good(cell)["peak_memory_source"].dropna())
        return self._sources[cell]

    def _good(self, cell: Cell) -> pd.DataFrame:
        if cell not in self._sound:
            allowed = [str(Status.OK), *([str(Status.INVALID)] if self.force else [])]
            trials = self._trials[cell.cell_id]
            self._sound[cell] = trials.loc[trials["status"].isin(allowed), NUMBERS]
        return self._sound[cell]


IDLE_SHARE = 0.1
"""Largest share of the CPUs that others may use on an idle machine."""
RESTLESS = "the machine was not idle"
COOL = frozenset({"SwPowerCap"})
"""Slowdowns that are normal on a fully used GPU. Their effect on the clock shows in the cycles."""


def restless(trials: pd.DataFrame) -> list[str]:
    """Disturbances in at least half of a cell's good trials: other load, lowered clocks, other GPU processes."""
    found: list[str] = []
    if trials[["num_cpus", "clock_slowdowns", "foreign_gpu_processes"]].isna().all(axis=None):
        return found
    taken = (trials["foreign_cores"] + trials["stolen_cores"]) / trials["num_cpus"]
    if taken.notna().any() and taken.median() > IDLE_SHARE:
        found.append(f"{RESTLESS}: others took {100 * taken.median():.0f} % of its CPUs (limit {100 * IDLE_SHARE:g} %)")
    slowed = trials["clock_slowdowns"].fillna("").map(lambda names: bool(set(filter(None, names.split(","))) - COOL))
    if len(slowed) and slowed.mean() >= 0.5:
        names = sorted(
            {name for names in trials["clock_slowdowns"].dropna() for name in names.split(",")} - COOL - {""}
        )
        found.append(f"the GPU's clocks were held down: {', '.join(names)}")
    others = trials["foreign_gpu_processes"].dropna()
    if len(others) and (others > 0).mean() >= 0.5:
        found.append(f"another process was on the GPU in {int((others > 0).sum())} of {plural(len(trials), 'trial')}")
    return found


def _wrong_steps(row: Any, numbers: list[int]) -> str:
    """What is wrong with the steps of a good trial; it needs one per optimizer step, from the first timed one on."""
    if not numbers:
        world = world_of(row)
        return "no step was timed" if world.is_timed else world.caveat
    due = list(range(numbers[0], int(row["optimizer_steps_expected"])))
    return "" if numbers == due else f"{len(numbers)} steps were timed, {len(due)} were due: a micro-batch is no step"
