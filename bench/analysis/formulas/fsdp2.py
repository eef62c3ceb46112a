"""FSDP2: every unit gathered and reduced as one tensor, each parameter padded in its first dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.analysis.formulas.core import Tally, ceil_to
from bench.cell import Sharding, Sync
from bench.workload.shapes import ROOT, Layout, Parameter


def padded(parameters: Sequence[Parameter], world_size: int) -> int:
    """Elements of the parameters when each one's first dimension is padded to a multiple of W.

    torch/distributed/fsdp/_fully_shard/_fsdp_common.py:_get_dim0_padded_size.
    """
    return sum(ceil_to(p.shape[0], world_size) * math.prod(p.shape[1:]) for p in parameters)


def local(parameters: Sequence[Parameter], world_size: int, rank: int) -> int:
    """Elements of a rank's shards without padding: ``torch.chunk`` along the first dimension.

    torch/distributed/fsdp/_fully_shard/_fsdp_param.py:_init_sharded_param.
    """
    found = 0
    for p in parameters:
        rows = -(-p.shape[0] // world_size)
        found += max(0, min(rows, p.shape[0] - rank * rows)) * math.prod(p.shape[1:])
    return found


def collectives(
    layout: Layout,
    accumulate: int,
    world_size: int,
    *,
    sync: Sync,
    sharding: Sharding,
    bf16: bool,
    clip: bool,
) -> Tally:
    """Gathers in the dtype of computation, reduce-scatters in fp32, and the norm's all-reduce if clipped.

    With G units, one of them the root: all-gathers N(2G-1) if blocks are resharded after forward (the root never is),
    NG if they stay gathered until backward, G if they stay for the window; reduce-scatters NG eager, G deferred.
    Research sheet of FSDP2, 1.4 and C1-C6; _fsdp_param_group.py:unshard and post_backward,
    _fsdp_collectives.py:foreach_reduce. Clipping sums one norm per parameter over the ranks, in one call
    (torch/nn/utils/clip_grad.py:_get_total_norm stacks the norms, and their ``vector_norm`` makes the partial DTensor
    whole). At W = 1 nothing is sent: gathers and scatters are copies (_fsdp_param_group.py:unshard; C4).
    """
    tally = Tally()
    if world_size > 1:
        for unit, parameters in layout.units.items():
            gathers = accumulate
            if sharding is Sharding.PARAMS and unit != ROOT:
                gathers = 2 * accumulate
            elif sharding is Sharding.OPTIMIZER:
                gathers = 1
            numel = padded(parameters, world_size)
            tally.add("all_gather", "bfloat16" if bf16 else "float32", [numel], gathers)
            tally.add("reduce_scatter", "float32", [numel], accumulate if sync is Sync.EAGER else 1)
        if clip:
            tally.add("all_reduce", "float32", [len(layout.parameters)])
    return tally


def held(layout: Layout, world_size: int, *, sync: Sync, sharding: Sharding, bf16: bool) -> dict[str, int]:
    """Shards with their padding, in fp32; gradients of eager sync as shards, of deferred sync whole and not padded.

    Eager: ``sharded_param.grad`` is a view of the reduce-scatter's padded output (_fsdp_collectives.py:foreach_reduce).
    Deferred: whole ``unsharded_param.grad`` in fp32; in bf16 ``unsharded_accumulated_grad``, in the dtype of reduction,
    fp32 (_fsdp_param.py:to_accumulated_grad_if_needed; sheet 1.3 and C7-C10). What stays gathered for the window adds
    the whole parameters, padded as gathered, in the dtype of computation.
    """
    shards = padded(layout.parameters, world_size) // world_size
    resident = shards * world_size if sharding is Sharding.OPTIMIZER else 0
    gradients = shards if sync is Sync.EAGER else layout.num_parameters
    return {"parameters": 4 * shards + (2 if bf16 else 4) * resident, "gradients": 4 * gradients, "communication": 0}
