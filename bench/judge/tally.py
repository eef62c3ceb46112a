"""Results of the formulas: collectives of one steady-state window and bytes held per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}
"""Bytes of one element by dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """The calls of one operation on one dtype in a window, on every rank."""

    op: str
    """As ``CollectiveCounter`` names it: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``."""
    dtype: str
    calls: int
    payload_bytes: int
    """Bytes of the whole logical tensors, summed over the calls; see ``bench.measure.collectives.payload_bytes``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What a backend must do in one steady-state window, from one update to the next."""

    collectives: tuple[Collective, ...]
    """Sorted by operation and dtype, like the counter's rows."""
    held: dict[str, int]
    """Bytes per rank of tensors that outlive a micro-batch, between two micro-batches of a window, by category:
    ``parameters``, ``gradients``, ``optimizer_state`` and ``communication``."""


@dataclass
class Tally:
    """Counts calls of collectives and their bytes."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, op: str, dtype: str, numels: Iterable[int], times: int = 1) -> None:
        """Add one call per number of elements, ``times`` times each."""
        for numel in numels:
            self.calls[op, dtype] += times
            self.bytes[op, dtype] += times * numel * BYTES[dtype]

    def rows(self) -> tuple[Collective, ...]:
        """The collectives, sorted by operation and dtype."""
        return tuple(
            Collective(op=op, dtype=dtype, calls=calls, payload_bytes=self.bytes[op, dtype])
            for (op, dtype), calls in sorted(self.calls.items())
            if calls
        )


def ceil_to(numel: int, multiple: int) -> int:
    """``numel`` rounded up to a multiple."""
    return -(-numel // multiple) * multiple


def wire_bytes(op: str, payload_bytes: int, world_size: int) -> float:
    """Bytes that each rank sends in a ring algorithm; derived, not measured.

    (W-1)/W of the payload for all-gather and reduce-scatter, twice that for all-reduce, which consists of both, and the
    payload once for broadcast (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009) 117; ``doc/PERFORMANCE.md``
    of nccl-tests has the same factors). Nothing at W = 1. Gloo sends other amounts: its reduce-scatter is an
    all-reduce.
    """
    if world_size == 1:
        return 0.0
    share = (world_size - 1) / world_size
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(op, share) * payload_bytes
