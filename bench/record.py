"""From what the ranks handed back to one record of the journal: maximum over ranks, mean of losses."""

from __future__ import annotations

import statistics
from typing import Any

from bench.probes import categories, host
from bench.warmup import warmup


def merge_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One trial's facts from its ranks' results, rank 0 first.

    A step takes as long as its slowest rank, and a rank that runs out of memory ends all, so times and memory are
    maxima. The loss of a step is the mean over ranks, since all see equally many samples. Updates and collectives are
    rank 0's. Memory's parts are those of the rank that has most, so that they add up; ``held`` may be missing.

    ``num_warmup`` are the first steps that are no steady state: the warm-up windows of the cell, and what
    ``bench.warmup`` finds in the steps that follow. ``rank_step_seconds`` has the timed steps of every rank.
    """
    first = ranks[0]
    merged = {key: value for key, value in first.items() if key not in ("time", "memory")}
    merged["training_s"] = max(rank["training_s"] for rank in ranks)
    if "memory" in first:
        merged["memory"] = categories.merge([rank["memory"] for rank in ranks])
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
