"""What a formula gives: collectives of one settled window and bytes held per rank, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}
"""Bytes of one element by dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One operation on one dtype between two updates, on every rank."""

    op: str
    """As ``CollectiveCounter`` names it: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``."""
    dtype: str
    calls: int
    payload_bytes: int
    """Bytes of the whole logical tensors, summed over the calls; see ``bench.measure.collectives.payload_bytes``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What a backend must do in one settled window, from one update to the next."""

    collectives: tuple[Collective, ...]
    """Sorted by operation and dtype, as the counter's rows."""
    held: dict[str, int]
    """Bytes per rank between two micro-batches of a window, of tensors that outlive a micro-batch, by category:
    ``parameters``, ``gradients``, ``optimizer_state`` and ``communication``."""


@dataclass
class Tally:
    """Collects calls of collectives."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, op: str, dtype: str, numels: Iterable[int], times: int = 1) -> None:
        """One call per number of elements, all of that ``times`` times."""
        for numel in numels:
            self.calls[op, dtype] += times
            self.bytes[op, dtype] += times * numel * BYTES[dtype]

    def rows(self) -> tuple[Collective, ...]:
        """Sorted by operation and dtype."""
        return tuple(
            Collective(op=op, dtype=dtype, calls=calls, payload_bytes=self.bytes[op, dtype])
            for (op, dtype), calls in sorted(self.calls.items())
            if calls
        )


def ceil_to(numel: int, multiple: int) -> int:
    """The smallest multiple that is not below ``numel``."""
    return -(-numel // multiple) * multiple


def wire_bytes(op: str, payload_bytes: int, world_size: int) -> float:
    """Derived, not measured: bytes that each rank sends in a ring algorithm.

    (W-1)/W of the payload for all-gather and reduce-scatter, twice that for all-reduce, which is one after the other;
    a broadcast's payload goes round once (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009) 117; NCCL's
    ``doc/PERFORMANCE.md`` of nccl-tests has the same factors). Nothing at W = 1. What gloo really sends differs: its
    reduce-scatter is an all-reduce.
    """
    if world_size == 1:
        return 0.0
    share = (world_size - 1) / world_size
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(op, share) * payload_bytes
