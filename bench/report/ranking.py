"""The table of a report: backends that did the same work, the fastest first, in one group for each N and world."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from bench.formatting import digits, size
from bench.grouping import grouped
from bench.judge.analysis import Analysis, CellRow
from bench.judge.columns import WAYS, differing, phrases
from bench.judge.samples import NAME
from bench.judge.statistics import MIN_RUNS, Interval
from bench.judge.trial_columns import DASH
from bench.judge.verdicts import DECIDED, scope_words
from bench.plan.cell import Cell, Status
from bench.tabular import Table, TableColumn, TableRow

MAY_DIFFER = ", may differ"
"""Of a verdict that may be another one on another day."""
COLUMNS = (
    TableColumn("backend", "backend", is_number=False),
    TableColumn("seconds", "s/step"),
    TableColumn("seconds_ends", "95 %", drop=3),
    TableColumn("ratio", "ratio"),
    TableColumn("ratio_ends", "95 %", drop=1),
    TableColumn("next_ends", "next run", drop=2),
    TableColumn("verdict", "verdict", is_number=False, drop=4),
    TableColumn("memory", "memory"),
    TableColumn("memory_ratio", "ratio", drop=5),
    TableColumn("trials", "n"),
    TableColumn("correct", "correct?", is_number=False),
)
"""In order; ratios are to the baseline: below 1 is faster, or less memory."""
TIMES = frozenset({"seconds", "seconds_ends", "ratio", "ratio_ends", "next_ends", "verdict"})


@dataclass(frozen=True, kw_only=True)
class RankedRow(CellRow):
    """A row of the table; its times are None if they are not shown."""

    memory_ratio: float | None
    """To the baseline's."""
    correct: str
    time: Interval | None
    """The ratio to the baseline's step time."""
    may_differ: bool
    """Whether the verdict may be another one on another day."""

    def without_times(self) -> RankedRow:
        """The same where times cannot be compared."""
        return replace(
            self,
            step_time_s=None,
            step_time_low_s=None,
            step_time_high_s=None,
            ratio=None,
            ratio_low=None,
            ratio_high=None,
            verdict=None,
            time=None,
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """The cells that are equal but for the backend, in the order of the table."""

    cell: Cell
    """One of them."""
    setting: str
    """What differs between groups beside N: ``W = 2, clipped to 1.5``."""
    rows: tuple[RankedRow, ...]
    baseline: str
    is_timed: bool
    """Whether its times are shown."""
    num_runs: int = 1

    @property
    def n(self) -> int:
        return self.cell.accumulate

    @property
    def title(self) -> str:
        return f"N = {self.n}, {self.setting}, micro-batch {self.cell.micro_batch_size}"

    @property
    def short_title(self) -> str:
        """N and setting within a sentence: ``N=8, W=2``."""
        return f"N = {self.n}, {self.setting}".replace(" = ", "=")

    def texts(self, row: RankedRow) -> dict[str, str]:
        """The text of a row in each of COLUMNS; the page's script writes the same for another baseline."""
        verdict, is_baseline = row.verdict, self.is_timed and row.backend == self.baseline
        if verdict and verdict not in DECIDED:
            verdict += f": {row.verdict_reason}"
        if verdict and row.may_differ:
            verdict += MAY_DIFFER
        ratio_ends, next_ends = interval_text(row.ratio_low, row.ratio_high), DASH
        if row.time is not None and row.time.runs:
            next_ends = interval_text(row.time.next_low, row.time.next_high)
            if not row.time.next_low:
                ratio_ends = ", ".join(map(digits, row.time.runs))
        return {
            "backend": row.backend,
            "seconds": _number(row.step_time_s),
            "seconds_ends": interval_text(row.step_time_low_s, row.step_time_high_s),
            "ratio": "1" if is_baseline else _number(row.ratio),
            "ratio_ends": ratio_ends,
            "next_ends": next_ends,
            "verdict": "baseline" if is_baseline else verdict or DASH,
            "memory": DASH if row.peak_memory_bytes is None else size(row.peak_memory_bytes),
            "memory_ratio": _number(row.memory_ratio),
            "trials": str(row.num_ok),
            "correct": row.correct,
        }

    @cached_property
    def table(self) -> Table:
        """The group as a table; wrong cells are red."""
        columns = [column for column in COLUMNS if self.is_timed or column.key not in TIMES]
        if self.num_runs < MIN_RUNS:
            columns = [column for column in columns if column.key != "next_ends"]
        if self.num_runs == MIN_RUNS - 1:
            columns = [replace(each, title="both runs") if each.key == "ratio_ends" else each for each in columns]
        red = {column.key: "red" for column in columns}
        rows = [TableRow(self.texts(row), {} if row.status == Status.OK else red) for row in self.rows]
        return Table(columns=columns, rows=rows, caption=self.title)

    @property
    def legend(self) -> str:
        """What the columns are, in one line."""
        if not self.is_timed:
            return "memory is the largest peak of a rank"
        scope = f"verdicts hold{scope_words(self.num_runs)}"
        if self.num_runs == 1:
            return (
                f"s/step: {NAME} of n trials; ratio to {self.baseline}: geometric mean over blocks, below 1 is faster; "
                f"{scope}"
            )
        text = (
            f"s/step, and ratio to {self.baseline}: {NAME} over {self.num_runs} runs, below 1 is faster; memory and n "
            "trials: of the first"
        )
        if self.num_runs < MIN_RUNS:
            return text
        return (
            f"{text}; next run: where the ratio of another run falls in 95 of 100 cases; {scope}, and may differ on "
            "another day where that contains 1"
        )

    def share(self, value: float, *columns: str) -> str:
        """A value as a percentage of the largest in these columns, for bars."""
        every = [getattr(row, name) for row in self.rows for name in columns]
        return f"{100 * value / max(number for number in every if number is not None):.1f}%"


def _number(value: float | None) -> str:
    return DASH if value is None else digits(value)


def interval_text(low: float | None, high: float | None) -> str:
    """An interval as the table shows it."""
    return DASH if low is None or high is None else f"{digits(low)}-{digits(high)}"


def ratio_text(time: Interval) -> str:
    """A ratio with all that is known of it, as sentences have it."""
    if not time.runs:
        return f"{digits(time.ratio)}{ends_text(time.low, time.high)}"
    if time.next_low is None or time.next_high is None:
        return f"{' and '.join(map(digits, time.runs))} in two runs"
    ends = f"95 % {interval_text(time.low, time.high)}, next run {interval_text(time.next_low, time.next_high)}"
    return f"{digits(time.ratio)} ({ends})"


def ends_text(low: float | None, high: float | None) -> str:
    """An interval in brackets behind its centre; empty without one."""
    return "" if low is None or high is None else f" (95 % {interval_text(low, high)})"


def groups(data: Analysis) -> list[Group]:
    """All groups: real ranks, times, the baseline, the largest N and the most ranks come first, in this order.

    If HSDP runs with several numbers of replicas, each is a group of its own.
    """
    others = [cell for cell in data.run.cells.values() if not cell.is_reference and not cell.twin]
    several = "replicate" in differing(others)
    kinds = grouped((replace(cell, backend="", replicate=cell.replicate * several), cell) for cell in others)
    every = [cells[0] for cells in kinds.values()]
    ways = [name for name in differing(every, ("precision", *WAYS)) if name != "accumulate"]
    found = [_group(data, cells, ways) for cells in kinds.values()]

    def order(group: Group) -> tuple[bool, bool, bool, int, int]:
        compared = any(row.backend == group.baseline for row in group.rows)
        return group.cell.world.has_all_ranks, group.is_timed, compared, group.n, group.cell.world_size

    return sorted(found, key=order, reverse=True)


def _group(data: Analysis, cells: list[Cell], ways: list[str]) -> Group:
    first = cells[0]
    rows = [data.rows[cell.cell_id] for cell in cells]
    base = next((row.peak_memory_bytes for row in rows if row.backend == data.baseline), None)
    once = data.run.manifest.once
    is_timed = (
        first.world.times_communication and data.times_unavailable is None and any(c.cell_id not in once for c in cells)
    )
    checked = "yes" if first.world.has_values else "not checked"
    shown = []
    for row in rows:
        share = None
        if base and row.peak_memory_bytes is not None:
            share = row.peak_memory_bytes / base
        correct = checked if row.status == Status.OK else row.outcome
        pair = data.pairs.get(row.cell_id)
        ranked = RankedRow(
            **vars(row),
            memory_ratio=share,
            correct=correct,
            time=None if pair is None else pair.time,
            may_differ=pair is not None and pair.may_differ,
        )
        shown.append(ranked if is_timed else ranked.without_times())
    world = f"W = {first.world_size}" + (f" ({first.world.label})" if first.world.label else "")
    return Group(
        cell=first,
        setting=", ".join([world, *phrases(first, ways)]),
        rows=tuple(sorted(shown, key=_sort_key)),
        baseline=data.baseline,
        is_timed=is_timed,
        num_runs=len(data.pool.runs),
    )


def _sort_key(row: RankedRow) -> tuple[float, float, str]:
    """The fastest first; without times the least memory first; cells with neither last."""
    seconds = math.inf if row.step_time_s is None else row.step_time_s
    memory = math.inf if row.peak_memory_bytes is None else row.peak_memory_bytes
    return seconds, memory, row.backend
