"""From what the ranks handed back to one record of the journal: maximum over ranks, mean of losses."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.errors import InputError, shown
from bench.measure import dispatch, exposure, host
from bench.plan.categories import HELD, PEAK
from bench.plan.cell import Status
from bench.run.predicates import anything, boolean, integer, list_of, number, or_none, seconds, table, table_of, text
from bench.run.warmup import warmup


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
        if place := _wrong_in(result, _RESULT) or _wrong_pass(result, passes):
            return f"rank {rank}: its result is damaged: {place}"
    return ""


def _wrong_pass(result: Mapping[str, Any], passes: Sequence[str]) -> str:
    for name in passes:
        if name not in result:
            return f"{name} is missing"
        value = result[name]
        if name == "time" and not isinstance(value, dict):
            return "time is no table"
        place = _wrong_in(value, _TIME) if name == "time" else "" if _EXTRA[name](value) else f"{name} is none"
        if place:
            return place if place.startswith(name) else f"{name}: {place}"
    return ""


def _wrong_in(table: Mapping[str, Any], checks: Mapping[str, Callable[[Any], bool]]) -> str:
    for key, check in checks.items():
        if key not in table:
            return f"{key} is missing"
        if not check(table[key]):
            return f"{key} cannot be {str(table[key])[:40]!r}"
    return ""


def _memory(value: Any) -> bool:
    """Bytes; what the allocator knows less of than the ledger is a difference, and may be below 0."""
    return isinstance(value, dict) and all(
        integer(size) or (name.endswith("_untracked") and isinstance(size, int) and abs(size) < 2**63)
        for name, size in value.items()
    )


def _dispatch(value: Any) -> bool:
    """Numbers of a window, and in newer records what other work was seen, in words."""
    if not isinstance(value, dict):
        return False
    numbers = {key: number for key, number in value.items() if key != dispatch.OTHER_WORK}
    return table_of(or_none(seconds), *dispatch.NUMBERS)(numbers) and text(value.get(dispatch.OTHER_WORK, ""))


def _calls(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(key), str) for key in ("op", "dtype"))
        and all(integer(row.get(key)) for key in ("calls", "payload_bytes"))
    )


_RESULT: dict[str, Callable[[Any], bool]] = {
    "num_parameters": integer,
    "entropy_floor": or_none(number),
    "tokens_per_step": number,
    "flops_per_step": or_none(number),
    "device_name": text,
    "training_s": seconds,
}
"""What every result holds."""
_TIME: dict[str, Callable[[Any], bool]] = {
    "warmup_seconds": list_of(seconds),
    "step_seconds": list_of(seconds),
    "began": or_none(number),
    "ended": number,
    "host": or_none(table_of(anything)),
    "losses": list_of(number),
    "num_micro_batches": integer,
    "num_fetched": integer,
    "num_updates": integer,
    "num_inner_steps": integer,
    "micro_batches_per_update": list_of(integer),
    "reported": table_of(integer),
    "settings": table_of(anything),
    "cuda_memory": or_none(table_of(integer)),
}
"""The time pass. A loss may be anything, even NaN: the gates look at it."""
_EXTRA: dict[str, Callable[[Any], bool]] = {
    "update": or_none(table_of(number, "error", "scale", "residual")),
    "collectives": list_of(_calls),
    "memory": _memory,
    "accumulation": or_none(table_of(anything, "dtype")),
    "dispatch": _dispatch,
    "exposure": or_none(table_of(seconds, "collective_s", "exposed_s")),
}
"""The other passes."""
_HEADER: dict[str, Callable[[Any], bool]] = {
    "cell_id": text,
    "repeat": integer,
    "cell": table_of(anything),
    "status": lambda value: value in list(Status),
    "reason": text,
    "wall_s": seconds,
}
"""What every record of the journal holds."""
_STORED: dict[str, Callable[[Any], bool]] = {
    **_RESULT,
    **{name: or_none(is_right) for name, is_right in _EXTRA.items()},
    "slot": integer,
    "cold": boolean,
    "passes": list_of(text),
    "ended": text,
    "last_lines": list_of(text),
    "log": text,
    "dumps": list_of(text),
    "device_uuids": list_of(or_none(text)),
    "gpus": or_none(table(gpus=list_of(table_of(anything)))),
    "layout": or_none(table_of(anything)),
    "time": or_none(table_of(anything)),
}
"""What some do: what the ranks handed back, and what the runner adds."""
_MERGED_TIME: dict[str, Callable[[Any], bool]] = {
    "num_warmup": integer,
    "rank_step_seconds": list_of(list_of(seconds)),
    "ranks_agree": boolean,
}
"""What merging the ranks' time passes adds."""


def check(records: Sequence[Mapping[str, Any]], journal: Path) -> None:
    """Raise InputError naming the journal, the record and the key if one holds what none can, as an edited one may."""
    for index, record in enumerate(records, start=1):
        if place := _wrong_in(record, _HEADER) or _edited(record):
            raise InputError(f"{journal}: trial {index} was edited: {place}; restore the file")


def _edited(record: Mapping[str, Any]) -> str:
    """What stands in a record that cannot; older records have fewer keys."""
    for values, checks in ((record, _STORED), (record.get("time") or {}, _TIME | _MERGED_TIME)):
        for key, is_right in checks.items():
            if key in values and not is_right(values[key]):
                return f"{key} cannot be {shown(values[key])}"
    return ""
