"""From what the ranks handed back to one record of the journal: maximum over ranks, mean of losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.probes import categories, exposure, host
from bench.warmup import warmup


def merge_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One trial's facts from its ranks' results, rank 0 first.

    A step takes as long as its slowest rank, and a rank that runs out of memory ends all, so times and memory are
    maxima. The loss of a step is the mean over ranks, since all see equally many samples. Updates and collectives are
    rank 0's. Memory's parts are those of the rank that has most, so that they add up; ``held`` may be missing. Times of
    collectives are those of the rank with the most that is exposed.

    ``num_warmup`` are the first steps that are no steady state: the warm-up windows of the cell, and what
    ``bench.warmup`` finds in the steps that follow. ``rank_step_seconds`` has the timed steps of every rank.
    """
    first = ranks[0]
    merged = {key: value for key, value in first.items() if key not in ("time", "memory")}
    merged["training_s"] = max(rank["training_s"] for rank in ranks)
    if "memory" in first:
        merged["memory"] = categories.merge([rank["memory"] for rank in ranks])
    if "exposure" in first:
        merged["exposure"] = exposure.merge([rank["exposure"] for rank in ranks])
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


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _seconds(value: Any) -> bool:
    return _number(value) and math.isfinite(value) and value >= 0


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _table_of(check: Callable[[Any], bool], *needed: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(check, value.values())) and value.keys() >= set(needed)


def _calls(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(key), str) for key in ("op", "dtype"))
        and all(_integer(row.get(key)) for key in ("calls", "payload_bytes"))
    )


_RESULT: dict[str, Callable[[Any], bool]] = {
    "num_parameters": _integer,
    "entropy_floor": _or_none(_number),
    "tokens_per_step": _number,
    "flops_per_step": _or_none(_number),
    "device_name": lambda value: isinstance(value, str),
    "training_s": _seconds,
}
"""What every result holds."""
_TIME: dict[str, Callable[[Any], bool]] = {
    "warmup_seconds": _list_of(_seconds),
    "step_seconds": _list_of(_seconds),
    "began": _or_none(_number),
    "ended": _number,
    "host": _or_none(lambda value: isinstance(value, dict)),
    "losses": _list_of(_number),
    "num_micro_batches": _integer,
    "num_fetched": _integer,
    "num_updates": _integer,
    "num_inner_steps": _integer,
    "micro_batches_per_update": _list_of(_integer),
    "reported": _table_of(_integer),
    "settings": lambda value: isinstance(value, dict),
    "cuda_memory": _or_none(_table_of(_integer)),
}
"""The time pass. A loss may be anything, even NaN: the gates look at it."""
_EXTRA: dict[str, Callable[[Any], bool]] = {
    "update": _or_none(_table_of(_number, "error", "scale", "residual")),
    "collectives": _list_of(_calls),
    "memory": _table_of(_integer),
    "accumulation": _or_none(_table_of(lambda value: True, "dtype")),
    "exposure": _table_of(_seconds, "collective_s", "exposed_s"),
}
"""The other passes."""
