"""From what the ranks handed back to one record of the journal: maximum over ranks, mean of losses."""

from __future__ import annotations

import statistics
from typing import Any


def merge_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One trial's facts from its ranks' results, rank 0 first.

    A step takes as long as its slowest rank, and a rank that runs out of memory ends all, so times and memory are
    maxima. The loss of a step is the mean over ranks, since all see equally many samples. Updates and collectives are
    rank 0's. Memory's ``held`` may be missing.
    """
    first = ranks[0]
    merged = {key: value for key, value in first.items() if key not in ("time", "memory")}
    merged["training_s"] = max(rank["training_s"] for rank in ranks)
    if "memory" in first:
        merged["memory"] = _maxima([rank["memory"] for rank in ranks])
    if "time" in first:
        merged["time"] = _merge_times([rank["time"] for rank in ranks])
    return merged


def _merge_times(times: list[dict[str, Any]]) -> dict[str, Any]:
    """The time passes of all ranks as one."""
    merged = dict(times[0])
    merged["step_seconds"] = [max(step) for step in zip(*(t["step_seconds"] for t in times), strict=False)]
    merged["losses"] = [statistics.fmean(step) for step in zip(*(t["losses"] for t in times), strict=False)]
    merged["ranks_agree"] = len({(t["num_updates"], t["num_micro_batches"]) for t in times}) == 1
    if merged["cuda_memory"]:
        merged["cuda_memory"] = _maxima([t["cuda_memory"] for t in times])
    return merged


def _maxima(dicts: list[dict[str, int]]) -> dict[str, int]:
    return {key: max(d[key] for d in dicts if key in d) for key in dicts[0]}
