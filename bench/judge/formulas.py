"""Closed formulas for collectives and held bytes of all built-in backends, from cell and layout.

Plain arithmetic without torch: ``expect(cell, layout)`` for a cell, ``layout_of(cell)`` for the
layouts of shipped models. Each docstring names the source of its formula. Valid for the versions in
constraints.txt. DistributedDataParallel reduces gradients in buckets and broadcasts buffers; FSDP2
gathers and reduces every unit as one tensor, with each parameter padded in its first dimension;
``bench.judge.zero`` has those of DeepSpeed. FORMULAS says which backend has which; one of another
package may bring its own (``Backend.formula``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name

from bench.backends.base import EXTRA_BACKENDS, Backend, Call, Offloading, built_in, registry
from bench.backends.deepspeed import ZeroBackend
from bench.backends.fsdp2 import FSDP2Backend
from bench.backends.plain import DDPBackend, Reference
from bench.errors import InputError
from bench.grouping import grouped
from bench.judge import offload, zero
from bench.judge.formula_terms import (
    ELEMENT_BYTES,
    NO_SETTINGS,
    CallsAndHeld,
    Formula,
    Settings,
    ceil_to,
    compute_dtype,
    moments,
    num_reductions,
)
from bench.plan.cell import Cell, RankGroup, Sharding, Sync
from bench.plan.models import shape_of
from bench.workload.layout import ROOT, Layout, Parameter, llama_layout

BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element by dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """The calls of one operation on one dtype in a window, on every rank."""

    op: str
    """As ``CollectiveCounter`` names it: ``all_reduce``, ``all_gather``, ``reduce_scatter``,
    ``broadcast``."""
    group: str
    """The ranks that take part, a ``RankGroup``."""
    dtype: str
    calls: int
    payload_bytes: int
    """Bytes of the whole logical tensors, summed over the calls; see
    ``bench.measure.collectives.payload_bytes``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What a backend must do in one steady-state window, from one update to the next."""

    collectives: tuple[Collective, ...]
    """Sorted by operation, group and dtype, like the counter's rows."""
    held: dict[str, int]
    """Bytes per rank of tensors that outlive a micro-batch, between two micro-batches of a window,
    by category: ``parameters``, ``gradients``, ``optimizer_state`` and ``communication``."""
    beside: Mapping[str, int] = field(default_factory=dict)
    """Where a backend offloads from a device, the same of the host (``host_held_<category>``), the
    part of it that is pinned (PINNED), and what is copied in a window (COPIED_TO_HOST,
    COPIED_TO_DEVICE)."""


def layout_of(cell: Cell) -> Layout | None:
    """The layout of a model of known shape; None for other workloads, whose ranks return theirs."""
    if cell.workload != "llama" or (size := shape_of(cell.model)) is None:
        return None
    return llama_layout(size)


def expect(
    cell: Cell, layout: Layout, *, rank: int = 0, settings: Settings = NO_SETTINGS
) -> Expectation | None:
    """Collectives of a steady-state window, and bytes that a rank holds between micro-batches.

    None for a backend without a formula, and for a built-in one if its formula does not cover the
    layout (``not_covered``). The world may have any size and need not exist.
    """
    backend = BUILT_IN.get(cell.backend)
    if backend is None:
        backend = _of_another_package(cell.backend, os.environ.get(EXTRA_BACKENDS, ""))
    if backend is None:
        return None
    formula = formula_of(backend)
    if formula is None:
        return None
    if backend.name in BUILT_IN and not_covered(layout):
        return None
    try:
        found = formula(backend, cell, layout, rank, settings)
    except Exception as error:
        if backend.name in BUILT_IN:
            raise
        raise InputError(
            f"backend '{backend.name}': its formula fails ({error}); mend it, or leave it out"
        ) from error
    if found is None:
        return None
    sent, held = found
    every = [*sent, *backend.extra_collectives(cell)]
    groups: dict[RankGroup, Iterable[Call]] = {RankGroup.WORLD: every}
    if cell.replicate:
        groups = {
            RankGroup.SHARD: every,
            RankGroup.REPLICATE: replica_collectives(backend.sync, cell, layout),
        }
    held["communication"] += backend.extra_held_bytes(cell)
    on_device, beside = _apart(held)
    return Expectation(collectives=_summed(groups), held=on_device, beside=beside)


def _summed(groups: Mapping[RankGroup, Iterable[Call]]) -> tuple[Collective, ...]:
    """The calls of each operation, group and dtype together, sorted by these."""
    calls, sizes = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for group, every in groups.items():
        for op, dtype, numel, times in every:
            calls[op, group, dtype] += times
            sizes[op, group, dtype] += times * numel * BYTES[dtype]
    found: list[Collective] = []
    for (op, of, dtype), count in sorted(calls.items()):
        size = sizes[op, of, dtype]
        row = Collective(op=op, group=str(of), dtype=dtype, calls=count, payload_bytes=size)
        found.append(row)
    return tuple(found)


def _apart(held: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """What the device holds, and what a formula says besides."""
    on_device: dict[str, int] = {}
    beside: dict[str, int] = {}
    for name, size in held.items():
        if name in offload.USES:
            on_device[name] = size
        else:
            beside[name] = size
    return on_device, beside


def not_covered(layout: Layout) -> str:
    """What in a layout the formulas do not cover, in words; empty if they cover all.

    They are for dense gradients in fp32 of all parameters: frameworks treat others, each in its own
    way, differently.
    """
    for parameter in layout.parameters:
        if parameter.special:
            return f"the parameter '{parameter.name}' {parameter.special}"
    for dtype, _ in layout.buffers:
        if dtype not in BYTES:
            return f"there is a buffer of {dtype}"
    return ""


def reference(
    backend: type[Backend], cell: Cell, layout: Layout, rank: int, settings: Settings
) -> CallsAndHeld:
    """No collectives; fp32 parameters and gradients in full."""
    whole = 4 * layout.num_parameters
    state = moments(cell, layout.num_parameters, len(layout.parameters))
    return (), {
        "parameters": whole,
        "gradients": whole,
        "communication": 0,
        "optimizer_state": state,
    }


FIRST_BUCKET_BYTES = 2**20
"""torch/csrc/distributed/c10d/reducer.hpp: kDefaultFirstBucketBytes."""
BUCKET_BYTES = 25 * 2**20
"""torch/nn/parallel/distributed.py: bucket_cap_mb's default."""
BROADCAST_BYTES = 250 * 2**20
"""torch/nn/parallel/distributed.py: DistributedDataParallel.broadcast_bucket_size."""


def buckets(sizes: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Sizes of buckets in bytes, from the sizes of tensors of one dtype, in order.

    The tensor that reaches the limit closes the bucket, so a bucket may exceed its limit; the last
    limit applies to all further buckets
    (torch/csrc/distributed/c10d/reducer.cpp:compute_bucket_assignment_by_size).
    """
    found: list[int] = []
    filled = 0
    for size in sizes:
        filled += size
        if filled >= limits[min(len(found), len(limits) - 1)]:
            found.append(filled)
            filled = 0
    if filled:
        found.append(filled)
    return found


def ddp(
    backend: type[Backend], cell: Cell, layout: Layout, rank: int, settings: Settings
) -> CallsAndHeld:
    """All-reduces of gradient buckets and broadcasts of buffers; DDP does both at W = 1 too.

    Buckets are in the order in which the first backward finished the gradients
    (reducer.cpp:rebuild_buckets), and in fp32 also under autocast. Buffers are broadcast before a
    forward, unless the previous forward was under ``no_sync``
    (distributed.py:_check_sync_bufs_pre_fwd and _post_forward), so a deferred window broadcasts
    them once.

    Held are what the reference holds and the reducer's buckets, as large as all gradients. With
    ``gradient_as_bucket_view`` a gradient is a view of its bucket once it is reduced
    (reducer.cpp:mark_variable_ready_dense). ``zero_grad`` drops the view, so gradients that are
    summed under ``no_sync`` are tensors of their own. The model's buffers are not counted: a
    broadcast copies them, unless a dtype has only one, which is then sent directly.
    """
    if not issubclass(backend, DDPBackend):
        raise TypeError(f"{backend.__name__} is not made from {DDPBackend.__name__}")
    is_eager = backend.sync is Sync.EAGER or (backend.eager_on_one_rank and cell.world_size == 1)
    times = 1
    if is_eager:
        times = cell.accumulate
    sent: list[Call] = []
    gradients = [4 * layout.parameters[i].numel for i in layout.gradients]
    for size in buckets(gradients, (FIRST_BUCKET_BYTES, BUCKET_BYTES)):
        sent.append(("all_reduce", "float32", size // 4, times))
    for dtype, sizes in grouped(layout.buffers).items():
        for size in buckets(sizes, [BROADCAST_BYTES]):
            sent.append(("broadcast", dtype, size // BYTES[dtype], times))
    _, held = reference(backend, cell, layout, rank, settings)
    whole = 4 * layout.num_parameters
    if not settings.get("gradient_as_bucket_view", backend.bucket_views and not settings):
        held["communication"] = whole
    elif not is_eager:
        held["gradients"] = 2 * whole
    return sent, held


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


def fsdp2(
    backend: type[Backend], cell: Cell, layout: Layout, rank: int, settings: Settings
) -> CallsAndHeld | None:
    """FSDP2 over the ranks of a shard group: all of them, or W / R under HSDP.

    None where the root is split and the model is not shipped: the units then depend on methods of
    the model.
    """
    if not issubclass(backend, FSDP2Backend):
        raise TypeError(f"{backend.__name__} is not made from {FSDP2Backend.__name__}")
    if backend.splits_root and cell.workload != "llama":
        return None
    layout = units_of(backend, layout)
    w = cell.group_size(RankGroup.SHARD)
    if issubclass(backend, Offloading):
        units = offloaded_units(backend, cell, layout, w, rank % w)
        placed = offload.fsdp2(backend.sync, cell, layout.parameters, units)
        return fsdp2_collectives(backend, cell, layout, w), placed.held(cell)
    state = moments(cell, local(layout.parameters, w, rank % w), len(layout.parameters))
    held = fsdp2_held(backend, cell, layout, w) | {"optimizer_state": state}
    return fsdp2_collectives(backend, cell, layout, w), held


def fsdp2_collectives(
    backend: type[FSDP2Backend], cell: Cell, layout: Layout, world_size: int
) -> Iterator[Call]:
    """Gathers in the compute dtype, reduce-scatters in fp32, and an all-reduce of a norm, if any.

    With G units, one of them the root: all-gathers N(2G-1) if blocks are resharded after forward
    (the root never is), NG if they stay gathered until backward, G if they stay for the window;
    reduce-scatters NG eager, G deferred. _fsdp_param_group.py:unshard and post_backward,
    _fsdp_collectives.py:foreach_reduce. Clipping sums one norm per parameter over the ranks, in one
    call (torch/nn/utils/clip_grad.py:_get_total_norm stacks the norms, and their ``vector_norm``
    makes the partial DTensor full). At W = 1 nothing is sent: gathers and scatters are copies
    (_fsdp_param_group.py:unshard).
    """
    if world_size == 1:
        return
    for unit, parameters in layout.units.items():
        num_gathers, num_reduced = calls_of_unit(backend, cell, unit)
        numel = padded(parameters, world_size)
        yield "all_gather", compute_dtype(cell), numel, num_gathers
        yield "reduce_scatter", "float32", numel, num_reduced
    if cell.clip_norm or backend.always_computes_norm:
        yield "all_reduce", "float32", len(layout.parameters), 1


def calls_of_unit(backend: type[FSDP2Backend], cell: Cell, unit: int) -> tuple[int, int]:
    """How often a unit is gathered, and how often its gradients are reduced, in a window."""
    num_gathers = num_reduced = cell.accumulate
    if backend.sharding is Sharding.PARAMS and unit != ROOT:
        num_gathers = 2 * cell.accumulate
    elif backend.sharding is Sharding.OPTIMIZER:
        num_gathers = 1
    if backend.sync is Sync.DEFERRED:
        num_reduced = 1
    return num_gathers, num_reduced


def offloaded_units(
    backend: type[FSDP2Backend], cell: Cell, layout: Layout, world_size: int, rank: int
) -> Iterator[offload.OffloadedUnit]:
    """The units of a backend that offloads; at W = 1 nothing is sent, and shards are copied."""
    for unit, parameters in layout.units.items():
        num_gathers, num_reduced = calls_of_unit(backend, cell, unit)
        yield offload.OffloadedUnit(
            padded=padded(parameters, world_size) // world_size,
            unpadded=local(parameters, world_size, rank),
            num_gathers=num_gathers,
            num_reductions=num_reduced,
        )


def units_of(backend: type[FSDP2Backend], layout: Layout) -> Layout:
    """The layout in the units that FSDP2 shards.

    Where the root is split, they are blocks and embedding, then norm and head. The last two are one
    unit, which stays gathered from forward to backward as the root does elsewhere; the root itself
    has no parameters. A tied embedding is in that unit
    (accelerate/utils/fsdp_utils.py:fsdp2_prepare_model).
    """
    if not backend.splits_root:
        return layout
    embedding, *_, last = layout.parameters
    if last.unit != ROOT or not last.name.startswith("lm_head"):
        return layout
    moved = dataclasses.replace(embedding, unit=max(layout.units) + 1)
    return dataclasses.replace(layout, parameters=(moved, *layout.parameters[1:]))


def replica_collectives(sync: Sync, cell: Cell, layout: Layout) -> Iterator[Call]:
    """HSDP's all-reduces of shards of gradients over replicas: one per unit and reduction, in fp32.

    With G units NG eager, G if deferred. Beside them, a shard group does what FSDP2 does over W / R
    ranks: with NG reduce-scatters unless these are deferred too
    (_fsdp_collectives.py:foreach_reduce). The norm for clipping is summed in the shard group alone.
    """
    num_shards = cell.group_size(RankGroup.SHARD)
    for parameters in layout.units.values():
        numel = padded(parameters, num_shards) // num_shards
        yield "all_reduce", "float32", numel, num_reductions(sync, cell)


def fsdp2_held(
    backend: type[FSDP2Backend], cell: Cell, layout: Layout, world_size: int
) -> dict[str, int]:
    """fp32 shards with padding; gradients as shards under eager sync, else in full and unpadded.

    Eager: ``sharded_param.grad`` is a view of the reduce-scatter's padded output
    (_fsdp_collectives.py:foreach_reduce). HSDP that defers only its all-reduce sums that output
    over micro-batches in ``_partial_reduce_output``. Deferred: full ``unsharded_param.grad`` in
    fp32; in bf16 ``unsharded_accumulated_grad``, in the reduction dtype, fp32
    (_fsdp_param.py:to_accumulated_grad_if_needed). Parameters that stay gathered for the window add
    their full size, padded, in the compute dtype.
    """
    shards = padded(layout.parameters, world_size) // world_size
    parameters, gradients = 4 * shards, 4 * shards
    if backend.sharding is Sharding.OPTIMIZER:
        parameters += ELEMENT_BYTES[cell.precision] * shards * world_size
    if backend.sync is Sync.DEFERRED:
        gradients = 4 * layout.num_parameters
    return {"parameters": parameters, "gradients": gradients, "communication": 0}


def wire_bytes(op: str, payload_bytes: int, group_size: int) -> float:
    """Bytes that each of W ranks in a group sends in a ring algorithm; derived, not measured.

    (W-1)/W of the payload for all-gather and reduce-scatter, twice that for all-reduce, which
    consists of both, and the payload once for broadcast (Patarasuk and Yuan, J. Parallel Distrib.
    Comput. 69 (2009) 117; ``doc/PERFORMANCE.md`` of nccl-tests has the same factors). Nothing at W
    = 1. Gloo sends other amounts: its reduce-scatter is an all-reduce.
    """
    if group_size == 1:
        return 0.0
    share = (group_size - 1) / group_size
    if op == "all_reduce":
        return 2 * share * payload_bytes
    if op == "broadcast":
        return float(payload_bytes)
    return share * payload_bytes


FORMULAS: Mapping[type, Formula] = {
    Reference: reference,
    DDPBackend: ddp,
    FSDP2Backend: fsdp2,
    ZeroBackend: zero.zero,
}
"""The formula of a backend and of all that are made from it."""


def formula_of(backend: type[Backend]) -> Formula | None:
    """The formula of a backend, its own or the first of its bases'; None if there is none.

    Raises InputError if its own cannot be loaded.
    """
    given = backend.formula
    if isinstance(given, str) and given:
        try:
            loaded: Formula = resolve_name(given)
        except Exception as error:  # the user's code may raise anything
            raise InputError(
                f"backend '{backend.name}': its formula '{given}' cannot be loaded ({error})"
            ) from error
        return loaded
    if callable(given):
        return given
    for base in backend.__mro__:
        if base in FORMULAS:
            return FORMULAS[base]
    return None


BUILT_IN = {
    name: backend for name, backend in built_in().items() if formula_of(backend) is not None
}
"""The backends of this package that have a formula, by name."""


@functools.lru_cache
def _of_another_package(name: str, extra: str) -> type[Backend] | None:
    """The backend of another package, if it can be loaded here and brings a formula.

    ``extra`` is the value of EXTRA_BACKENDS. The formula of what the backend is made from does not
    count: nobody knows what the package has changed.
    """
    if name in built_in():
        return None
    try:
        backend = registry([name]).get(name)
    except InputError:  # it could be loaded where it ran
        return None
    if backend is None or not backend.formula:
        return None
    return backend
