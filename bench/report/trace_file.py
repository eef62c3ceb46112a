"""Chrome traces of the ranks of a trial as one file, for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    merged: list[dict[str, object]] = []
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


def _of_rank(event: Mapping[str, object], rank: int, shift_us: float) -> dict[str, object]:
    """An event with ids and a process name of its own among those of all ranks."""
    moved = dict(event)
    for key in ("pid", "id"):
        value = moved.get(key)
        if isinstance(value, int):
            moved[key] = value + rank * RANK_IDS
        elif isinstance(value, str):
            moved[key] = f"{value} (rank {rank})"
    began_us = moved.get("ts")
    if isinstance(began_us, int | float):
        moved["ts"] = began_us + shift_us
    about = moved.get("args")
    names_process = moved.get("ph") == METADATA and moved.get("name") == "process_name"
    if names_process and isinstance(about, dict):
        moved["args"] = {"name": f"rank {rank}: {about['name']}"}
    return moved
