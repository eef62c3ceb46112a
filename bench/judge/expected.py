"""What a trial is held against: the losses of its reference, and the bytes of the formulas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

from bench.grouping import grouped
from bench.judge.columns import WORK
from bench.judge.formula_terms import NO_SETTINGS, Settings
from bench.judge.formulas import BYTES, Expectation, expect, layout_of
from bench.judge.tables import CollectiveRow, MemoryRow, Tables
from bench.judge.trial_columns import TrialRow
from bench.plan.categories import (
    COPIED_TO_DEVICE,
    COPIED_TO_HOST,
    HELD,
    ON_HOST,
    PEAK,
    Category,
)
from bench.plan.cell import Cell, Device, Status, among
from bench.run.trial_record import TrialRecord
from bench.workload.layout import Layout

LONG_STEPS = 200
"""A training of this many optimizer steps is long: rounding alone makes its losses diverge in the
end."""
COMPARED_STEPS = 50
"""Number of first losses compared in a long training: correct backends differed by up to 2e-4 nats
after 60 steps. The state at the end of a training of more steps is compared between ranks alone."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Absolute differences between the losses of a trial and of the reference, in their unit."""

    first: float
    """At the first step."""
    largest: float
    """Over the compared steps; NaN if any loss is not finite."""
    num_steps: int
    """Number of compared first steps; at most as many as the reference has."""
    size: float
    """Largest absolute value of the reference's losses over these steps."""
    spread: float
    """Difference between the largest and the smallest of them."""


class Losses:
    """The losses of a run."""

    def __init__(self, tables: Tables) -> None:
        ordered = sorted(tables.loss_rows, key=lambda row: row.step)
        self._of = grouped(((row.cell_id, row.repeat), float(row.loss)) for row in ordered)
        """By cell id and repeat."""
        self._expected: dict[str, Sequence[float]] = {}
        """The reference's losses, by the id of the cell that is compared with it."""
        self._references: dict[tuple[object, ...], Sequence[float]] = {}
        """Losses of the reference trained for most steps, from its first good trial."""
        for row in sorted(tables.trial_rows, key=lambda row: row.repeat):
            if not row.cell.is_reference or row.status is not Status.OK:
                continue
            key = self._key(row.cell, row.cell.backend, row.cell.world_size)
            if len(self._complete(row)) > len(self._references.get(key, ())):
                self._references[key] = self._complete(row)

    def deviation(self, row: TrialRow) -> Deviation | None:
        """The deviation of a trial; None if it has not one loss per step, or no reference."""
        losses, expected = self._complete(row), self._of_reference(row.cell)
        apart = [abs(a - b) for a, b in zip(losses, expected, strict=False)]
        if not apart:
            return None
        compared = apart
        if len(losses) >= LONG_STEPS:
            compared = apart[:COMPARED_STEPS]
        largest = math.nan
        if all(map(math.isfinite, [*losses, *apart])):
            largest = max(compared)
        right = expected[: len(compared)]
        size, spread = max(map(abs, right)), max(right) - min(right)
        return Deviation(apart[0], largest, len(compared), size, spread)

    def _of_reference(self, cell: Cell) -> Sequence[float]:
        """The losses that a cell should have; empty if no reference has all of its own."""
        if cell.cell_id not in self._expected:
            reference = cell.reference()
            key = self._key(cell, reference.backend, reference.world_size)
            self._expected[cell.cell_id] = self._references.get(key, ())
        return self._expected[cell.cell_id]

    def _complete(self, row: TrialRow) -> Sequence[float]:
        """The losses of a trial; empty if any is missing."""
        found = self._of.get(row.key, [])
        if len(found) != row.optimizer_steps_expected:
            return ()
        return found

    @staticmethod
    def _key(cell: Cell, backend: str, world_size: int) -> tuple[object, ...]:
        """Identifies a reference and its work."""
        return (backend, world_size, *(getattr(cell, name) for name in WORK))


def extent(tables: Tables) -> str:
    """A sentence on how many steps of losses were compared; empty if all were."""
    losses = Losses(tables)
    first: dict[str, TrialRow] = {}
    for row in tables.trial_rows:
        if row.max_loss_deviation is not None:
            first.setdefault(row.cell.cell_id, row)
    short: set[int] = set()
    for row in first.values():
        found = losses.deviation(row)
        if found is not None and found.num_steps < row.cell.windows:
            short.add(found.num_steps)
    if not short:
        return ""
    steps = " or ".join(map(str, sorted(short)))
    return f"Losses of longer trainings were compared over the first {steps} steps alone."


TRACKED = "tracked"
"""Prefix of the ledger's categories in the memory table."""
GRADIENTS = "gradients"
"""What ``Expectation.held`` calls them."""
NONE = (0, 0)
"""Calls and payload bytes of an operation that is not there."""


def fill(
    tables: Tables,
    records: Sequence[TrialRecord] = (),
    peaks: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Tables, dict[str, list[str]]]:
    """Add the expected collectives to every successful trial that counted them.

    Returns new tables, and by cell_id one line per operation or category that differs. The
    ``records`` have the layouts of models that are not shipped, and the settings that backends had;
    ``peaks``, by cell_id, are the peaks of memory in bytes that run.json predicted before the run.
    An operation that is expected but was not seen gets a row with 0 calls; one that was seen but
    not expected has 0 expected calls. Without a formula (a plug-in backend, a model of unknown
    layout) the columns stay empty.
    """
    settings = settings_of(records)
    layouts = {record.cell_id: record.layout for record in records if record.layout is not None}
    counted = grouped(((row.cell_id, row.repeat), row) for row in tables.collective_rows)
    tracked = grouped(((row.cell_id, row.repeat), row) for row in tables.memory_rows)
    filled: list[CollectiveRow] = []
    memory = list(tables.memory_rows)
    watched = cells_watched(tables)
    findings: dict[str, list[str]] = {}
    for trial in tables.trial_rows:
        cell, cell_id = trial.cell, trial.cell.cell_id
        if not _may_count(trial) or (cell.device is Device.CUDA and cell_id not in watched):
            continue
        layout = layouts.get(cell_id)
        if layout is None:
            layout = layout_of(cell)
        given = settings.get(cell_id, NO_SETTINGS)
        if layout is None or (expectation := expect(cell, layout, settings=given)) is None:
            continue
        found: list[str] = []
        for row in _beside_expected(trial, counted.pop(trial.key, []), expectation):
            filled.append(row)
            found += _unlike(row)
        sizes = {row.category: row.bytes for row in tracked.get(trial.key, [])}
        for category, size, should in _memory(sizes, cell, layout, peaks.get(cell_id), given):
            memory.append(MemoryRow(cell_id, trial.repeat, category, size, should))
            if category != PEAK and size != should:
                found.append(f"{_what(category)}: {size} bytes, not {should}")
        if found:
            findings.setdefault(cell_id, []).extend(found)
    untouched = list(chain.from_iterable(counted.values()))
    new = replace(tables, collective_rows=[*untouched, *filled], memory_rows=memory)
    return new, findings


def _unlike(row: CollectiveRow) -> list[str]:
    """How an operation differs from what is expected of it; empty if it does not."""
    if row.calls == row.expected_calls and row.payload_bytes == row.expected_payload_bytes:
        return []
    return [
        f"{row.op} of {row.dtype}{among(row.group)}: {row.calls} calls and {row.payload_bytes} "
        f"bytes per window, not {row.expected_calls} and {row.expected_payload_bytes}"
    ]


def _may_count(trial: TrialRow) -> bool:
    """Whether a trial may have run the passes that count.

    All but the time pass run together, in one trial of a cell.
    """
    return trial.status in (Status.OK, Status.INVALID) and trial.num_passes != 1


def _beside_expected(
    trial: TrialRow, counted: Sequence[CollectiveRow], expectation: Expectation
) -> Iterator[CollectiveRow]:
    """What was counted in a trial and what was expected, by operation, group and dtype."""
    seen: dict[tuple[str, str, str], tuple[int, int]] = {}
    for row in counted:
        seen[row.op, row.group, row.dtype] = row.calls, row.payload_bytes
    right: dict[tuple[str, str, str], tuple[int, int]] = {}
    for call in expectation.collectives:
        right[call.op, call.group, call.dtype] = call.calls, call.payload_bytes
    for kind in sorted(seen.keys() | right.keys()):
        calls, size = seen.get(kind, NONE)
        expected_calls, expected_size = right.get(kind, NONE)
        yield CollectiveRow(
            trial.cell.cell_id, trial.repeat, *kind, calls, size, expected_calls, expected_size
        )


def cells_watched(tables: Tables) -> set[str]:
    """Ids of the cells whose collectives or memory were watched; on CUDA only at one N."""
    found = {row.cell_id for row in tables.collective_rows}
    for row in tables.memory_rows:
        if row.category.startswith(TRACKED):
            found.add(row.cell_id)
    return found


def _memory(
    sizes: Mapping[str, int], cell: Cell, layout: Layout, predicted: int | None, settings: Settings
) -> Iterator[tuple[str, int, int]]:
    """Categories with their measured and expected bytes.

    There is none for what was not measured or is already judged. ``held_<use>`` is held between
    micro-batches, and covers the use's sharded and unsharded categories; it is not measured at
    N = 1. Those of the host begin with ON_HOST. ``peak`` is the peak without OTHER beside the
    prediction, and differs without being wrong.
    """
    if any(name.startswith(TRACKED) for name in sizes):
        fullest = _fullest(cell, layout, settings)
        wanted: dict[str, int] = {}
        for use, size in fullest.held.items():
            wanted[f"{HELD}_{use}"] = size
        wanted |= fullest.beside
        for name, size in wanted.items():
            measured = _measured(sizes, name)
            if measured is None or name in sizes:
                continue
            should = size
            if name == f"{HELD}_{GRADIENTS}":
                should = _with_overhang(size, measured, layout)
            yield name, measured, should
    total, other = f"{TRACKED}_{PEAK}", f"{TRACKED}_{PEAK}_{Category.OTHER}"
    if predicted is not None and PEAK not in sizes and sizes.keys() >= {total, other}:
        yield PEAK, int(sizes[total]) - int(sizes[other]), predicted


def _with_overhang(size: int, measured: int, layout: Layout) -> int:
    """What gradients may take of what was measured, ``size`` of which are the gradients themselves.

    Where all gradients are held in full, they may be those that autograd keeps in the plain model,
    which can be views of larger tensors, or copies of some or all of them.
    """
    if size < BYTES["float32"] * layout.num_parameters:
        return size
    kept = size + layout.gradient_overhang
    return min(max(measured, min(size, kept)), max(size, kept))


def _measured(sizes: Mapping[str, int], name: str) -> int | None:
    """What was measured under a name, or for a use, sharded and unsharded; None if nothing was."""
    tracked = f"{TRACKED}_{name}"
    if tracked in sizes:
        return int(sizes[tracked])
    parts = [int(size) for each, size in sizes.items() if each.startswith(f"{tracked}_")]
    if not parts:
        return None
    return sum(parts)


def _what(category: str) -> str:
    """What is compared, in words."""
    if category in (COPIED_TO_DEVICE, COPIED_TO_HOST):
        return f"{category.replace('_', ' ')} in a window"
    rest = category.removeprefix(f"{ON_HOST}_")
    use = rest.removeprefix(f"{HELD}_")
    if rest != category:
        use = f"{use} on the host"
    return f"{use} held between micro-batches"


def _fullest(cell: Cell, layout: Layout, settings: Settings) -> Expectation:
    """What is expected of the rank that holds most, which is the one that a merged record shows.

    Ranks differ if parameters do not divide evenly: the last shards are shorter, and ZeRO-2's
    partitions overlap different parameters.
    """
    fullest: Expectation | None = None
    most = -1
    for rank in range(cell.num_processes):
        found = expect(cell, layout, rank=rank, settings=settings)
        if found is not None and sum(found.held.values()) > most:
            fullest = found
            most = sum(found.held.values())
    assert fullest is not None, "callers have an expectation for the cell"
    return fullest


def settings_of(records: Iterable[TrialRecord]) -> dict[str, Settings]:
    """The backend's settings that the trials of a cell have stored, by cell_id."""
    found: dict[str, Settings] = {}
    for record in records:
        if record.backend_settings is not None:
            found[record.cell_id] = record.backend_settings
    return found
