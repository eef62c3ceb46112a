"""DeepSpeed's ZeRO stages 2 and 3 with the configuration of ``bench.backends.deepspeed.zero_config``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from bench.judge import gathers
from bench.judge.tally import Tally, ceil_to
from bench.plan.cell import Sync
from bench.workload.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroSettings:
    """What of DeepSpeed's configuration moves bytes; sizes in elements."""

    stage: int
    reduce_bucket: int
    """``reduce_bucket_size``."""
    prefetch: int
    """``stage3_prefetch_bucket_size``."""
    max_live: int
    """``stage3_max_live_parameters``."""
    overlap: bool
    """``overlap_comm``: two reduction buffers instead of one in stage 2."""
    sub_group: int = 10**9
    """``sub_group_size``'s default: elements of one group of the optimizer in stage 3."""


def buckets(layout: Layout, order: Iterable[int], size: int) -> list[list[int]]:
    """The parameters of each bucket: one that does not fit any more closes the bucket and begins the next.

    deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, both reduce_independent_p_g_buckets_and_remove_grads. A
    parameter larger than a bucket has one of its own.
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
    """Eager: as backward finishes gradients. ``coalesce_grad_reduction`` goes through the parameters in their order.

    deepspeed/runtime/engine.py:coalesce_grad_reduction.
    """
    return layout.gradients if sync is Sync.EAGER else sorted(layout.gradients)


def flat(layout: Layout, world_size: int) -> int:
    """Elements of stage 2's flat parameters, padded to a multiple of 2W.

    stage_1_and_2.py:__init__, nccl_start_alignment_factor.
    """
    return ceil_to(layout.num_parameters, 2 * world_size)


def ranks_of(layout: Layout, parameter: int, world_size: int) -> list[tuple[int, int]]:
    """The ranks in whose partition of stage 2's flat parameters a parameter lies, and how many elements of it."""
    partition = flat(layout, world_size) // world_size
    start = sum(p.numel for p in layout.parameters[:parameter])
    end = start + layout.parameters[parameter].numel
    edges = [start, *range(ceil_to(start + 1, partition), end, partition), end]
    return [(a // partition, b - a) for a, b in pairwise(edges)]


def stage2_reductions(layout: Layout, world_size: int, sync: Sync, size: int) -> list[int]:
    """Elements of each all-reduce of one reduction of the gradient.

    A bucket is one all-reduce (average_tensor; ``use_multi_rank_bucket_allreduce`` is on). A parameter larger than a
    bucket is cut at the ranks' partitions, and pieces are sent together until they exceed the size of a bucket
    (allreduce_and_scatter).
    """
    found: list[int] = []
    for bucket in buckets(layout, _order(layout, sync), size):
        pieces = [layout.parameters[p].numel for p in bucket]
        if sum(pieces) <= size:
            found.append(sum(pieces))
            continue
        pending = 0
        for _, piece in ranks_of(layout, bucket[0], world_size):
            pending += piece
            if pending > size:
                found.append(pending)
                pending = 0
        found += [pending] if pending else []
    return found


def stage2(layout: Layout, accumulate: int, world_size: int, *, sync: Sync, bf16: bool, zero: ZeroSettings) -> Tally:
    """All-reduces of the buckets in fp32, of the norm and, in bf16, of the flag of overflow; one gather after the step.

    stage_1_and_2.py: average_tensor (never a reduce-scatter, whatever the option ``reduce_scatter`` is), has_overflow
    (``check_grad_overflow`` is on for bf16), get_grad_norm_direct; runtime/utils.py:all_gather_into_tensor_dp_groups
    (``allgather_bucket_size`` is not used, and nothing is gathered at W = 1). Research sheet of DeepSpeed, 3.4.
    """
    tally = Tally()
    times = accumulate if sync is Sync.EAGER else 1
    tally.add("all_reduce", "float32", stage2_reductions(layout, world_size, sync, zero.reduce_bucket), times)
    tally.add("all_reduce", "float32", [1])
    if bf16:
        tally.add("all_reduce", "uint8", [1])
    if world_size > 1:
        tally.add("all_gather", "bfloat16" if bf16 else "float32", [flat(layout, world_size)])
    return tally


def stage3(layout: Layout, accumulate: int, world_size: int, *, sync: Sync, bf16: bool, zero: ZeroSettings) -> Tally:
    """Gathers of parameters in every forward and backward, reduce-scatters of buckets in fp32, all-reduces of norms.

    Every parameter is padded to a multiple of W by itself (partition_parameters.py:_padding_size;
    runtime/comm/coalesced_collectives.py:reduce_scatter_coalesced, which is called at W = 1 too). The norm is of fp64
    and one per sub-group (stage3.py:get_grad_norm_direct, zero/utils.py:get_norm_dtype); overflow is looked for in
    fp16 only. Research sheet of DeepSpeed, 3.4.
    """
    tally = Tally()

    def padded(parameters: Iterable[int]) -> int:
        return sum(ceil_to(layout.parameters[p].numel, world_size) for p in parameters)

    if world_size > 1:
        window = gathers.of_window(layout, accumulate, prefetch=zero.prefetch, max_live=zero.max_live)
        tally.add("all_gather", "bfloat16" if bf16 else "float32", map(padded, window))
    found = [padded(bucket) for bucket in buckets(layout, _order(layout, sync), zero.reduce_bucket)]
    tally.add("reduce_scatter", "float32", found, accumulate if sync is Sync.EAGER else 1)
    tally.add("all_reduce", "float64", [1], num_sub_groups(layout, world_size, zero))
    return tally


def num_sub_groups(layout: Layout, world_size: int, zero: ZeroSettings) -> int:
    """Groups into which stage 3 cuts the optimizer's parameters: a group is closed by the one that fills it.

    stage3.py:_create_fp16_sub_groups; sizes are those of a rank's partitions, not of whole parameters.
    """
    groups, filled = 0, 0
    for p in layout.parameters:
        filled += ceil_to(p.numel, world_size) // world_size
        if filled >= zero.sub_group:
            groups, filled = groups + 1, 0
    return groups + (filled > 0)


def held(layout: Layout, world_size: int, rank: int, *, sync: Sync, bf16: bool, zero: ZeroSettings) -> dict[str, int]:
    """Parameters in the dtype of computation and fp32 masters; gradients as the stage keeps them.

    Stage 2: the flat parameters are whole on every rank, and the masters a partition. In bf16 the gradient is one
    partition (_use_compact_grad_partition_buffer); in fp32 it is every parameter that overlaps the partition, whole
    (copy_grads_in_partition); deferred all of it, in ``parameter.grad``. Stage 3: parameters and masters are
    partitions; the gradient has a partition for good (``grad_partitions_flat_buffer``), and deferred sync holds the
    whole one beside it. Its reduction buffer is made once (stage3.py:__init__); stage 2 frees its own after every
    backward. Research sheet of DeepSpeed, 3.5.
    """
    element = 2 if bf16 else 4
    whole = 4 * layout.num_parameters
    if zero.stage == 2:
        partition = flat(layout, world_size) // world_size
        gradients = 4 * (partition if bf16 else overlapping(layout, world_size, rank))
        return {
            "parameters": element * partition * world_size + 4 * partition,
            "gradients": whole if sync is Sync.DEFERRED else gradients,
            "communication": 0,
        }
    shards = sum(ceil_to(p.numel, world_size) for p in layout.parameters) // world_size
    return {
        "parameters": (element + 4) * shards,
        "gradients": 4 * shards + (whole if sync is Sync.DEFERRED else 0),
        "communication": 4 * zero.reduce_bucket,
    }


def overlapping(layout: Layout, world_size: int, rank: int) -> int:
    """Elements of the parameters that lie in the rank's partition of stage 2, at least in part."""
    partition = flat(layout, world_size) // world_size
    found, start = 0, 0
    for p in layout.parameters:
        if start < (rank + 1) * partition and start + p.numel > rank * partition:
            found += p.numel
        start += p.numel
    return found


def masters(layout: Layout, world_size: int, zero: ZeroSettings) -> tuple[int, int]:
    """Elements of a rank's fp32 masters, for which the optimizer keeps its state, and how many tensors they are."""
    if zero.stage == 2:
        return flat(layout, world_size) // world_size, 1
    numel = sum(ceil_to(p.numel, world_size) for p in layout.parameters) // world_size
    return numel, num_sub_groups(layout, world_size, zero)
