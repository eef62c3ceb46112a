"""A rank's memory at its peak, by category, in closed form.

Parameters, gradients, optimizer state and buffers that are held have exact formulas (``bench.judge.formulas``). At each
moment that can have the peak, what autograd has saved and what lives only for that moment is added. The largest sum is
the peak. Nothing is fitted. The moments are:

- ``forward``: its end, with the logits and the log-softmax;
- ``loss``: all activations, and three fp32 tensors of tokens x vocabulary (the log-softmax and two gradients);
- ``head``: the backward of the output head: the gradients of its output and of its weight;
- ``block``: the backward of the last blocks, whose MLP has three gradients as large as its inner activations;
- ``reduce``: a unit's gradients are reduced; ``flush``: deferred gradients are reduced after the backward;
- ``embedding``: the end of the backward, where a tied head's gradient is added to the embedding's;
- ``step``: the optimizer's step.

Activations are all tensors that autograd saves for the backward (Korthikanti et al., arXiv:2205.05198, section 4) in a
Llama block of transformers with fused attention. With h = hidden size, q = heads x head size, k = the same for the
key-value heads and i = the MLP's width, a block saves per token: two norms, each with its input in fp32 (h), what it
normalized (h) and what it returns (h); queries, keys, values and the output of attention (2q + 2k); the MLP's gate, its
SiLU, the other branch and their product (4i); and one fp32 scalar per head and per norm. With activation checkpointing
a block keeps only its input, and saves the rest during its own backward; selectively, it also keeps what
``bench.backends.blocks`` names.

Short-lived and smaller tensors are left out, and so are the CUDA context, the allocator's rounding and fragments, what
libraries allocate (cuBLAS, NCCL), and the tokens of all windows, which the bench itself holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.backends.base import BF16_PARAMETERS, Backend
from bench.judge import formulas, zero
from bench.plan.cell import Cell, Device, Precision, RankGroup, Sharding, Sync
from bench.plan.models import SIZES
from bench.workload.layout import ROOT, Layout


@dataclass(frozen=True, slots=True)
class Footprint:
    """A rank's memory at its peak."""

    moment: str
    """See the docstring of the module."""
    parts: dict[str, int]
    """Bytes by category: those of ``Expectation.held``, ``activations``, and ``temporaries`` for everything else."""

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Moment:
    """What differs between the moments of a window, in bytes."""

    name: str
    gradients: int
    activations: int
    temporaries: int
    """Gathered and cast parameters, gradients of one micro-batch, buffers of collectives, work space."""


def declined(cell: Cell, backend: type[Backend]) -> str:
    """Why the memory of such a cell is not predicted; empty if it is."""
    if cell.compiled:
        return "the compiler decides what compiled blocks save and need"
    if cell.activation_checkpointing and backend.stage == 3 and backend.own_defaults:
        return "there is no formula for what ZeRO-3 gathers during recomputation"
    return ""


def footprint(cell: Cell, layout: Layout, backend: type[Backend], held: Mapping[str, int]) -> Footprint:
    """The memory of the fullest rank at its peak; ``held``: bytes by category as in ``Expectation.held``."""
    sizes = TensorSizes(cell, layout, backend)
    moments = _replicated if backend.sharding is Sharding.NONE else _fsdp2
    if backend.stage:
        moments = _zero2 if backend.stage == 2 else _zero3
    fixed = dict(held)
    if backend.sharding is Sharding.OPTIMIZER:
        fixed["parameters"] = 4 * sizes.shard(layout)  # the rest is gathered, and freed by the last backward
    at = max(moments(sizes, held), key=lambda moment: moment.gradients + moment.activations + moment.temporaries)
    changing = {"gradients": at.gradients, "activations": at.activations, "temporaries": at.temporaries}
    return Footprint(at.name, fixed | changing)


class TensorSizes:
    """Sizes of the tensors of a window: of activations and work space in bytes, of weights in elements."""

    def __init__(self, cell: Cell, layout: Layout, backend: type[Backend]) -> None:
        self.cell, self.layout, self.backend = cell, layout, backend
        size, tokens = SIZES[cell.model], cell.micro_batch_size * cell.sequence_length
        hidden, query, key = size.hidden_size, size.num_heads * size.head_size, size.num_kv_heads * size.head_size
        self.is_bf16 = cell.precision is Precision.BF16
        if cell.device is Device.CUDA and not self.is_bf16:
            key = query  # keys and values are repeated for each query head (bench/workload/llama.py:attend)
        self.element = 2 if self.is_bf16 else 4
        self.autocast = self.is_bf16 and backend.bf16_as != BF16_PARAMETERS
        residual = 4 if self.autocast else self.element  # autocast keeps norms and the residual stream in fp32
        norm = tokens * (4 * hidden + 4 + residual * hidden)
        casts = 5 if self.autocast else 2  # what two norms return; autocast copies it for each product that reads it
        of_attention = tokens * (self.element * 2 * (query + key) + 4 * size.num_heads)
        inner = tokens * self.element * size.intermediate_size
        self.stream = tokens * residual * hidden
        """The residual stream, or its gradient."""
        self.mlp = self.stream + 2 * inner
        """Three gradients in the backward of an MLP, less the saved tensor that is freed by then."""
        self.block = 2 * norm + casts * tokens * self.element * hidden + of_attention + 4 * inner
        """What a block saves."""
        outside = norm + tokens * self.element * hidden  # the last norm
        outside += 8 * tokens + 2 * cell.sequence_length * size.head_size * residual  # targets, rotary angles
        self._kept = self.stream if cell.activation_checkpointing else self.block
        if cell.selective_checkpointing:  # the results of attention, and of every second of the seven products
            kept = 2 * query + key + size.intermediate_size + hidden
            self._kept += tokens * (self.element * kept + 4 * size.num_heads)
        self.saved = size.num_layers * self._kept + outside
        """All that is saved after a forward."""
        self.saved_after_block = self.saved - self._kept
        self.logits = tokens * size.vocab_size
        """Elements of tokens x vocabulary."""
        self.log_softmax = (10 if self.is_bf16 else 8) * self.logits
        """The logits, also in fp32, and their log-softmax."""
        self.loss = 12 * self.logits
        self.table, self.tied = size.vocab_size * hidden, size.tied
        """Elements of the embedding and of the head."""
        self.head = self.element * (self.logits + self.table) + self.stream
        """The gradients of logits, head weight and residual stream."""
        self.mlp_weight = hidden * size.intermediate_size
        self.cast_blocks = 2 * self.autocast * size.num_layers * (size.num_block_parameters - 2 * hidden)
        self.cast_head = 2 * self.autocast * self.table
        """Copies of weights that autocast makes and autograd saves."""
        self.is_single = cell.accumulate == 1
        """Whether the window has one micro-batch, so that no gradients are held before its backward."""
        self.zeroes_late = self.is_single and backend.frees_gradients_late
        """Whether the gradients of the window before are freed after the first forward."""
        self.num_blocks = size.num_layers

    def saved_at(self, passed: int) -> int:
        """Activations during the backward of a block, after that of so many others."""
        return self.saved - passed * self._kept + self.block - self._kept

    def step(self, gradients: int, state: int, flat: int = 0) -> Moment:
        """``foreach`` takes the root of all second moments at once (torch/optim/adam.py:_multi_tensor_adam)."""
        return Moment("step", gradients, 0, flat + (state // 2 if self.cell.optimizer == "adamw-foreach" else 0))

    def shard(self, layout: Layout) -> int:
        """Elements of a rank's shards in FSDP2."""
        ranks = self.cell.group_size(RankGroup.SHARD)
        return formulas.padded(layout.parameters, ranks) // ranks


def _replicated(sizes: TensorSizes, held: Mapping[str, int]) -> Iterator[Moment]:
    """DDP and a single process: parameters and gradients are whole, and autocast casts the weights."""
    whole, table = 4 * sizes.layout.num_parameters, 4 * sizes.table
    # DDP's buckets, of which reduced gradients are views, and the sums of a deferred reduction beside them.
    views = whole * sizes.backend.bucket_views
    before = views if sizes.is_single else held["gradients"]
    of_head = table * (sizes.tied or (sizes.is_single and not views))
    casts, head = sizes.cast_blocks + sizes.cast_head, sizes.head
    if sizes.autocast:
        head = max(head, table + sizes.cast_head + sizes.stream)  # the gradient of the cast is cast to fp32
    yield Moment("forward", whole if sizes.zeroes_late else before, sizes.saved, sizes.log_softmax + casts)
    if sizes.cell.activation_checkpointing:
        casts = sizes.cast_blocks // sizes.num_blocks + sizes.cast_head
    yield Moment("loss", before, sizes.saved, sizes.loss + casts)
    yield Moment("head", before, sizes.saved, head + casts)
    weight = (6 if sizes.autocast else 4) * sizes.mlp_weight  # in the backward of the first of three products
    block = max(sizes.mlp, (sizes.mlp + sizes.stream) // 2 + weight) + casts - sizes.cast_head
    yield Moment("block", before, sizes.saved_at(0), block + of_head)
    end = before if views else whole - table * sizes.is_single
    yield Moment("embedding", end, 0, (3 if sizes.tied else 1) * table + sizes.stream)
    yield sizes.step(whole, held["optimizer_state"])


def _fsdp2(sizes: TensorSizes, held: Mapping[str, int]) -> Iterator[Moment]:
    """Units are gathered, and their gradients reduced in fp32 (torch/distributed/fsdp/_fully_shard).

    An all-gather and a reduce-scatter have buffers of their own. In the backward the next unit is gathered ahead, and
    the input of a reduction lives until the next one. The root is gathered from forward to backward, and reduced last.
    """
    cell, element, layout = sizes.cell, sizes.element, formulas.units_of(sizes.backend, sizes.layout)
    splits_root = layout is not sizes.layout  # the embedding is a unit of its own, and the head is reduced first
    ranks, sharding, sync = cell.group_size(RankGroup.SHARD), sizes.backend.sharding, sizes.backend.sync
    units = {unit: formulas.padded(parameters, ranks) for unit, parameters in layout.units.items()}
    root, block, last = units[ROOT], units[1], units[max(units) if splits_root else ROOT]
    shards = 4 * sizes.shard(layout)
    before = 0 if sizes.is_single else held["gradients"]
    sums = sync is Sync.DEFERRED and not sizes.is_single
    """Whether whole gradients are held, to which those of a micro-batch are added at once."""
    reshards = sharding is Sharding.PARAMS
    gathered = element * (root if reshards else sum(units.values()))
    current, ahead = element * block * reshards, element * block * (reshards and ranks > 1)
    reduced = 4 * block * (not sums)
    of_head = element * sizes.table * (sizes.tied or not sums or sizes.is_bf16)

    def reduction(unit: int) -> int:
        return (0 if sums else element * unit) + 4 * unit + 4 * unit // ranks

    late = held["gradients"] if sizes.zeroes_late else before
    yield Moment("forward", late, sizes.saved, sizes.log_softmax + gathered)
    yield Moment("loss", before, sizes.saved, sizes.loss + gathered)
    yield Moment("head", before, sizes.saved, sizes.head + gathered + ahead)
    at_end = (shards - 4 * last // ranks) if sizes.is_single else before
    if splits_root:
        yield Moment("reduce", before, sizes.saved, sizes.stream + ahead + reduction(root))
        gathered = of_head = 0
    in_block = gathered + current + ahead + of_head + element * sizes.mlp_weight + sizes.mlp
    yield Moment("block", before, sizes.saved_at(0), in_block + 4 * root * (splits_root and not sums))
    yield Moment("block", before, sizes.saved_at(1), in_block + reduced)
    after_block = sizes.stream + gathered + ahead + of_head + reduction(block)
    yield Moment("reduce", before, sizes.saved_after_block, after_block)
    if splits_root:  # the embedding is gathered ahead, and copied, during the backward of the first block
        yield Moment("embedding", at_end - 4 * last * sums, 0, reduction(block) + current + 2 * element * last)
    gathered = element * last
    if sharding is Sharding.OPTIMIZER and not sizes.is_single:
        gathered = element * sum(units.values())  # in all micro-batches but the last
    # Shards that HSDP has reduced within the shard group are held until the end of the backward.
    within = shards * (bool(cell.replicate) and sync is Sync.EAGER and not sizes.is_single)
    gradients = element * sizes.table * (3 if sizes.tied else last // sizes.table)
    yield Moment("embedding", at_end - 4 * last * sums, 0, gradients + gathered + sizes.stream + reduced + within)
    at_end = shards - 4 * last // ranks if sums else at_end
    yield Moment("reduce", at_end, 0, reduction(last) + 4 * last * sums + within)
    yield sizes.step(shards, held["optimizer_state"])


def _zero2(sizes: TensorSizes, held: Mapping[str, int]) -> Iterator[Moment]:
    """Whole flat parameters, a partition of masters and gradients, and buckets from which gradients are reduced.

    In fp32 the gradients are those of all parameters that overlap the partition, whole; a backward collects new ones
    and adds them at its end (deepspeed/runtime/zero/stage_1_and_2.py). A table, larger than a bucket, is reduced alone.
    """
    cell, layout, element, table = sizes.cell, sizes.layout, sizes.element, sizes.element * sizes.table
    options, ranks = zero.options_of(sizes.backend, cell, layout), cell.world_size
    is_deferred = sizes.backend.sync is Sync.DEFERRED
    partition = zero.flat(layout, ranks) // ranks
    overlap = max(zero.overlapping(layout, ranks, rank) for rank in {0, min(1, ranks - 1), ranks - 1})
    kept = 4 * (partition if sizes.is_bf16 else overlap)
    sums = held["gradients"] if is_deferred else kept
    before = 0 if sizes.is_single else sums
    bucket = options.reduce_bucket_size
    buckets = element * bucket * (2 if options.overlap_comm else 1)
    filled = min(bucket, layout.num_parameters)
    piece = min(sizes.table, -(-bucket // partition) * partition)  # of a table, reduced at once
    casts = 4 * sizes.is_bf16
    alone = table + casts * piece + element * piece * (piece < sizes.table)
    yield Moment("loss", before, sizes.saved, sizes.loss)
    yield Moment("head", before, sizes.saved, sizes.head)
    if is_deferred:
        of_head = table * (sizes.tied or sizes.is_single)
        yield Moment("block", before, sizes.saved_at(0), sizes.mlp + of_head)
        yield Moment("embedding", sums - table * sizes.is_single, 0, (3 if sizes.tied else 1) * table)
        yield Moment("flush", sums, 0, buckets + 4 * overlap + alone - table)
    else:
        during = kept if sizes.is_bf16 else before
        of_head = table * sizes.tied
        # The last rank has new gradients of its own from the start; the fullest has little but the table, reduced last.
        last = 0 if sizes.is_bf16 else 4 * zero.overlapping(layout, ranks, ranks - 1)
        early = max(0, last + (0 if sizes.is_single else last - kept))
        if not sizes.tied:
            yield Moment("head", during, sizes.saved, alone + buckets + early + sizes.stream)
        yield Moment("block", during, sizes.saved_at(0), sizes.mlp + buckets + early + of_head)
        flat = filled * (casts + element * (ranks > 1)) + element * sizes.mlp_weight
        reduction = sizes.stream + buckets + early + of_head + flat
        is_last = bucket >= layout.num_parameters  # everything is reduced at the end of the backward
        yield Moment("reduce", during, 0 if is_last else sizes.saved_after_block, reduction)
        added = 0 if sizes.is_bf16 or 2 * partition <= sizes.table else kept
        yield Moment("embedding", during, 0, buckets + added + (3 if sizes.tied else 1) * table)
    yield Moment("step", kept, 0, 0 if sizes.is_bf16 else 4 * partition)
    yield sizes.step(4 * partition, held["optimizer_state"])


def _zero3(sizes: TensorSizes, held: Mapping[str, int]) -> Iterator[Moment]:
    """Partitions of everything and a bucket are held; so many parameters are gathered as may be, and a table.

    deepspeed/runtime/zero/stage3.py.
    """
    layout, table = sizes.layout, sizes.element * sizes.table
    has_several = sizes.cell.world_size > 1
    is_deferred = sizes.backend.sync is Sync.DEFERRED
    whole = 4 * layout.num_parameters * is_deferred
    sums, partitions = held["gradients"], held["gradients"] - whole
    before = partitions if sizes.is_single else sums
    options = zero.options_of(sizes.backend, sizes.cell, layout)
    live = min(layout.num_parameters, options.stage3_max_live_parameters)
    gathered = sizes.element * live * has_several
    resident = gathered * sizes.backend.own_defaults  # from forward to backward
    reduced_table = table + 4 * sizes.table * sizes.is_bf16
    of_head = table * (sizes.tied or (is_deferred and sizes.is_single))
    yield Moment("loss", before, sizes.saved, sizes.loss + resident)
    yield Moment("head", before, sizes.saved, sizes.head + (resident or table * has_several))
    yield Moment("block", before, sizes.saved_at(0), sizes.mlp + of_head + gathered)
    end = sums - table * (is_deferred and sizes.is_single)
    yield Moment("embedding", end, 0, (3 if sizes.tied else 1) * table + table * has_several)
    if is_deferred:
        yield Moment("flush", sums, 0, held["communication"])
    else:
        if not sizes.tied:
            yield Moment("head", before, sizes.saved, reduced_table + sizes.stream + gathered)
        filled = min(held["communication"], 4 * layout.num_parameters)
        reduction = sizes.stream + of_head + gathered + filled
        yield Moment("reduce", before, sizes.saved_after_block, reduction)
    yield sizes.step(partitions, held["optimizer_state"], flat=partitions)
