"""The rate of collectives between the ranks of a run, measured with ``bench.run.matmul``.

Bus bandwidth is defined as in nccl-tests (doc/PERFORMANCE.md): S / t times 2 (W - 1) / W for an
all-reduce of S bytes, and times (W - 1) / W for an all-gather to S bytes or a reduce-scatter of S
bytes. It is comparable with the rate of the link that all bytes have to pass, whatever W is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator
from typing_extensions import TypedDict

from bench.formatting import plural, size
from bench.measure import heartbeat
from bench.validation import Duration, Expect, Natural, Positive, Rate

if TYPE_CHECKING:
    import torch

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Operations, and how often a ring sends (W - 1) / W of the bytes for each."""
SIZES = {"cuda": (2**20, 2**24, 2**28), "cpu": (2**16, 2**20, 2**22)}
"""Bytes of the collectives, by device type."""
WARM, TIMED = 2, 5
"""Collectives of each kind and size before those that are timed, and those; the rate is that of the
median."""


def _known(op: str) -> str:
    if op not in PASSES:
        raise ValueError("unknown")
    return op


class TimedCollective(TypedDict):
    """The seconds of one operation: on one rank, or the most of all ranks."""

    op: Annotated[str, AfterValidator(_known), Expect(f"one of {', '.join(PASSES)}")]
    bytes: Positive
    seconds: Duration


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """An entry of run.json's ``matmul``: what so many ranks on so many nodes reach."""

    world_size: Natural
    num_nodes: Natural = 1
    threads: Natural = 1
    flops_per_s: Mapping[str, tuple[Rate, ...]] = field(default_factory=dict)
    """Of matrix products, by precision, each rank's, rank 0 first."""
    capacity: Mapping[str, tuple[Rate, ...]] = field(default_factory=dict)
    """The same, had nobody else taken the CPUs; empty in older runs."""
    links: tuple[TimedCollective, ...] = ()
    """As from ``merge``."""
    reason: str = ""
    """Why there are no rates."""

    @property
    def ranks(self) -> str:
        """The ranks in words."""
        words = plural(self.world_size, "rank")
        if self.num_nodes > 1:
            words += f" on {self.num_nodes} nodes"
        return words

    @property
    def all_reduce_rate(self) -> float | None:
        """Bus bandwidth of the largest all-reduce."""
        for link in reversed(self.links):
            if link["op"] == "all_reduce":
                return bus_rate(link, self.world_size)
        return None

    @property
    def link_text(self) -> str:
        """The rates of the largest collectives in a line; empty if there are none."""
        largest = self.links[-len(PASSES) :]
        if not largest:
            return ""
        rates = []
        for link in largest:
            rate = bus_rate(link, self.world_size)
            rates.append(f"{link['op'].replace('_', '-')} {rate / 1e9:.3g} GB/s")
        where = f"between {self.ranks}, at {size(largest[0]['bytes'])}"
        return f"bus bandwidth {where}: {', '.join(rates)}"


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
    slowest = []
    for rows in zip(*ranks, strict=True):
        slowest.append(max(rows, key=lambda row: row["seconds"]))
    return slowest


def bus_rate(link: TimedCollective, world_size: int) -> float:
    """Bus bandwidth in bytes per second of a row of ``merge``."""
    return PASSES[link["op"]] * (world_size - 1) / world_size * link["bytes"] / link["seconds"]
