"""The table of a report: backends that did the same work, fastest first; a group per N and W."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from string import ascii_lowercase

from bench.formatting import digits, size
from bench.judge.analysis import Analysis, CellRow
from bench.judge.as_benched import as_benched
from bench.judge.columns import WAYS, differing, phrases
from bench.judge.samples import NAME
from bench.judge.statistics import MIN_RUNS, Interval
from bench.judge.trial_columns import DASH
from bench.judge.verdicts import DECIDED, scope_words
from bench.plan.cell import Cell, Device, Status
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
    TableColumn("tokens", "tokens/s per GPU", drop=7),
    TableColumn("mfu", "MFU", drop=6),
    TableColumn("memory", "memory"),
    TableColumn("memory_ratio", "ratio", drop=5),
    TableColumn("reserved", "reserved", drop=8),
    TableColumn("trials", "n"),
    TableColumn("correct", "correct?", is_number=False),
    TableColumn("note", "note", is_number=False),
)
"""In order; ratios are to the baseline: below 1 is faster, or less memory."""
TIMES = frozenset(
    {"seconds", "seconds_ends", "ratio", "ratio_ends", "next_ends", "verdict", "tokens", "mfu"}
)
OF_GPUS = frozenset({"tokens", "mfu", "reserved"})
"""Only for cells on GPUs, and where a row has a value."""


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
    changes: tuple[str, ...]
    """What the bench changes in its framework."""

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
            tokens_per_s_per_rank=None,
            mfu=None,
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
    marks: Mapping[str, str] = field(default_factory=dict)
    """The letter of each change that some row of the run has."""

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
        """The text of a row in each of COLUMNS.

        The page's script writes the same for another baseline.
        """
        ratio, verdict = _number(row.ratio), _verdict_text(row)
        if self.is_timed and row.backend == self.baseline:
            ratio, verdict = "1", "baseline"
        ratio_ends, next_ends = interval_text(row.ratio_low, row.ratio_high), DASH
        if row.time is not None and row.time.runs:
            next_ends = interval_text(row.time.next_low, row.time.next_high)
            ratio_ends = below_ratio(row.time)
        memory = DASH
        if row.peak_memory_bytes is not None:
            memory = size(row.peak_memory_bytes)
        reserved = tokens = mfu = DASH
        if row.peak_reserved_bytes is not None:
            reserved = size(row.peak_reserved_bytes)
        if row.step_time_s is not None and row.tokens_per_s_per_rank is not None:
            tokens = f"{row.tokens_per_s_per_rank:,.0f}"
        if row.step_time_s is not None and row.mfu is not None:
            mfu = f"{100 * row.mfu:.1f} %"
        return {
            "backend": row.backend,
            "seconds": _number(row.step_time_s),
            "seconds_ends": interval_text(row.step_time_low_s, row.step_time_high_s),
            "ratio": ratio,
            "ratio_ends": ratio_ends,
            "next_ends": next_ends,
            "verdict": verdict,
            "tokens": tokens,
            "mfu": mfu,
            "memory": memory,
            "memory_ratio": _number(row.memory_ratio),
            "reserved": reserved,
            "trials": str(row.num_ok),
            "correct": row.correct,
            "note": ", ".join(sorted(self.marks[words] for words in row.changes)),
        }

    @property
    def footnote(self) -> str:
        """What the letters of its notes stand for, in a sentence; empty without any."""
        return footnote_of([self])

    @cached_property
    def table(self) -> Table:
        """The group as a table; wrong cells are red."""
        columns = []
        every = [self.texts(row) for row in self.rows]
        for column in COLUMNS:
            if column.key in TIMES and not self.is_timed:
                continue
            if column.key in OF_GPUS and not self._has(column.key, every):
                continue
            if column.key == "next_ends" and self.num_runs < MIN_RUNS:
                continue
            if column.key == "note" and not self.footnote:
                continue
            if column.key == "ratio_ends" and self.num_runs == MIN_RUNS - 1:
                columns.append(replace(column, title="both runs"))
                continue
            columns.append(column)
        red = dict.fromkeys((column.key for column in columns), "red")
        rows = []
        for row, texts in zip(self.rows, every, strict=True):
            styles = red
            if row.status == Status.OK:
                styles = {}
            rows.append(TableRow(texts, styles))
        return Table(columns=columns, rows=rows, caption=self.title)

    def _has(self, key: str, rows: Sequence[Mapping[str, str]]) -> bool:
        """Whether there is something to show in a column of OF_GPUS."""
        return self.cell.device is Device.CUDA and any(row[key] != DASH for row in rows)

    @property
    def legend(self) -> str:
        """What the columns are, in one line."""
        if not self.is_timed:
            return f"memory is the largest peak of a rank, and ratio that to {self.baseline}'s"
        scope = f"verdicts hold{scope_words(self.num_runs)}"
        if self.num_runs == 1:
            return (
                f"s/step: {NAME} of n trials; ratio to {self.baseline}: geometric mean over "
                f"blocks, below 1 is faster; {scope}"
            )
        text = (
            f"s/step, and ratio to {self.baseline}: {NAME} over {self.num_runs} runs, below 1 is "
            "faster; memory and n trials: of the first"
        )
        if self.num_runs < MIN_RUNS:
            return text
        return (
            f"{text}; next run: where the ratio of another run falls in 95 of 100 cases; {scope}, "
            "and may differ on another day where that contains 1"
        )

    def share(self, value: float, *columns: str) -> str:
        """A value as a percentage of the largest in these columns, for bars."""
        known: list[float] = []
        for row in self.rows:
            for name in columns:
                number = getattr(row, name)
                if number is not None:
                    known.append(number)
        return f"{100 * value / max(known):.1f}%"


def _verdict_text(row: RankedRow) -> str:
    """The verdict of a row, with what is to say of it; a dash without one."""
    if row.verdict is None:
        return DASH
    text = str(row.verdict)
    if row.verdict not in DECIDED:
        text += f": {row.verdict_reason}"
    if row.may_differ:
        text += MAY_DIFFER
    return text


def _number(value: float | None) -> str:
    if value is None:
        return DASH
    return digits(value)


def interval_text(low: float | None, high: float | None) -> str:
    """An interval as the table shows it."""
    if low is None or high is None:
        return DASH
    return f"{digits(low)}-{digits(high)}"


def below_ratio(time: Interval) -> str:
    """What stands below a ratio: its interval, or the ratio of each run where they are too few."""
    if time.runs and time.next_low is None:
        return ", ".join(map(digits, time.runs))
    return interval_text(time.low, time.high)


def ratio_text(time: Interval) -> str:
    """A ratio with all that is known of it, as sentences have it."""
    if not time.runs:
        return f"{digits(time.ratio)}{ends_text(time.low, time.high)}"
    if time.next_low is None or time.next_high is None:
        return f"{' and '.join(map(digits, time.runs))} in two runs"
    ends = f"95 % {interval_text(time.low, time.high)}"
    next_run = f"next run {interval_text(time.next_low, time.next_high)}"
    return f"{digits(time.ratio)} ({ends}, {next_run})"


def ends_text(low: float | None, high: float | None) -> str:
    """An interval in brackets behind its centre; empty without one."""
    if low is None or high is None:
        return ""
    return f" (95 % {interval_text(low, high)})"


def groups(data: Analysis) -> list[Group]:
    """All groups.

    Real ranks, times, the baseline, the largest N and the most ranks come first, in this order. If
    HSDP runs with several numbers of replicas, each is a group of its own.
    """
    others = []
    for cell in data.run.cells.values():
        if not cell.is_reference and not cell.twin:
            others.append(cell)
    several_replicates = "replicate" in differing(others)
    alike: dict[Cell, list[Cell]] = {}
    for cell in others:
        replicate = 0
        if several_replicates:
            replicate = cell.replicate
        kind = replace(cell, backend="", replicate=replicate)
        alike.setdefault(kind, []).append(cell)
    firsts = [cells[0] for cells in alike.values()]
    every_way = differing(firsts, ("precision", *WAYS))
    ways = [name for name in every_way if name != "accumulate"]
    found = [_group(data, cells, ways) for cells in alike.values()]
    found.sort(key=_place_of, reverse=True)
    marks = _marks(found)
    return [replace(group, marks=marks) for group in found]


def _marks(groups: Sequence[Group]) -> dict[str, str]:
    """A letter for each change, in the order in which rows have them."""
    found: dict[str, str] = {}
    for group in groups:
        for row in group.rows:
            for words in row.changes:
                found.setdefault(words, ascii_lowercase[len(found)])
    return found


def footnote_of(groups: Sequence[Group]) -> str:
    """What the letters in the tables of these groups stand for, in a sentence; empty without any."""
    found: dict[str, str] = {}
    for group in groups:
        for row in group.rows:
            for words in row.changes:
                found[group.marks[words]] = words
    if not found:
        return ""
    notes = [f"({mark}) {found[mark]}" for mark in sorted(found)]
    return f"What the bench changes in a framework (docs/settings.md): {'; '.join(notes)}"


def _place_of(group: Group) -> tuple[bool, bool, bool, int, int]:
    """What decides on the order of groups."""
    has_baseline = any(row.backend == group.baseline for row in group.rows)
    has_all_ranks, ranks = group.cell.world.has_all_ranks, group.cell.world_size
    return has_all_ranks, group.is_timed, has_baseline, group.n, ranks


def _group(data: Analysis, cells: list[Cell], ways: list[str]) -> Group:
    first = cells[0]
    is_timed = _is_timed(data, cells)
    baseline_bytes = _baseline_bytes(data, cells)
    shown = []
    for cell in cells:
        row = _ranked(data, data.rows[cell.cell_id], baseline_bytes)
        if not is_timed:
            row = row.without_times()
        shown.append(row)
    world = f"W = {first.world_size}"
    if first.world.label:
        world += f" ({first.world.label})"
    return Group(
        cell=first,
        setting=", ".join([world, *phrases(first, ways)]),
        rows=tuple(sorted(shown, key=_sort_key)),
        baseline=data.baseline,
        is_timed=is_timed,
        num_runs=len(data.pool.runs),
    )


def _is_timed(data: Analysis, cells: Sequence[Cell]) -> bool:
    """Whether the times of these cells are shown: not of those that all run once beside others."""
    if data.times_unavailable is not None or not cells[0].world.times_communication:
        return False
    once = data.run.manifest.once
    return any(cell.cell_id not in once for cell in cells)


def _baseline_bytes(data: Analysis, cells: Sequence[Cell]) -> int | None:
    """The peak of the baseline's cell among these."""
    for cell in cells:
        row = data.rows[cell.cell_id]
        if row.backend == data.baseline:
            return row.peak_memory_bytes
    return None


def _ranked(data: Analysis, row: CellRow, baseline_bytes: int | None) -> RankedRow:
    share = None
    if baseline_bytes and row.peak_memory_bytes is not None:
        share = row.peak_memory_bytes / baseline_bytes
    correct = row.outcome
    if row.status == Status.OK:
        correct = "not checked"
        if row.cell.world.has_values:
            correct = "yes"
        if row.outcome != Status.OK:  # it is right within what its backend declares
            correct = row.outcome.removeprefix(f"{Status.OK}, ")
    time, may_differ = None, False
    pair = data.pairs.get(row.cell_id)
    if pair is not None:
        time, may_differ = pair.time, pair.may_differ
    return RankedRow(
        **vars(row),
        memory_ratio=share,
        correct=correct,
        time=time,
        may_differ=may_differ,
        changes=as_benched(row.cell),
    )


def _sort_key(row: RankedRow) -> tuple[float, float, str]:
    """The fastest first; without times the least memory first; cells with neither last."""
    seconds, memory = math.inf, math.inf
    if row.step_time_s is not None:
        seconds = row.step_time_s
    if row.peak_memory_bytes is not None:
        memory = row.peak_memory_bytes
    return seconds, memory, row.backend
