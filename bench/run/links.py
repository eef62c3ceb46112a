"""The rate of collectives between the ranks of a run, measured where matrix products are (``bench.run.matmul``).

Bus bandwidth is defined as in nccl-tests (doc/PERFORMANCE.md): S / t times 2 (W - 1) / W for an all-reduce of S bytes,
and times (W - 1) / W for an all-gather to S bytes or a reduce-scatter of S bytes. It is comparable with the rate of the
link that all bytes have to pass, whatever W is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from bench.formatting import plural, size
from bench.measure import heartbeat
from bench.validation import Positive, PositiveNumber

if TYPE_CHECKING:
    import torch

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Operations, and how often a ring sends (W - 1) / W of the bytes for each."""
SIZES = {"cuda": (2**20, 2**24, 2**28), "cpu": (2**16, 2**20, 2**22)}
"""Bytes of the collectives, by device type."""
WARM, TIMED = 2, 5
"""Collectives of each kind and size before those that are timed, and those; the rate is that of the median."""


class TimedCollective(TypedDict):
    """The seconds of one operation: on one rank, or the most of all ranks."""

    op: str
    bytes: Positive
    seconds: PositiveNumber


def measure(world_size: int, device: torch.device) -> list[TimedCollective]:
    """Time collectives of every kind and size on this rank, while all other ranks take part."""
    import torch
    import torch.distributed as dist

    from bench.measure.taps import clock_for

    found: list[TimedCollective] = []
    for num_bytes in SIZES[device.type]:
        part = torch.zeros(max(1, num_bytes // 4 // world_size), device=device)
        whole = torch.zeros(len(part) * world_size, device=device)
        calls = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
        }
        for op, call in calls.items():
            clock = clock_for(device)
            dist.barrier()
            marks = []
            for _ in range(WARM + TIMED + 1):
                marks.append(clock.mark())
                call()
            heartbeat.beat()
            seconds = median(clock.intervals(marks)[WARM:])
            found.append(TimedCollective(op=op, bytes=len(whole) * 4, seconds=seconds))
    return found


def merge(ranks: Sequence[Sequence[TimedCollective]]) -> list[TimedCollective]:
    """The rows of all ranks of one group, as from ``measure``; the slowest rank counts."""
    return [max(rows, key=lambda row: row["seconds"]) for rows in zip(*ranks, strict=True)]


def bus_rate(link: Mapping[str, Any], world_size: int) -> float:
    """Bus bandwidth in bytes per second of a row of ``merge``."""
    rate: float = PASSES[link["op"]] * (world_size - 1) / world_size * link["bytes"] / link["seconds"]
    return rate


def between(manifest: Mapping[str, Any], world_size: int, num_nodes: int) -> Mapping[str, Any] | None:
    """The entry of run.json's ``matmul`` for so many ranks on so many nodes."""
    entries = {(entry["world_size"], entry.get("num_nodes", 1)): entry for entry in manifest.get("matmul") or ()}
    return entries.get((world_size, num_nodes))


def all_reduce_rate(entry: Mapping[str, Any] | None) -> float | None:
    """Bus bandwidth of the largest all-reduce of an entry."""
    largest = [link for link in (entry or {}).get("links", ()) if link["op"] == "all_reduce"][-1:]
    return bus_rate(largest[0], entry["world_size"]) if entry and largest else None


def ranks_of(entry: Mapping[str, Any]) -> str:
    """The ranks of an entry of run.json's ``matmul``, in words."""
    num_nodes = int(entry.get("num_nodes", 1))
    return plural(entry["world_size"], "rank") + f" on {num_nodes} nodes" * (num_nodes > 1)


def summary(entry: Mapping[str, Any]) -> list[str]:
    """A line on the rates of the largest collectives of an entry; none if there are no rates."""
    largest = entry.get("links", ())[-len(PASSES) :]
    if not largest:
        return []
    rates = [f"{row['op'].replace('_', '-')} {bus_rate(row, entry['world_size']) / 1e9:.3g} GB/s" for row in largest]
    return [f"bus bandwidth between {ranks_of(entry)}, at {size(largest[0]['bytes'])}: {', '.join(rates)}"]
