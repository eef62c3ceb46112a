"""The record of a trial: merged from the results of its ranks, without warm-up, and validated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from bench import validation
from bench.errors import InputError
from bench.measure import dispatch, exposure, host
from bench.measure.projection import Part, Truths
from bench.plan.categories import COPIED_TO_DEVICE, COPIED_TO_HOST, HELD, ON_HOST, PEAK
from bench.plan.cell import Cell, Status
from bench.run.state_check import check_end, parts_of, ranks_apart
from bench.validation import (
    Amount,
    Duration,
    Expect,
    Flag,
    Integer,
    Natural,
    Number,
    PositiveNumber,
    Seconds,
)
from bench.workload.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Timings:
    """What the time pass of a rank and those of all ranks have in common.

    A loss may be any number, even NaN: the gates check it.
    """

    warmup_seconds: list[Seconds]
    step_seconds: list[Duration]
    began: Number | None
    ended: Number
    losses: list[Number]
    num_micro_batches: Natural
    num_fetched: Natural
    num_updates: Natural
    num_inner_steps: Natural
    micro_batches_per_update: list[Natural]
    reported: dict[str, Natural]
    settings: dict[str, object]
    cuda_memory: dict[str, Natural] | None
    span_s: Seconds | None = None
    """From the first fetch to the last step, by the rank's clock; None in older journals."""
    marking_s: Seconds = 0.0
    """What the kernel's clock may tell more."""
    observed_span_s: Number | None = None
    """The same by the kernel's clock (``bench.measure.heartbeat``); None if that was set meanwhile.
    """


@dataclass(frozen=True, kw_only=True)
class WrongTensor:
    """The tensor of a kind that is furthest from the reference's."""

    error: Number
    """Distance, relative to what training has made of it."""
    tensor: str


@dataclass(frozen=True, kw_only=True)
class RanksApart:
    """The tensor of which two ranks hold values that are furthest apart."""

    error: Number
    """Distance, relative to the norm on the rank that has it first."""
    tensor: str
    rank: Natural
    """The other one."""
    num_tensors: Natural
    """Tensors, or shards, that several ranks hold."""


@dataclass(frozen=True, kw_only=True)
class EndCheck:
    """What the ranks held at the end, beside the reference's (``bench.run.state_check``)."""

    errors: dict[str, WrongTensor]
    """By kind: trained parameters, and keys of the optimizer's state."""
    num_tensors: Natural
    """Tensors that were compared with the reference's."""
    settings: list[str]
    """Of the optimizer, other than those that were due, in words."""
    steps: Natural | None
    """The most that an optimizer's state counts."""
    rounded: list[str]
    """Tensors with no more digits than bf16."""
    unchecked: str
    """Why something was not compared with the reference's; empty if all was."""
    ranks: RanksApart | None = None
    """None if no two ranks hold the same."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """What a rank held after the last window."""

    parts: list[Part]
    settings: list[str]
    steps: Natural | None
    whole: Flag
    """Whether tensors were gathered that the inner optimizer does not hold by the model's names."""


@dataclass(frozen=True, kw_only=True)
class RankTimings(Timings):
    """The time pass of a rank."""

    end: RankEnd | None = None

    host: dict[str, object] | None
    """``HostLoad.result`` of ``bench.measure.host``."""


@dataclass(frozen=True, kw_only=True)
class SharedCpus:
    """Who used the CPUs during the time pass: cores on average, or None if they were not read."""

    num_cpus: Natural | None = None
    own_cores: Number | None = None
    foreign_cores: Number | None = None
    stolen_cores: Number | None = None


@dataclass(frozen=True, kw_only=True)
class MergedTimings(Timings):
    """The time passes of all ranks, merged."""

    host: SharedCpus | None
    num_warmup: Natural
    """Steps before the timed ones. In older journals also timed ones that were taken for warm-up;
    all count now."""
    rank_step_seconds: list[list[Duration]] = field(default_factory=list)
    ranks_agree: Flag
    end: EndCheck | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateCheck:
    """The update of a window beside the reference's (``bench.measure.update``)."""

    error: Number
    scale: Number
    residual: Number
    gradient_norm: Number | None = None
    unclipped_error: Number | None = None
    unclipped_scale: Number | None = None
    device_error: Number | None = None
    device_loss_deviation: Number | None = None
    device_loss_size: Number | None = None
    tensor_error: Number | None = None
    """Of the parameter that is furthest off, ``tensor``."""
    tensor: str | None = None
    fp32_error: Number | None = None
    fp32_tensor_error: Number | None = None
    fp32_tensor: str | None = None
    fp32_unchecked: str = ""
    """Why a cell in bf16 has no update in fp32."""
    ranks: RanksApart | None = None


@dataclass(frozen=True, kw_only=True)
class CountedCollective:
    """The calls of one operation on one dtype in a window."""

    op: str
    group: str
    dtype: str
    calls: Natural
    payload_bytes: Natural


def _sizes(sizes: dict[str, int]) -> dict[str, int]:
    """Reject negative sizes, except ``_untracked``: the allocator's total minus the ledger's."""
    for name, size in sizes.items():
        if size < 0 and not name.endswith("_untracked"):
            raise ValueError("below 0")
    return sizes


@dataclass(frozen=True, kw_only=True)
class SummedIn:
    """The dtype in which gradients are summed."""

    dtype: str
    result_dtype: str | None = None
    """In which their sum reaches the optimizer."""


@dataclass(frozen=True, kw_only=True)
class WindowCost:
    """What a window costs the host (``bench.measure.dispatch``)."""

    cpu_s: Seconds | None
    num_operators: Amount | None
    num_launches: Amount | None
    other_work: str | None = None
    product_flops: Amount | None = None
    """Of the matrix products of a window on one rank, counted in the plain model."""


@dataclass(frozen=True, kw_only=True)
class ExposedTime:
    """Seconds of a window in collectives, and those that nothing hides."""

    collective_s: Seconds
    exposed_s: Seconds


MemoryBytes = Annotated[dict[str, Integer], AfterValidator(_sizes), Expect("a table of bytes")]
"""Bytes by category and total (``bench.plan.categories``)."""


@dataclass(frozen=True, kw_only=True)
class PassResults:
    """The results of passes; None for those that did not run, or found nothing."""

    settings: dict[str, object] | None = None
    """Of a trial without a time pass, whose result has them otherwise."""
    update: UpdateCheck | None = None
    collectives: list[CountedCollective] | None = None
    memory: MemoryBytes | None = None
    accumulation: SummedIn | None = None
    dispatch: WindowCost | None = None
    exposure: ExposedTime | None = None


@dataclass(frozen=True, kw_only=True)
class RankResult(PassResults):
    """What a rank returns."""

    num_parameters: Natural
    entropy_floor: Number | None
    tokens_per_step: PositiveNumber
    flops_per_step: Amount | None
    device_name: str
    training_s: Seconds
    time: RankTimings | None = None
    update_parts: list[Part] | None = None
    """Parameters after the windows of the update pass."""


@dataclass(frozen=True, kw_only=True)
class GpuSummary:
    """A GPU during the timed steps (``bench.launch.telemetry.summarize``); None is unknown."""

    sm_clock_mhz: Number | None = None
    power_w: Number | None = None
    temperature_c: Number | None = None
    throttle: dict[str, Number] | None = None
    slowdowns: list[str] | None = None
    energy_j: Number | None = None
    other_processes: Natural | None = None


@dataclass(frozen=True, kw_only=True)
class GpuTelemetry:
    """The GPUs of a trial."""

    gpus: list[GpuSummary] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TrialRecord(PassResults):
    """A record of the journal: one trial. One that failed has no results of ranks."""

    cell_id: str
    repeat: Natural
    cell: Cell
    status: Annotated[Status, Expect(f"one of {', '.join(Status)}")]
    reason: str
    wall_s: Seconds
    slot: Natural | None = None
    begun_sha256: str | None = None
    """``Manifest.begun_sha256`` when the trial ran; None in older runs."""
    cold: Flag | None = None
    """Whether its ranks were new interpreters; None if none was started."""
    passes: tuple[str, ...] = ()
    ended: str = ""
    last_lines: tuple[str, ...] = ()
    log: str = ""
    dumps: tuple[str, ...] = ()
    device_uuids: tuple[str | None, ...] = ()
    gpus: GpuTelemetry | None = None
    layout: Layout | None = None
    """Of a model that is not shipped."""
    num_parameters: Natural | None = None
    entropy_floor: Number | None = None
    tokens_per_step: PositiveNumber | None = None
    flops_per_step: Amount | None = None
    device_name: str | None = None
    training_s: Seconds | None = None
    time: MergedTimings | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the trial within its run."""
        return self.cell_id, self.repeat

    @property
    def backend_settings(self) -> dict[str, object] | None:
        """What the backend said of its settings; None if no pass asked it."""
        if self.time is None:
            return self.settings
        return self.time.settings


NEVER_EMPTY = ("time", "collectives", "memory", "dispatch")
"""Passes that always have a result if requested."""


def parse_records(records: Sequence[Mapping[str, object]], journal: Path) -> list[TrialRecord]:
    """The records of a journal.

    Raises InputError naming the journal, the record and the key of an impossible value.
    """
    found = []
    for number, record in enumerate(records, start=1):
        place = f"{journal}: trial {number} was edited: "
        found.append(validation.read(TrialRecord, record, place))
    return found


OF_HOLDING = (HELD, COPIED_TO_HOST, COPIED_TO_DEVICE)
"""How keys of memory begin that come from the rank that holds most."""


def merge(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Merge ``memory``: each total is the maximum over ranks, with its parts from the same rank.

    So the parts add up to their total. The allocator's values come from the rank with the largest
    peak. The host's come from the same rank as the device's, and what is copied from the one that
    holds most.
    """
    fullest = max(ranks, key=lambda memory: memory.get(PEAK, 0))
    most_held = max(ranks, key=lambda memory: memory.get(HELD, 0))
    of_peak = {name: size for name, size in fullest.items() if not _is_of_holding(name)}
    of_holding = {name: size for name, size in most_held.items() if _is_of_holding(name)}
    return of_peak | of_holding


def _is_of_holding(name: str) -> bool:
    return name.removeprefix(f"{ON_HOST}_").startswith(OF_HOLDING)


MERGES: Mapping[str, Callable[[list[Any]], object]] = {
    "memory": merge,
    "exposure": exposure.merge,
    "dispatch": dispatch.merge,
}
"""How the results of a pass are merged over ranks, where that takes nothing but these results."""


def merge_ranks(ranks: list[dict[str, Any]], truths: Truths | None = None) -> dict[str, Any]:
    """Merge the results of the ranks of one trial, rank 0 first.

    What they held at the end is compared with ``truths``. A step takes as long as its slowest rank,
    and one rank out of memory ends the trial, so times and memory are maxima (memory: see
    ``merge``). The loss of a step is the mean over ranks, since all see the same number of samples.
    Updates and collectives are rank 0's. Times of collectives are those of the rank with the most
    exposed time, and missing if any rank's are. Host costs of a window are maxima.

    ``num_warmup`` counts the steps before the timed ones: the warm-up windows of the cell.
    ``rank_step_seconds`` has the timed steps of every rank, and on GPUs ``device_uuids`` names the
    device of each.
    """
    first = ranks[0]
    merged = dict(first)
    for name in ("time", "memory", "device_uuid", "update_parts"):
        merged.pop(name, None)
    if first.get("device_uuid"):
        merged["device_uuids"] = [rank.get("device_uuid") for rank in ranks]
    merged["training_s"] = max(rank["training_s"] for rank in ranks)
    for name, merged_by in MERGES.items():
        if name in first:
            merged[name] = merged_by([rank[name] for rank in ranks])
    if "time" in first:
        merged["time"] = _merge_times([rank["time"] for rank in ranks], truths)
    if merged.get("update") and "update_parts" in first:
        apart = ranks_apart([parts_of(rank["update_parts"]) for rank in ranks])
        if apart is not None:
            merged["update"] = merged["update"] | {"ranks": apart}
    return merged


def _merge_times(times: list[dict[str, Any]], truths: Truths | None) -> dict[str, Any]:
    merged = dict(times[0])
    if all(time.get("end") for time in times):
        windows = max(time["num_updates"] for time in times)
        merged["end"] = check_end([time["end"] for time in times], truths, windows)
    merged["warmup_seconds"] = list(map(max, _by_step(times, "warmup_seconds")))
    merged["step_seconds"] = list(map(max, _by_step(times, "step_seconds")))
    merged["rank_step_seconds"] = []
    for time in times:
        merged["rank_step_seconds"].append([round(s, 9) for s in time["step_seconds"]])
    # There is one interval fewer than updates, hence the extra 1.
    merged["num_warmup"] = len(merged["warmup_seconds"]) + 1
    merged["host"] = host.merge([time["host"] for time in times])
    merged["losses"] = list(map(statistics.fmean, _by_step(times, "losses")))
    merged |= _spans(times)
    counts = {(time["num_updates"], time["num_micro_batches"]) for time in times}
    merged["ranks_agree"] = len(counts) == 1
    if merged["cuda_memory"]:
        merged["cuda_memory"] = _most([time["cuda_memory"] for time in times])
    return merged


def _by_step(times: Sequence[Mapping[str, Any]], name: str) -> Iterator[tuple[float, ...]]:
    """The values of all ranks, step by step."""
    return zip(*(time[name] for time in times), strict=False)


def _most(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The maximum over ranks of each number that rank 0 has."""
    most = dict(ranks[0])
    for numbers in ranks:
        for name, value in numbers.items():
            if name in most:
                most[name] = max(most[name], value)
    return most


def _spans(times: list[dict[str, Any]]) -> dict[str, float]:
    """The spans of the rank whose clock is farthest from the kernel's; else of rank 0."""
    farthest, most = times[0], -math.inf
    for time in times:
        if time.get("observed_span_s") is None:
            continue
        apart = abs(time["span_s"] - time["observed_span_s"]) - time["marking_s"]
        if apart > most:
            farthest, most = time, apart
    found: dict[str, float] = {}
    for name in ("span_s", "marking_s", "observed_span_s"):
        if name in farthest:
            found[name] = farthest[name]
    return found


def wrong(ranks: Sequence[Mapping[str, Any]], passes: Sequence[str]) -> str:
    """Describe the first result that is invalid or incomplete for these passes; empty if none is.

    Results come from other processes, through files, so they are validated before they are used.
    """
    for rank, result in enumerate(ranks):
        try:
            validation.read(RankResult, result)
        except InputError as error:
            return f"rank {rank}: its result is damaged: {error}"
        if missing := _missing(result, passes):
            return f"rank {rank}: its result is damaged: {missing} is missing"
    return ""


def _missing(result: Mapping[str, Any], passes: Sequence[str]) -> str:
    """The first pass without the result that it always has; see ``RankResult``."""
    for name in passes:
        if name not in result or (name in NEVER_EMPTY and result[name] is None):
            return name
    return ""
