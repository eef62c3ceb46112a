"""Builds the tables of a run from its journal: SI units, counts as ``num_``, failed trials too.

Rows are typed, and keep their cells; frames of pandas, with the columns of ``bench.judge.columns``,
are made of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from bench.files import replacing
from bench.judge.columns import dtypes, labels
from bench.judge.trial_columns import TrialRow
from bench.measure.projection import TRAINED
from bench.plan.cell import Cell, Precision, Status
from bench.plan.gpu_kinds import peak_flops
from bench.run.manifest import Manifest
from bench.run.trial_record import (
    EndCheck,
    ExposedTime,
    GpuSummary,
    MergedTimings,
    RanksApart,
    SummedIn,
    TrialRecord,
    UpdateCheck,
    WindowCost,
)

Value: TypeAlias = str | int | float | bool | None
"""A value of a frame; None is missing."""
RowValues: TypeAlias = dict[str, Value]
"""A row of a frame, by column."""
SLOWED_SHARE = 0.1
"""Share of the samples from which on a reason for lowered clocks counts."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """A timed optimizer step."""

    cell_id: str
    repeat: int
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LossRow:
    """The loss of an optimizer step; it may be NaN."""

    cell_id: str
    repeat: int
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """A counted operation; what is expected is None without a formula."""

    cell_id: str
    repeat: int
    op: str
    group: str
    dtype: str
    calls: int
    payload_bytes: int
    expected_calls: int | None = None
    expected_payload_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The bytes of a category; what is expected is None without a formula."""

    cell_id: str
    repeat: int
    category: str
    bytes: int
    expected_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The tables of one run, by name (``NAMES``); each is also a parquet file in its folder."""

    trial_rows: Sequence[TrialRow] = ()
    step_rows: Sequence[StepRow] = ()
    loss_rows: Sequence[LossRow] = ()
    collective_rows: Sequence[CollectiveRow] = ()
    memory_rows: Sequence[MemoryRow] = ()
    failures: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    """What the gates found of each trial that failed one, by cell_id and repeat."""

    @cached_property
    def trials(self) -> pd.DataFrame:
        return frame_of("trials", [row.values() for row in self.trial_rows])

    @cached_property
    def steps(self) -> pd.DataFrame:
        return _frame_of_rows("steps", self.step_rows)

    @cached_property
    def losses(self) -> pd.DataFrame:
        return _frame_of_rows("losses", self.loss_rows)

    @cached_property
    def collectives(self) -> pd.DataFrame:
        return _frame_of_rows("collectives", self.collective_rows)

    @cached_property
    def memory(self) -> pd.DataFrame:
        return _frame_of_rows("memory", self.memory_rows)

    def write(self, folder: Path) -> list[Path]:
        """Write each table as a parquet file, atomically; return the paths."""
        paths = []
        for name in NAMES:
            path = folder / f"{name}.parquet"
            with replacing(path) as draft:
                getattr(self, name).to_parquet(draft, index=False)
            paths.append(path)
        return paths


NAMES = ("trials", "steps", "losses", "collectives", "memory")
"""Names of the tables that are built from the journal."""


def build(records: Iterable[TrialRecord], manifest: Manifest) -> Tables:
    """The tables of the journal's records, not yet judged.

    Of several records of a cell and repeat, the last counts.
    """
    latest: dict[tuple[str, int], TrialRecord] = {}
    for record in records:
        latest[record.key] = record
    cells: dict[str, Cell] = {}
    measured: dict[str, MeasuredOnce] = {}
    for record in latest.values():
        cells[record.cell_id] = record.cell
        measured.setdefault(record.cell_id, MeasuredOnce()).note(record)
    named = labels(cells.values())
    trials: list[TrialRow] = []
    steps: list[StepRow] = []
    losses: list[LossRow] = []
    collectives: list[CollectiveRow] = []
    memory: list[MemoryRow] = []
    for record in latest.values():
        label = named[record.cell]
        trials.append(_trial_row(record, manifest, measured[record.cell_id], label))
        steps += _step_rows(record)
        losses += _loss_rows(record)
        collectives += _collective_rows(record)
        memory += _memory_rows(record)
    return Tables(
        trial_rows=trials,
        step_rows=steps,
        loss_rows=losses,
        collective_rows=collectives,
        memory_rows=memory,
    )


def frame_of(name: str, rows: pd.DataFrame | Sequence[Mapping[str, object]]) -> pd.DataFrame:
    """A frame with the columns and dtypes of the named table; missing values are NA."""
    columns = dtypes(name)
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def _frame_of_rows(
    name: str, rows: Sequence[StepRow | LossRow | CollectiveRow | MemoryRow]
) -> pd.DataFrame:
    columns = dtypes(name)
    values = {}
    for column in columns:
        values[column] = [getattr(row, column) for row in rows]
    return pd.DataFrame(values, columns=list(columns)).astype(columns)


def good_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """The ok trials of each cell, or all of a cell that has none and is shown with its status."""
    fine = trials["status"] == Status.OK
    return trials[fine | ~fine.groupby(trials["cell_id"]).transform("any")]


def rows_of(frame: pd.DataFrame) -> list[RowValues]:
    """The rows of a frame as plain values, by column; missing values are None.

    ``to_dict`` takes four times as long.
    """
    names = [str(name) for name in frame]
    columns = []
    for name in names:
        columns.append(frame[name].to_numpy(object, na_value=None))  # type: ignore[call-overload]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def text_in(row: Mapping[str, Value], name: str) -> str | None:
    """The text in a column."""
    value = row[name]
    if value is None:
        return None
    return str(value)


def required_text(row: Mapping[str, Value], name: str) -> str:
    """The text in a column that has one in every row."""
    text = text_in(row, name)
    assert text is not None, f"{name} is never missing"
    return text


def number_in(row: Mapping[str, Value], name: str) -> float | None:
    """The number in a column."""
    value = row[name]
    if value is None:
        return None
    return float(value)


def count_in(row: Mapping[str, Value], name: str) -> int | None:
    """The integer in a column."""
    value = row[name]
    if value is None:
        return None
    return int(value)


def required_count(row: Mapping[str, Value], name: str) -> int:
    """The integer in a column that has one in every row."""
    count = count_in(row, name)
    assert count is not None, f"{name} is never missing"
    return count


@dataclass
class MeasuredOnce:
    """What one trial of a cell measures for all: the first result of each pass."""

    update: UpdateCheck | None = None
    memory: Mapping[str, int] | None = None
    accumulation: SummedIn | None = None
    dispatch: WindowCost | None = None
    exposure: ExposedTime | None = None

    def note(self, record: TrialRecord) -> None:
        """Take what is not known yet from the record of another trial."""
        if self.update is None:
            self.update = record.update
        if not self.memory:
            self.memory = record.memory
        if self.accumulation is None:
            self.accumulation = record.accumulation
        if self.dispatch is None:
            self.dispatch = record.dispatch
        if self.exposure is None:
            self.exposure = record.exposure


def _trial_row(
    record: TrialRecord, manifest: Manifest, measured: MeasuredOnce, label: str
) -> TrialRow:
    """A row of the trials table; all good trials of a cell have what is measured once for it."""
    cell, described = record.cell, manifest.backends.get(record.cell.backend, {})
    row = TrialRow(
        cell=cell,
        label=label,
        run_id=manifest.run_id,
        repeat=record.repeat,
        status=record.status,
        reason=record.reason,
        wall_s=record.wall_s,
        num_passes=len(record.passes),
    )
    row.slot = record.slot
    row.framework, row.sharding = described.get("framework"), described.get("sharding")
    row.sync = described.get("sync")
    row.facts.lossy = manifest.lossy.get(cell.cell_id)
    if cell.precision is Precision.BF16:
        row.bf16_as = described.get("bf16_as")
    row.num_parameters = record.num_parameters
    row.device_name = record.device_name
    row.entropy_floor = known(record.entropy_floor)
    if record.training_s is not None:
        row.training_s = record.training_s
        row.overhead_s = record.wall_s - record.training_s
    if record.status is Status.OK:
        _add_once(row, measured)
    if record.time is not None:
        _add_timed(row, record, record.time, manifest)
    return row


def known(number: float | None) -> float | None:
    """A number of a record, whose NaN is as missing in a row as what was not measured."""
    if number is None or math.isnan(number):
        return None
    return number


def _add_once(row: TrialRow, measured: MeasuredOnce) -> None:
    if measured.update is not None:
        _add_update(row, measured.update)
    if measured.memory and "peak" in measured.memory:
        row.peak_memory_bytes = measured.memory["peak"]
        row.peak_memory_source = "tracked tensors"
    if measured.accumulation is not None:
        row.accumulated_in = measured.accumulation.dtype
        row.stepped_in = measured.accumulation.result_dtype
    if (cost := measured.dispatch) is not None:
        row.other_work = cost.other_work
        n = row.cell.accumulate
        if cost.product_flops is not None:
            row.facts.product_flops = cost.product_flops * row.cell.world_size
        if cost.cpu_s is not None and row.cell.world.is_timed:
            row.cpu_s_per_micro_batch = cost.cpu_s / n
        if cost.num_operators is not None:
            row.num_operators_per_micro_batch = cost.num_operators / n
        if cost.num_launches is not None:
            row.num_launches_per_micro_batch = cost.num_launches / n
    if measured.exposure is not None:
        row.collective_s = measured.exposure.collective_s
        row.exposed_s = measured.exposure.exposed_s


def _add_update(row: TrialRow, update: UpdateCheck) -> None:
    row.update_error = known(update.error)
    row.update_scale = known(update.scale)
    row.update_residual = known(update.residual)
    row.gradient_norm = known(update.gradient_norm)
    row.unclipped_error = known(update.unclipped_error)
    row.unclipped_scale = known(update.unclipped_scale)
    row.device_error = known(update.device_error)
    row.device_loss_deviation = known(update.device_loss_deviation)
    row.device_loss_size = known(update.device_loss_size)
    row.update_tensor_error = known(update.tensor_error)
    row.update_tensor = update.tensor
    row.fp32_update_error = known(update.fp32_error)
    row.fp32_tensor_error = known(update.fp32_tensor_error)
    row.fp32_tensor = update.fp32_tensor
    if update.fp32_unchecked:
        row.leave_unchecked(f"the update in fp32: {update.fp32_unchecked}")
    if update.ranks is not None:
        _add_ranks(row, update.ranks, "after the update")


def step_time(cell: Cell, timed: MergedTimings | None) -> float | None:
    """The median of a trial's steps after warm-up in seconds; None if it has no such times."""
    if timed is None or not timed.step_seconds or not cell.world.is_timed:
        return None
    return float(statistics.median(timed.step_seconds))


def _add_timed(
    row: TrialRow, record: TrialRecord, timed: MergedTimings, manifest: Manifest
) -> None:
    cell = row.cell
    row.num_micro_batches = timed.num_micro_batches
    row.optimizer_steps_observed = timed.num_updates
    row.ranks_agree = timed.ranks_agree
    if timed.end is not None:
        _add_end(row, timed.end)
    row.micro_batches_per_update = ",".join(map(str, timed.micro_batches_per_update))
    if timed.losses:
        row.final_loss = known(timed.losses[-1])
    if timed.reported:
        row.optimizer_steps_reported_by = next(iter(timed.reported))
        row.optimizer_steps_reported = timed.reported[row.optimizer_steps_reported_by]
    if timed.host is not None:
        row.num_cpus = timed.host.num_cpus
        row.foreign_cores = known(timed.host.foreign_cores)
        row.stolen_cores = known(timed.host.stolen_cores)
    if record.gpus is not None and cell.world.is_timed:
        _add_gpus(row, record.gpus.gpus, len(timed.step_seconds), record.tokens_per_step)
    seconds = step_time(cell, timed)
    if seconds is not None:
        row.num_warmup_steps = cell.warmup_windows
        row.step_time_s = seconds
        row.facts.span_s, row.facts.observed_span_s = timed.span_s, timed.observed_span_s
        row.facts.marking_s = timed.marking_s
        row.facts.steps_s = _own_steps(timed)
        if cell.world.times_communication:
            _add_rates(row, record, seconds, manifest)
    if timed.cuda_memory:
        row.peak_memory_bytes = timed.cuda_memory["allocated"]
        row.peak_memory_source = "CUDA allocator, allocated"


def _own_steps(timed: MergedTimings) -> float | None:
    """Seconds of all steps of the rank whose own take the least together; None if unknown.

    The warm-up counts where there is one rank: of several, only that of the slowest is recorded.
    """
    if not timed.rank_step_seconds:
        return None
    least = min(map(math.fsum, timed.rank_step_seconds))
    if len(timed.rank_step_seconds) == 1:
        least += math.fsum(timed.warmup_seconds)
    return least


def _add_end(row: TrialRow, end: EndCheck) -> None:
    """What ranks held after the last window."""
    row.optimizer_steps_counted = end.steps
    row.other_settings, row.rounded_to_bf16 = "; ".join(end.settings), ", ".join(end.rounded)
    for kind, wrong in end.errors.items():
        error = known(wrong.error)
        if error is None:
            continue
        if kind == TRAINED:
            row.end_weights_error, row.end_weights_tensor = error, wrong.tensor
        elif row.end_state_error is None or error > row.end_state_error:
            row.end_state_error, row.end_state_tensor = error, f"{kind} of {wrong.tensor}"
    if end.ranks is not None:
        _add_ranks(row, end.ranks, "after the last window")
    if end.unchecked:
        row.leave_unchecked(f"the state at the end: {end.unchecked}")


def _add_ranks(row: TrialRow, apart: RanksApart, when: str) -> None:
    """Note the tensor of which ranks are furthest apart, and when: it is compared twice."""
    if row.ranks_apart is None or apart.error > row.ranks_apart:
        row.ranks_apart = apart.error
        row.ranks_apart_tensor = f"{apart.tensor} on rank {apart.rank} {when}"


def _add_rates(row: TrialRow, record: TrialRecord, seconds: float, manifest: Manifest) -> None:
    """Rates of a trial whose ranks all exist and communicate."""
    cell = row.cell
    if record.tokens_per_step is not None:
        row.tokens_per_s = record.tokens_per_step / seconds
    measured = manifest.rates(cell.world_size, cell.num_nodes)
    if measured is not None:
        row.link_bytes_per_s = measured.all_reduce_rate
        if products := measured.flops_per_s.get(cell.precision):  # of each rank
            capacity = measured.capacity.get(cell.precision, products)
            row.facts.matmul_capacity = math.fsum(capacity)
    if not record.flops_per_step:
        return
    rate = record.flops_per_step / seconds
    if record.device_name is not None:
        peak = peak_flops(record.device_name, cell.precision)
        if peak is not None:
            row.mfu = rate / (peak * cell.world_size)
    row.facts.model_flops = record.flops_per_step
    if measured is not None and (products := measured.flops_per_s.get(cell.precision)):
        row.mfu_of_matmul = rate / math.fsum(products)


def _add_gpus(
    row: TrialRow, gpus: Sequence[GpuSummary], num_steps: int, tokens_per_step: float | None
) -> None:
    """NVML's values over all GPUs: lowest clock, top temperature, total power and energy.

    None if any GPU lacks the value.
    """
    clocks = _of_all(gpu.sm_clock_mhz for gpu in gpus)
    if clocks:
        row.sm_clock_mhz = min(clocks)
    powers = _of_all(gpu.power_w for gpu in gpus)
    if powers:
        row.power_w = sum(powers)
    temperatures = _of_all(gpu.temperature_c for gpu in gpus)
    if temperatures:
        row.temperature_c = max(temperatures)
    energies = _of_all(gpu.energy_j for gpu in gpus)
    if energies and num_steps:
        row.energy_j_per_step = sum(energies) / num_steps
        if tokens_per_step:
            row.energy_j_per_token = row.energy_j_per_step / tokens_per_step
    others = _of_all(gpu.other_processes for gpu in gpus)
    if others:
        row.foreign_gpu_processes = int(sum(others))
    slowdowns = _slowdowns(gpus)
    if gpus and slowdowns is not None:
        row.clock_slowdowns = ",".join(slowdowns)


def _of_all(numbers: Iterable[float | None]) -> list[float]:
    """The numbers; none if one is missing."""
    found: list[float] = []
    for number in numbers:
        if number is None:
            return []
        found.append(number)
    return found


def _slowdowns(gpus: Sequence[GpuSummary]) -> list[str] | None:
    """The reasons for which some GPU's clock was lowered in a good part of the samples.

    None if they are unknown of a GPU.
    """
    found: set[str] = set()
    for gpu in gpus:
        if gpu.slowdowns is None or gpu.throttle is None:
            return None
        for name in gpu.slowdowns:
            if gpu.throttle[name] >= SLOWED_SHARE:
                found.add(name)
    return sorted(found)


def _step_rows(record: TrialRecord) -> list[StepRow]:
    timed = record.time
    if timed is None or not record.cell.world.is_timed:
        return []
    found = []
    for step, seconds in enumerate(timed.step_seconds, start=record.cell.warmup_windows):
        found.append(StepRow(record.cell_id, record.repeat, step, seconds))
    return found


def _loss_rows(record: TrialRecord) -> list[LossRow]:
    if record.time is None:
        return []
    found = []
    for step, loss in enumerate(record.time.losses):
        found.append(LossRow(record.cell_id, record.repeat, step, loss))
    return found


def _collective_rows(record: TrialRecord) -> list[CollectiveRow]:
    if record.collectives is None:
        return []
    found = []
    for seen in record.collectives:
        row = CollectiveRow(
            cell_id=record.cell_id,
            repeat=record.repeat,
            op=seen.op,
            group=seen.group,
            dtype=seen.dtype,
            calls=seen.calls,
            payload_bytes=seen.payload_bytes,
        )
        found.append(row)
    return found


def _memory_rows(record: TrialRecord) -> list[MemoryRow]:
    sizes: dict[str, int] = {}
    if record.memory is not None:
        for name, size in record.memory.items():
            if "retries" not in name:
                sizes[f"tracked_{name}"] = size
    if record.time is not None and record.time.cuda_memory:
        peaks = record.time.cuda_memory
        for name in ("allocated", "active", "reserved"):
            if name in peaks:
                sizes[f"cuda_{name}"] = peaks[name]
    return [MemoryRow(record.cell_id, record.repeat, name, size) for name, size in sizes.items()]
