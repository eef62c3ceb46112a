"""The record of a trial: merged from the results of its ranks, without its warm-up, and validated."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired, Required

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator
from typing_extensions import TypedDict

from bench import validation
from bench.errors import InputError
from bench.measure import dispatch, exposure, host
from bench.plan.categories import HELD, PEAK
from bench.plan.cell import Cell, Status
from bench.validation import Amount, Expect, Flag, Integer, Natural, Number


def warmup(seconds: Sequence[float]) -> int:
    """Number of first steps of a trial to drop, at most half, from its step times in seconds.

    MSER (White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69(6), 1997):
    the number k that minimizes the variance of the n - k steps kept, divided by n - k. It is used on logarithms,
    smoothed by a running median of three so that a single slow step is not taken for a warm-up (the first step is not
    smoothed). Warm-up is slow, so k must satisfy: the first step and the median of the dropped steps are above the
    upper quartile of those kept, and every dropped step is above their median. Nothing is dropped
    if there is no such k. Of the rules simulated on 12 and 30 steps, pyperf's among them, this one leaves the least
    bias; docs/statistics.md has the table.
    """
    return int(warmups(np.asarray([seconds], dtype=float))[0]) if len(seconds) else 0


def warmups(seconds: NDArray[np.float64]) -> NDArray[np.intp]:
    """``warmup`` of trials of equal length, one per row."""
    logs = np.log(seconds)
    rows, n = logs.shape
    if n < 4:
        return np.zeros(rows, dtype=np.intp)
    smooth = logs.copy()
    smooth[:, 1:-1] = np.median([logs[:, :-2], logs[:, 1:-1], logs[:, 2:]], axis=0)
    scores = [smooth[:, k:].var(axis=1) / (n - k) for k in range(n // 2 + 1)]
    found, unsure = np.zeros(rows, dtype=np.intp), np.arange(rows)
    for choice in np.argsort(scores, axis=0, kind="stable"):  # the best k of each row, then the next best
        unsure = unsure[choice[unsure] > 0]
        for k in np.unique(choice[unsure]):
            at = unsure[choice[unsure] == k]
            slow = at[_slow_start(logs[at], k)]
            found[slow] = k
            unsure = np.setdiff1d(unsure, slow)
        if not len(unsure):
            break
    return found


def _slow_start(logs: NDArray[np.float64], k: int) -> NDArray[np.bool_]:
    """Whether the first k steps of each row are slower than the others."""
    dropped = logs[:, :k]
    middle, upper = np.quantile(logs[:, k:], [0.5, 0.75], axis=1)
    least = np.minimum(logs[:, 0], np.median(dropped, axis=1))
    return np.asarray((least > upper) & (dropped.min(axis=1) > middle))


class TimePass(TypedDict, total=False):
    """Result of the time pass. A loss may be any number, even NaN: the gates check it."""

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
    """The time passes of all ranks, merged."""

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
    device_error: NotRequired[Number]
    device_loss_deviation: NotRequired[Number]


class _Collective(TypedDict):
    op: str
    group: str
    dtype: str
    calls: Natural
    payload_bytes: Natural


def _sizes(sizes: dict[str, int]) -> dict[str, int]:
    """Reject negative sizes, except ``_untracked``: the allocator's total minus the ledger's."""
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
    """Facts that every rank returns."""

    num_parameters: Natural
    entropy_floor: Number | None
    tokens_per_step: Number
    flops_per_step: Number | None
    device_name: str
    training_s: Amount


class Result(ResultFacts, total=False):
    """What a rank returns: facts, and the results of the requested passes."""

    settings: dict[str, Any]
    time: MergedTime | None
    update: _Update | None
    collectives: list[_Collective] | None
    memory: Annotated[dict[str, Integer], AfterValidator(_sizes), Expect("a table of bytes")] | None
    accumulation: _Accumulation | None
    dispatch: _Dispatch | None
    exposure: _Exposure | None


class _SampledGpus(TypedDict, total=False):
    gpus: list[dict[str, Any]]


class Record(Result, total=False):
    """A record of the journal: one trial. Failed trials have no results of ranks."""

    cell_id: Required[str]
    repeat: Required[Natural]
    cell: Required[Cell]
    status: Required[Annotated[Status, Expect(f"one of {', '.join(Status)}")]]
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
"""Passes that always have a result if requested."""


def check(records: Sequence[Mapping[str, Any]], journal: Path) -> None:
    """Raise InputError naming the journal, the record and the key if a record has an impossible value."""
    for index, record in enumerate(records, start=1):
        validation.read(Record, record, f"{journal}: trial {index} was edited: ")


def merge(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Merge ``memory`` over ranks: each total is the maximum over ranks, with its parts from the same rank.

    So the parts add up to their total. The allocator's values come from the rank with the largest peak.
    """
    merged: dict[str, int] = {}
    fullest = max(ranks, key=lambda memory: memory.get(PEAK, 0))
    most_held = max(ranks, key=lambda memory: memory.get(HELD, 0))
    for memory, held in ((fullest, False), (most_held, True)):
        merged |= {key: value for key, value in memory.items() if key.split("_")[0].startswith(HELD) == held}
    return merged


def merge_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of the ranks of one trial, rank 0 first.

    A step takes as long as its slowest rank, and one rank out of memory ends the trial, so times and memory are maxima
    (memory: see ``merge``). The loss of a step is the mean over ranks, since all see the same number of samples.
    Updates and collectives are rank 0's. Times of collectives are those of the rank with the most exposed time, and
    missing if any rank's are. Host costs of a window are maxima.

    ``num_warmup`` counts the first steps, before the steady state: the warm-up windows of the cell, and those that
    ``warmup`` finds in the following steps. ``rank_step_seconds`` has the timed steps of every rank, and on
    GPUs ``device_uuids`` names the device of each.
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
    merged = dict(times[0])
    for name in ("warmup_seconds", "step_seconds"):
        merged[name] = [max(step) for step in zip(*(t[name] for t in times), strict=False)]
    merged["rank_step_seconds"] = [[round(s, 9) for s in t["step_seconds"]] for t in times]
    # There is one interval fewer than updates, hence the extra 1.
    merged["num_warmup"] = len(merged["warmup_seconds"]) + 1 + warmup(merged["step_seconds"])
    merged["host"] = host.merge([t["host"] for t in times])
    merged["losses"] = [statistics.fmean(step) for step in zip(*(t["losses"] for t in times), strict=False)]
    merged["ranks_agree"] = len({(t["num_updates"], t["num_micro_batches"]) for t in times}) == 1
    if merged["cuda_memory"]:
        every = [t["cuda_memory"] for t in times]
        merged["cuda_memory"] = {name: max(each[name] for each in every if name in each) for name in every[0]}
    return merged


def wrong(ranks: Sequence[Mapping[str, Any]], passes: Sequence[str]) -> str:
    """Describe the first result that is invalid or incomplete for these passes; empty if all are valid.

    Results come from other processes, through files, so they are validated before they are used.
    """
    for rank, result in enumerate(ranks):
        try:
            validation.read(Result, result)
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
