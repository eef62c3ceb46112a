"""Counts collectives by operation, group and dtype, and checks the counting and the averaging.

torch's CommDebugMode fails on the second micro-batch of a window.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Self, TypedDict

import torch
import torch.distributed as dist

from bench.measure.c10d_kernels import CollectiveCall, CollectiveKernels
from bench.plan.cell import RankGroup


class CollectiveCount(TypedDict):
    """The calls of one operation on one dtype in one group."""

    op: str
    group: str
    dtype: str
    calls: int
    payload_bytes: int


def group_kind(group: dist.ProcessGroup) -> RankGroup:
    """Which ranks are in a process group.

    Consecutive ranks form a shard group, as in torch's meshes, whose last dimension varies fastest;
    others a replicate group.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == len(dist.get_process_group_ranks(None)):
        return RankGroup.WORLD
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return RankGroup.SHARD
    return RankGroup.REPLICATE


class CollectiveCounter(CollectiveKernels):
    """Counts calls and payload bytes by operation, group and dtype.

    It counts while it is open and ``counting`` is set.
    """

    def __init__(self) -> None:
        super().__init__(self._count)
        self.counting = False
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.bytes: Counter[tuple[str, str, str]] = Counter()

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def _count(self, collective: CollectiveCall) -> None:
        if self.counting:
            key = collective.name, str(group_kind(collective.group)), collective.dtype
            self.calls[key] += 1
            self.bytes[key] += collective.payload_bytes

    def self_test(self, device: torch.device) -> None:
        """Check on the default group that collectives are counted and AVG averages. Collective.

        One all-reduce of 8 bytes over the rank numbers 0 to W - 1 must be counted and average to (W
        - 1) / 2, up to the rounding of a sum and of 1/W, by which NCCL multiplies before summing.
        Older gloo did not divide (pytorch#162338). Values of a fake group are not checked. Previous
        counts are kept, and the test itself is not counted. Raises RuntimeError with one line.
        """
        with CollectiveCounter() as probe:
            probe.counting = True
            values = torch.full((2,), float(dist.get_rank()), device=device)
            dist.all_reduce(values, op=dist.ReduceOp.AVG)
        issued = CollectiveCount(
            op="all_reduce", group="world", dtype="float32", calls=1, payload_bytes=8
        )
        if probe.rows() != [issued]:
            raise RuntimeError(
                f"collectives cannot be counted: an all-reduce of 8 bytes is seen as {probe.rows()}"
            )
        if "fake" in dist.get_backend():
            return
        world_size, found = dist.get_world_size(), values.tolist()
        right = (world_size - 1) / 2
        rounding = world_size * torch.finfo(torch.float32).eps
        if not all(math.isclose(value, right, rel_tol=rounding) for value in found):
            name = dist.get_backend()
            raise RuntimeError(
                f"{name} does not average: AVG over the ranks' numbers is {found[0]:g}, "
                f"not {right:g}"
            )

    def start(self) -> None:
        self.counting = True

    def stop(self) -> None:
        self.counting = False

    def rows(self) -> list[CollectiveCount]:
        """One row per operation, group and dtype."""
        found: list[CollectiveCount] = []
        for key, calls in sorted(self.calls.items()):
            op, group, dtype = key
            found.append(
                CollectiveCount(
                    op=op, group=group, dtype=dtype, calls=calls, payload_bytes=self.bytes[key]
                )
            )
        return found
