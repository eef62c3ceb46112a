"""Formulas for DeepSpeed's ZeRO stages 2 and 3, with the options of ``zero_options``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from bench import validation
from bench.backends.base import Backend, Call
from bench.backends.deepspeed import ZeroBackend
from bench.backends.zero_options import zero_options
from bench.judge import gathers, offload
from bench.judge.formula_terms import (
    ELEMENT_BYTES,
    CallsAndHeld,
    Settings,
    ceil_to,
    compute_dtype,
    moments,
    num_reductions,
)
from bench.judge.gathers import ZeroOptions
from bench.plan.cell import Cell, Precision, Sync
from bench.workload.layout import Layout

SUB_GROUP = 10**9
"""``sub_group_size`` at its default: elements per group of the optimizer in stage 3."""


def zero(
    backend: type[Backend], cell: Cell, layout: Layout, rank: int, settings: Settings
) -> CallsAndHeld | None:
    """The formula of all backends with a DeepSpeed engine.

    None for activation checkpointing where stage 3 gathers the modules of a block one by one: what
    it gathers during the recomputation is not replayed. Nor is what it gathers of a parameter that
    a module reads of another (parameter_offload.py: ZeROOrderedDict.__getitem__).
    """
    if not issubclass(backend, ZeroBackend):
        raise TypeError(f"{backend.__name__} is not made from {ZeroBackend.__name__}")
    if backend.stage == 3 and layout.read_elsewhere:
        return None
    if stored := settings.get("zero_optimization"):
        options = validation.read(ZeroOptions, stored, "zero_optimization.")
    else:
        options = options_of(backend, cell, layout)
    if options.leaf_module is not None:
        layout = gathers.leaves(layout)
    elif backend.stage == 3 and cell.activation_checkpointing:
        return None
    collectives = stage2 if backend.stage == 2 else stage3
    sent = collectives(backend.sync, cell, layout, options)
    if options.offload_optimizer is not None:
        return sent, offloaded(backend.sync, cell, layout, rank, options).held(cell)
    state = moments(cell, *masters(layout, cell.world_size, backend.stage))
    held_bytes = held(backend.sync, cell, layout, rank, options)
    return sent, held_bytes | {"optimizer_state": state}


def options_of(backend: type[ZeroBackend], cell: Cell, layout: Layout) -> ZeroOptions:
    """Those that the backend sets."""
    return validation.read(
        ZeroOptions, zero_options(backend, cell, layout.block_parameters, layout.num_parameters)
    )


def buckets(layout: Layout, order: Iterable[int], size: int) -> list[list[int]]:
    """The parameters of each bucket: one that does not fit closes the bucket and starts the next.

    deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, both
    reduce_independent_p_g_buckets_and_remove_grads. A parameter larger than a bucket gets its own.
    """
    found: list[list[int]] = []
    filled = 0
    for p in order:
        numel = layout.parameters[p].numel
        if not found or filled + numel > size:
            found.append([])
            filled = 0
        found[-1].append(p)
        filled += numel
    return found


def _order(layout: Layout, sync: Sync) -> Iterable[int]:
    """The parameters in the order in which their gradients are reduced.

    Eager: as backward finishes gradients. Deferred: as the model lists parameters.
    deepspeed/runtime/engine.py:coalesce_grad_reduction.
    """
    if sync is Sync.EAGER:
        return layout.gradients
    return sorted(layout.gradients)


def flat(layout: Layout, world_size: int) -> int:
    """Elements of stage 2's flat parameters, padded to a multiple of 2W.

    stage_1_and_2.py:__init__, nccl_start_alignment_factor.
    """
    return ceil_to(layout.num_parameters, 2 * world_size)


def pieces_of(layout: Layout, parameter: int, world_size: int) -> list[int]:
    """Elements of a parameter in each partition of stage 2's flat parameters that it overlaps."""
    partition = flat(layout, world_size) // world_size
    start = sum(p.numel for p in layout.parameters[:parameter])
    end = start + layout.parameters[parameter].numel
    edges = [start, *range(ceil_to(start + 1, partition), end, partition), end]
    return [b - a for a, b in pairwise(edges)]


def stage2_reductions(layout: Layout, world_size: int, sync: Sync, size: int) -> list[int]:
    """Elements of each all-reduce in one reduction of the gradient.

    A bucket is one all-reduce (average_tensor; ``use_multi_rank_bucket_allreduce`` is on). A
    parameter larger than a bucket is split at the boundaries of partitions, and pieces are sent
    together once they exceed the bucket size (allreduce_and_scatter).
    """
    found: list[int] = []
    for bucket in buckets(layout, _order(layout, sync), size):
        numel = sum(layout.parameters[p].numel for p in bucket)
        if numel <= size:
            found.append(numel)
            continue
        pending = 0
        for piece in pieces_of(layout, bucket[0], world_size):
            pending += piece
            if pending > size:
                found.append(pending)
                pending = 0
        if pending:
            found.append(pending)
    return found


def stage2(sync: Sync, cell: Cell, layout: Layout, options: ZeroOptions) -> Iterator[Call]:
    """All-reduces of the buckets in fp32, of the norm and, in bf16, of the overflow flag; a gather.

    stage_1_and_2.py: average_tensor (never a reduce-scatter, whatever the option ``reduce_scatter``
    is), has_overflow (``check_grad_overflow`` is on for bf16), get_grad_norm_direct;
    runtime/utils.py:all_gather_into_tensor_dp_groups (``allgather_bucket_size`` is not used, and
    nothing is gathered at W = 1).
    """
    for numel in stage2_reductions(layout, cell.world_size, sync, options.reduce_bucket_size):
        yield "all_reduce", "float32", numel, num_reductions(sync, cell)
    yield "all_reduce", "float32", 1, 1
    if cell.precision is Precision.BF16:
        yield "all_reduce", "uint8", 1, 1
    if cell.world_size > 1:
        yield "all_gather", compute_dtype(cell), flat(layout, cell.world_size), 1


def stage3(sync: Sync, cell: Cell, layout: Layout, options: ZeroOptions) -> Iterator[Call]:
    """Gathers of parameters in every forward and backward, reduce-scatters of buckets, and norms.

    Buckets are reduced in fp32. Every parameter is padded separately to a multiple of W
    (partition_parameters.py:_padding_size;
    runtime/comm/coalesced_collectives.py:reduce_scatter_coalesced, which is called at W = 1 too).
    There is one all-reduce of an fp64 norm per sub-group (stage3.py:get_grad_norm_direct,
    zero/utils.py:get_norm_dtype), in fp32 with offload
    (complete_grad_norm_calculation_for_cpu_offload); only fp16 checks for overflow.
    """
    ranks = cell.world_size
    if ranks > 1:
        for gathered in gathers.of_window(layout, cell.accumulate, options):
            yield "all_gather", compute_dtype(cell), padded(layout, gathered, ranks), 1
    for bucket in buckets(layout, _order(layout, sync), options.reduce_bucket_size):
        numel = padded(layout, bucket, ranks)
        yield "reduce_scatter", "float32", numel, num_reductions(sync, cell)
    norm = "float32"
    if options.offload_optimizer is None:
        norm = "float64"
    yield "all_reduce", norm, 1, num_sub_groups(layout, ranks)


def padded(layout: Layout, parameters: Iterable[int], world_size: int) -> int:
    """Elements of parameters, each of which is padded to a multiple of W."""
    return sum(ceil_to(layout.parameters[p].numel, world_size) for p in parameters)


def shards(layout: Layout, world_size: int) -> int:
    """Elements of a rank's shards of all parameters in stage 3, with padding."""
    return padded(layout, range(len(layout.parameters)), world_size) // world_size


def num_sub_groups(layout: Layout, world_size: int) -> int:
    """Number of groups into which stage 3 splits the optimizer's parameters.

    The parameter that fills a group closes it.

    stage3.py:_create_fp16_sub_groups; sizes are those of a rank's partitions, not of whole
    parameters.
    """
    groups, filled = 0, 0
    for p in layout.parameters:
        filled += ceil_to(p.numel, world_size) // world_size
        if filled >= SUB_GROUP:
            groups, filled = groups + 1, 0
    return groups + (filled > 0)


def held(sync: Sync, cell: Cell, layout: Layout, rank: int, options: ZeroOptions) -> dict[str, int]:
    """Parameters in the compute dtype, fp32 master weights, and gradients as the stage keeps them.

    Stage 2: every rank has the full flat parameters and a partition of the master weights. The
    gradient is one partition in bf16 (_use_compact_grad_partition_buffer), in fp32 every parameter
    that overlaps the partition, in full (copy_grads_in_partition), and under deferred sync the full
    gradient, in ``parameter.grad``. Stage 3: parameters and master weights are partitions; a
    partition of the gradient is permanent (``grad_partitions_flat_buffer``), and deferred sync adds
    the full gradient. Parameters below the persistence threshold stay gathered. The reduction
    buffer is permanent too (stage3.py:__init__); stage 2 frees its own after every backward.
    """
    world_size, bf16 = cell.world_size, cell.precision is Precision.BF16
    element = ELEMENT_BYTES[cell.precision]
    whole = 4 * layout.num_parameters
    if options.stage == 2:
        partition = flat(layout, world_size) // world_size
        gradients = 4 * overlapping(layout, world_size, rank)
        if sync is Sync.DEFERRED:
            gradients = whole
        elif bf16:
            gradients = 4 * partition
        parameters = element * partition * world_size + 4 * partition
        return {"parameters": parameters, "gradients": gradients, "communication": 0}
    sharded = shards(layout, world_size)
    parameters, gradients = (element + 4) * sharded, 4 * sharded
    if world_size > 1:
        kept = gathers.persistent(layout, options)
        parameters += element * padded(layout, kept, world_size)
    if sync is Sync.DEFERRED:
        gradients += whole
    return {
        "parameters": parameters,
        "gradients": gradients,
        "communication": 4 * options.reduce_bucket_size,
    }


def offloaded(
    sync: Sync, cell: Cell, layout: Layout, rank: int, options: ZeroOptions
) -> offload.Offloaded:
    """What both stages hold and copy with ``offload_optimizer``."""
    ranks = cell.world_size
    if options.stage == 3:
        num_groups = num_sub_groups(layout, ranks)
        return offload.zero3(sync, cell, layout, rank, options, num_groups)
    partition = flat(layout, ranks) // ranks
    parts = offload.Zero2Parts(
        partition=partition,
        unpadded=max(0, min(partition, layout.num_parameters - rank * partition)),
        overlapping=overlapping(layout, ranks, rank),
    )
    return offload.zero2(sync, cell, layout, parts)


def overlapping(layout: Layout, world_size: int, rank: int) -> int:
    """Total elements of the parameters that overlap the rank's partition of stage 2."""
    partition = flat(layout, world_size) // world_size
    found, start = 0, 0
    for p in layout.parameters:
        if start < (rank + 1) * partition and start + p.numel > rank * partition:
            found += p.numel
        start += p.numel
    return found


def masters(layout: Layout, world_size: int, stage: int) -> tuple[int, int]:
    """Elements and number of tensors of a rank's fp32 master weights, each of which has state."""
    if stage == 2:
        return flat(layout, world_size) // world_size, 1
    return shards(layout, world_size), num_sub_groups(layout, world_size)
