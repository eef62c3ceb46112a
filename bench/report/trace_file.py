"""Chrome traces of the ranks of a trial as one file, for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.files import replacing

RANK_IDS = 10_000_000
"""Ids of processes and flows of a rank are moved by so much: more than Linux has processes."""
METADATA = "M"
"""Phase of events that name processes and threads (Trace Event Format)."""


def write_merged(traces: Sequence[Path], path: Path, about: dict[str, str]) -> int:
    """Write the traces of ranks 0, 1, ... as one gzipped file; returns the number of events.

    Its metadata is ``about``. Times are microseconds since the base of rank 0; processes are named
    by their rank. Perfetto is at ui.perfetto.dev.
    """
    merged: list[dict[str, Any]] = []
    base_ns = None
    for rank, trace in enumerate(traces):
        content = json.loads(trace.read_text(encoding="utf-8"))
        own_base_ns = int(content.get("baseTimeNanoseconds", 0))
        if base_ns is None:
            base_ns = own_base_ns
        shift_us = (own_base_ns - base_ns) / 1e3
        for event in content["traceEvents"]:
            merged.append(_of_rank(event, rank, shift_us))
    content = {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": merged}
    content |= {"baseTimeNanoseconds": base_ns, "otherData": about}
    with replacing(path) as draft:
        draft.write_bytes(gzip.compress(json.dumps(content).encode()))
    return len(merged)


def _of_rank(event: dict[str, Any], rank: int, shift_us: float) -> dict[str, Any]:
    """An event with ids and a process name of its own among those of all ranks."""
    moved = dict(event)
    for key in ("pid", "id"):
        value = moved.get(key)
        if isinstance(value, int):
            moved[key] = value + rank * RANK_IDS
        elif isinstance(value, str):
            moved[key] = f"{value} (rank {rank})"
    if "ts" in moved:
        moved["ts"] = float(moved["ts"]) + shift_us
    if moved.get("ph") == METADATA and moved.get("name") == "process_name":
        moved["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
    return moved
