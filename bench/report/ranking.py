"""The table of a report: backends that did the same work, the fastest first, in one group for each N and world."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bench.formatting import digits, size
from bench.judge.pairs import ComparedPair
from bench.judge.samples import NAME
from bench.judge.verdicts import Verdict
from bench.plan.cell import Cell, Status
from bench.plan.column import DASH
from bench.plan.columns import WAYS, differing, phrases
from bench.report.report_data import ReportData
from bench.report.tabular import Table, TableColumn, TableRow

DECIDED = (Verdict.FASTER, Verdict.SLOWER, Verdict.SAME)


COLUMNS = (
    TableColumn("backend", "backend", is_number=False),
    TableColumn("seconds", "s/step"),
    TableColumn("seconds_ends", "95 %", drop=3),
    TableColumn("ratio", "ratio"),
    TableColumn("ratio_ends", "95 %", drop=1),
    TableColumn("verdict", "verdict", is_number=False, drop=4),
    TableColumn("memory", "memory"),
    TableColumn("memory_ratio", "ratio", drop=5),
    TableColumn("trials", "n"),
    TableColumn("correct", "correct?", is_number=False),
)
"""In order; ratios are to the baseline: below 1 is faster, or less memory."""
TIMES = frozenset({"seconds", "seconds_ends", "ratio", "ratio_ends", "verdict"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """One cell in the table."""

    cell_id: str
    backend: str
    label: str
    is_baseline: bool
    seconds: float | None
    low: float | None
    high: float | None
    """Ends of the 95 % interval of the step time."""
    pair: ComparedPair | None
    """The cell against the baseline's."""
    memory: int | None
    memory_ratio: float | None
    """To the memory of the baseline."""
    num_ok: int
    is_wrong: bool
    """Whether it failed, or a gate found it wrong."""
    correct: str
    """``yes``, or the outcome."""

    @property
    def is_correct(self) -> bool:
        """Whether it passed every gate."""
        return self.correct == "yes"

    @property
    def texts(self) -> dict[str, str]:
        """Its text in each of COLUMNS."""
        ratio, ends, verdict = ratio_texts(self.pair, is_baseline=self.is_baseline)
        return {
            "backend": self.backend,
            "seconds": DASH if self.seconds is None else digits(self.seconds),
            "seconds_ends": ends_of(self.low, self.high),
            "ratio": ratio,
            "ratio_ends": ends,
            "verdict": verdict,
            "memory": DASH if self.memory is None else size(self.memory),
            "memory_ratio": DASH if self.memory_ratio is None else digits(self.memory_ratio),
            "trials": str(self.num_ok),
            "correct": self.correct,
        }

    @property
    def ratio(self) -> float | None:
        """Of step times, to the baseline's."""
        time = None if self.pair is None else self.pair.time
        return 1.0 if self.is_baseline else None if time is None else time.ratio


def ends_of(low: float | None, high: float | None) -> str:
    """An interval as the table shows it."""
    return DASH if low is None or high is None else f"{digits(low)}-{digits(high)}"


def ratio_texts(row: ComparedPair | None, *, is_baseline: bool) -> tuple[str, str, str]:
    """Ratio, interval and verdict; the page's script writes the same for the baseline that a reader picks."""
    if is_baseline:
        return "1", DASH, "baseline"
    if row is None:
        return DASH, DASH, DASH
    judgement, time = row.judgement, row.time
    verdict = str(judgement.verdict)
    word = verdict if judgement.verdict in DECIDED else f"{verdict}: {judgement.reason}"
    if time is None:
        return DASH, DASH, word
    return digits(time.ratio), ends_of(time.low, time.high), word


@dataclass(frozen=True, kw_only=True)
class Group:
    """The cells that are equal but for the backend, in the order of the table."""

    cell: Cell
    """One of them."""
    place: str
    """What tells the group from others, except N."""
    rows: tuple[Ranked, ...]
    is_timed: bool
    """Whether its times are shown."""

    @property
    def n(self) -> int:
        """Micro-batches per window on each rank."""
        return self.cell.accumulate

    @property
    def title(self) -> str:
        """``N = 8, W = 2, micro-batch 1``."""
        return f"N = {self.n}, {self.place}, micro-batch {self.cell.micro_batch_size}"

    @property
    def where(self) -> str:
        """N and place within a sentence: ``N=8, W=2``."""
        return f"N = {self.n}, {self.place}".replace(" = ", "=")

    @cached_property
    def table(self) -> Table:
        """The group as a table; wrong cells are red."""
        columns = [column for column in COLUMNS if self.is_timed or column.key not in TIMES]
        rows = [TableRow(row.texts, dict.fromkeys(row.texts, "red") if row.is_wrong else {}) for row in self.rows]
        return Table(columns=columns, rows=rows, caption=self.title)

    def legend(self, baseline: str) -> str:
        """What the columns are, in one line."""
        if not self.is_timed:
            return "memory is the largest peak of a rank"
        return f"s/step: {NAME} of n trials; ratio to {baseline}: mean over blocks, below 1 is faster"

    def share(self, value: float | None, key: str) -> float | None:
        """A value as a percentage of the largest in its column, for bars."""
        if value is None:
            return None
        every = [row.memory if key == "memory" else row.high or row.seconds for row in self.rows]
        return 100 * value / max(one for one in every if one is not None)


def groups(data: ReportData) -> list[Group]:
    """All groups: real ranks, times, the baseline, the largest N and the most ranks come first, in this order.

    If HSDP runs with several numbers of replicas, each is a group of its own.
    """
    others = [cell for cell in data.run.cells.values() if not cell.is_reference and not cell.twin]
    several = "replicate" in differing(others)
    kinds: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in others:
        replicas = cell.replicate if several else 0
        kinds.setdefault(tuple(replace(cell, backend="", replicate=replicas).to_dict().values()), []).append(cell)
    every = [cells[0] for cells in kinds.values()]
    ways = [name for name in differing(every, ("precision", *WAYS)) if name != "accumulate"]
    found = [_group(data, cells, ways) for cells in kinds.values()]

    def order(group: Group) -> tuple[bool, bool, bool, int, int]:
        compared = any(row.is_baseline for row in group.rows)
        return group.cell.world.has_all_ranks, group.is_timed, compared, group.n, group.cell.world_size

    return sorted(found, key=order, reverse=True)


def _group(data: ReportData, cells: list[Cell], ways: list[str]) -> Group:
    first = cells[0]
    rows = [data.rows[cell.cell_id] for cell in cells]
    base = next((row["peak_memory_bytes"] for row in rows if row["backend"] == data.against_baseline.baseline), None)
    once = data.run.manifest.get("once") or ()
    is_timed = (
        first.world.times_communication and data.times_unavailable is None and any(c.cell_id not in once for c in cells)
    )
    ranked = [_ranked(data, row, base, is_timed=is_timed) for row in rows]
    world = f"W = {first.world_size}" + (f" ({first.world.label})" if first.world.label else "")
    return Group(
        cell=first,
        place=", ".join([world, *phrases(first, ways)]),
        rows=tuple(sorted(ranked, key=_order)),
        is_timed=is_timed,
    )


def _order(row: Ranked) -> tuple[float, float, str]:
    """The fastest first; without times the least memory first; cells with neither last."""
    seconds, memory = (math.inf if value is None else value for value in (row.seconds, row.memory))
    return seconds, memory, row.backend


def _ranked(data: ReportData, cell: Mapping[str, Any], base: int | None, *, is_timed: bool) -> Ranked:
    names = ("step_time_s", "step_time_low_s", "step_time_high_s")
    seconds, low, high = (cell[name] if is_timed else None for name in names)
    memory, is_ok = cell["peak_memory_bytes"], cell["status"] == Status.OK
    checked = "yes" if data.run.cells[cell["cell_id"]].world.has_values else "not checked"
    return Ranked(
        cell_id=cell["cell_id"],
        backend=cell["backend"],
        label=cell["label"],
        is_baseline=cell["backend"] == data.against_baseline.baseline,
        seconds=seconds,
        low=low,
        high=high,
        pair=data.pairs.get(cell["cell_id"]) if is_timed else None,
        memory=memory,
        memory_ratio=None if memory is None or not base else memory / base,
        num_ok=cell["num_ok"],
        is_wrong=not is_ok,
        correct=checked if is_ok else cell["outcome"],
    )
