"""Counts collectives where they are issued, with a dispatch mode over the ``c10d`` operators.

It sees what FSDP2, DDP's C++ reducer and DeepSpeed pass to the process group. torch's CommDebugMode fails on the second
micro-batch of a window.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.plan.cell import RankGroup

NAMESPACES = ("c10d", "_c10d_functional")
"""Namespaces of collectives: methods of process groups, and DTensor's redistribution."""
SILENT = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators of these namespaces that send nothing."""
NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "barrier": "barrier",
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""Common name of each ``c10d`` operator; others are counted under their own name."""


def payload_bytes(*sides: Any) -> int:
    """Bytes of the full logical tensor: after a gather, or before a scatter or reduction.

    ``sides`` are inputs and outputs in any order; the larger side is the full tensor. In-place operations have one
    side.
    """
    sizes = [sum(t.nbytes for t in tree_leaves(side) if isinstance(t, torch.Tensor)) for side in sides]
    return max(sizes, default=0)


def group_of(func: Any, args: tuple[Any, ...]) -> RankGroup:
    """Which ranks take part in a collective, from the process group among its arguments.

    Consecutive ranks form a shard group, as in torch's meshes, whose last dimension varies fastest; others a replicate
    group.
    """
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    group: Any = given.get("process_group")
    group = _resolve_process_group(given["group_name"]) if group is None else dist.ProcessGroup.unbox(group)
    ranks, world = (dist.get_process_group_ranks(some) for some in (group, None))
    if len(ranks) == len(world):
        return RankGroup.WORLD
    return RankGroup.SHARD if ranks[-1] - ranks[0] == len(ranks) - 1 else RankGroup.REPLICATE


class CollectiveCounter(TorchDispatchMode):
    """Counts calls and payload bytes by operation, group and dtype while ``counting`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = False
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.bytes: Counter[tuple[str, str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # dispatched again on the local tensors
        result = func(*args, **(kwargs or {}))
        operator = func.__name__.split(".")[0]
        if self.counting and func.namespace in NAMESPACES and operator not in SILENT:
            tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "none"
            key = (NAMES.get(operator, operator), str(group_of(func, args)), dtype)
            # c10d's operators take outputs first and inputs second; functional ones return their output.
            sides = args[:2] if func.namespace == "c10d" else (args[0], result)
            self.calls[key] += 1
            self.bytes[key] += payload_bytes(*sides)
        return result

    def self_test(self, device: torch.device) -> None:
        """Check on the default process group that collectives are counted and that AVG averages. Collective.

        One all-reduce of 8 bytes over the rank numbers 0 to W - 1 must be counted and average to (W - 1) / 2, up to the
        rounding of a sum and of 1/W, by which NCCL multiplies before summing. Older gloo did not divide
        (pytorch#162338). Values of a fake group are not checked. Previous counts are kept, and the test itself is not
        counted. Raises RuntimeError with one line.
        """
        with CollectiveCounter() as probe:
            probe.counting = True
            values = torch.full((2,), float(dist.get_rank()), device=device)
            dist.all_reduce(values, op=dist.ReduceOp.AVG)
        seen = [{"op": "all_reduce", "group": "world", "dtype": "float32", "calls": 1, "payload_bytes": 8}]
        if probe.rows() != seen:
            raise RuntimeError(f"collectives cannot be counted: an all-reduce of 8 bytes is seen as {probe.rows()}")
        if "fake" in dist.get_backend():
            return
        world_size, found = dist.get_world_size(), values.tolist()
        right = (world_size - 1) / 2
        rounding = world_size * torch.finfo(torch.float32).eps
        if not all(math.isclose(value, right, rel_tol=rounding) for value in found):
            name = dist.get_backend()
            raise RuntimeError(f"{name} does not average: AVG over the ranks' numbers is {found[0]:g}, not {right:g}")

    def start(self) -> None:
        self.counting = True

    def stop(self) -> None:
        self.counting = False

    def rows(self) -> list[dict[str, Any]]:
        """One row per operation, group and dtype: op, group, dtype, calls, payload_bytes."""
        return [
            {"op": op, "group": group, "dtype": dtype, "calls": calls, "payload_bytes": self.bytes[op, group, dtype]}
            for (op, group, dtype), calls in sorted(self.calls.items())
        ]
