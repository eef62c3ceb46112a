"""From what the ranks handed back to one record of the journal: maximum over ranks, mean of losses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired, Required

from pydantic import AfterValidator
from typing_extensions import TypedDict

from bench import fields
from bench.errors import InputError
from bench.fields import Amount, Flag, Integer, Must, Natural, Number
from bench.measure import dispatch, exposure, host
from bench.plan.categories import HELD, PEAK
from bench.plan.cell import Cell, Status
from bench.run.warmup import warmup


class TimePass(TypedDict, total=False):
    """The time pass. A loss may be anything, even NaN: the gates look at it."""

    warmup_seconds: list[Amount]
    step_seconds: list[Amount]
    began: Number | None
    ended: Number
    host: dict[str, Any] | None
    losses: list[Number]
    num_micro_batches: Natural
    num_fetched: Natural
    num_updates: Natural
    num_inner_steps: Natural
    micro_batches_per_update: list[Natural]
    reported: dict[str, Natural]
    settings: dict[str, Any]
    cuda_memory: dict[str, Natural] | None


class MergedTime(TimePass, total=False):
    """The time passes of all ranks as one."""

    num_warmup: Natural
    rank_step_seconds: list[list[Amount]]
    ranks_agree: Flag


class _Update(TypedDict):
    error: Number
    scale: Number
    residual: Number
    gradient_norm: NotRequired[Number]
    unclipped_error: NotRequired[Number]
    unclipped_scale: NotRequired[Number]


class _Collective(TypedDict):
    op: str
    dtype: str
    calls: Natural
    payload_bytes: Natural


def _sizes(sizes: dict[str, int]) -> dict[str, int]:
    """What the allocator knows less of than the ledger is a difference, and may be below 0."""
    if any(size < 0 and not name.endswith("_untracked") for name, size in sizes.items()):
        raise ValueError("below 0")
    return sizes


class _Accumulation(TypedDict):
    dtype: Any


class _Dispatch(TypedDict):
    cpu_s: Amount | None
    num_operators: Amount | None
    num_launches: Amount | None
    other_work: NotRequired[str]


class _Exposure(TypedDict):
    collective_s: Amount
    exposed_s: Amount


class ResultFacts(TypedDict, total=False):
    """What every rank hands back."""

    num_parameters: Natural
    entropy_floor: Number | None
    tokens_per_step: Number
    flops_per_step: Number | None
    device_name: str
    training_s: Amount


class Result(ResultFacts, total=False):
    """What ranks hand back: facts, and the passes that they were asked for."""

    time: MergedTime | None
    update: _Update | None
    collectives: list[_Collective] | None
    memory: Annotated[dict[str, Integer], AfterValidator(_sizes), Must("a table of bytes")] | None
    accumulation: _Accumulation | None
    dispatch: _Dispatch | None
    exposure: _Exposure | None


class _SampledGpus(TypedDict, total=False):
    gpus: list[dict[str, Any]]


class Record(Result, total=False):
    """A record of the journal: one trial. Older ones have fewer keys, and failed ones none of the ranks'."""

    cell_id: Required[str]
    repeat: Required[Natural]
    cell: Required[Cell]
    status: Required[Annotated[Status, Must(f"one of {', '.join(Status)}")]]
    reason: Required[str]
    wall_s: Required[Amount]
    slot: Natural
    cold: Flag
    passes: list[str]
    ended: str
    last_lines: list[str]
    log: str
    dumps: list[str]
    device_uuids: list[str | None]
    gpus: _SampledGpus | None
    layout: dict[str, Any] | None


NEVER_EMPTY = ("time", "collectives", "memory", "dispatch")
"""Passes that have a result wherever they are asked for."""


def check(records: Sequence[Mapping[str, Any]], journal: Path) -> None:
    """Raise InputError naming the journal, the record and the key if one holds what none can, as an edited one may."""
    for index, record in enumerate(records, start=1):
        fields.read(Record, record, f"{journal}: trial {index} was edited: ")


def merge(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """One trial's ``memory`` from its ranks': each total with its parts from the rank that has most of it.

    So parts add up to their total, and a total is the maximum over ranks. Whatever else there is, of the allocator,
    comes from the rank with the largest peak.
    """
    merged: dict[str, int] = {}
    fullest = max(ranks, key=lambda memory: memory.get(PEAK, 0))
    most_held = max(ranks, key=lambda memory: memory.get(HELD, 0))
    for memory, held in ((fullest, False), (most_held, True)):
        merged |= {key: value for key, value in memory.items() if key.split("_")[0].startswith(HELD) == held}
    return merged


def merge_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One trial's facts from its ranks' results, rank 0 first.

    A step takes as long as its slowest rank, and a rank that runs out of memory ends all, so times and memory are
    maxima. The loss of a step is the mean over ranks, since all see equally many samples. Updates and collectives are
    rank 0's. Memory's parts are those of the rank that has most, so that they add up; ``held`` may be missing. Times of
    collectives are those of the rank with the most that is exposed, and none if a rank's were not seen. What a window
    costs the host is the maximum too.

    ``num_warmup`` are the first steps that are no steady state: the warm-up windows of the cell, and what
    ``bench.run.warmup`` finds in the steps that follow. ``rank_step_seconds`` has the timed steps of every rank, and on
    GPUs ``device_uuids`` says which each had.
    """
    first = ranks[0]
    merged = {key: value for key, value in first.items() if key not in ("time", "memory", "device_uuid")}
    if first.get("device_uuid"):
        merged["device_uuids"] = [rank.get("device_uuid") for rank in ranks]
    merged["training_s"] = max(rank["training_s"] for rank in ranks)
    if "memory" in first:
        merged["memory"] = merge([rank["memory"] for rank in ranks])
    if "exposure" in first:
        merged["exposure"] = exposure.merge([rank["exposure"] for rank in ranks])
    if "dispatch" in first:
        merged["dispatch"] = dispatch.merge([rank["dispatch"] for rank in ranks])
    if "time" in first:
        merged["time"] = _merge_times([rank["time"] for rank in ranks])
    return merged


def _merge_times(times: list[dict[str, Any]]) -> dict[str, Any]:
    """The time passes of all ranks as one."""
    merged = dict(times[0])
    for name in ("warmup_seconds", "step_seconds"):
        merged[name] = [max(step) for step in zip(*(t[name] for t in times), strict=False)]
    merged["rank_step_seconds"] = [[round(s, 9) for s in t["step_seconds"]] for t in times]
    # Intervals are one fewer than updates, hence the one that is counted without a time of its own.
    merged["num_warmup"] = len(merged["warmup_seconds"]) + 1 + warmup(merged["step_seconds"])
    merged["host"] = host.merge([t["host"] for t in times])
    merged["began"] = max((t["began"] for t in times if t["began"] is not None), default=None)
    merged["ended"] = min(t["ended"] for t in times)
    merged["losses"] = [statistics.fmean(step) for step in zip(*(t["losses"] for t in times), strict=False)]
    merged["ranks_agree"] = len({(t["num_updates"], t["num_micro_batches"]) for t in times}) == 1
    if merged["cuda_memory"]:
        merged["cuda_memory"] = _maxima([t["cuda_memory"] for t in times])
    return merged


def _maxima(dicts: list[dict[str, int]]) -> dict[str, int]:
    return {key: max(d[key] for d in dicts if key in d) for key in dicts[0]}


def wrong(ranks: Sequence[Mapping[str, Any]], passes: Sequence[str]) -> str:
    """In words, which rank's result is not what a sound rank hands back after these passes; empty if all are.

    A result comes from another process, through a file: what is stored and computed with it must be what it seems.
    """
    for rank, result in enumerate(ranks):
        try:
            fields.read(Result, result)
        except InputError as error:
            return f"rank {rank}: its result is damaged: {error}"
        if missing := _missing(result, passes):
            return f"rank {rank}: its result is damaged: {missing} is missing"
    return ""


def _missing(result: Mapping[str, Any], passes: Sequence[str]) -> str:
    for name in (*ResultFacts.__annotations__, *passes):
        if name not in result or (name in NEVER_EMPTY and result[name] is None):
            return name
    time = result["time"] if "time" in passes else TimePass.__annotations__
    return next((f"time.{name}" for name in TimePass.__annotations__ if name not in time), "")
