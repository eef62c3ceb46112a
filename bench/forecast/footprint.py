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
from functools import cached_property

from bench.backends.base import BF16_PARAMETERS, Backend
from bench.backends.deepspeed import ZeroBackend
from bench.backends.fsdp2 import FSDP2Backend
from bench.backends.lightning import LightningBackend
from bench.backends.plain import DDPBackend
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

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.temporaries


def declined(cell: Cell, backend: type[Backend]) -> str:
    """Why the memory of such a cell is not predicted; empty if it is."""
    if cell.compiled:
        return "the compiler decides what compiled blocks save and need"
    if not issubclass(backend, ZeroBackend) or not cell.activation_checkpointing:
        return ""
    if backend.stage == 3 and backend.own_defaults:
        return "there is no formula for what ZeRO-3 gathers during recomputation"
    return ""


def footprint(cell: Cell, layout: Layout, backend: type[Backend], held: Mapping[str, int]) -> Footprint:
    """The memory of the fullest rank at its peak; ``held``: bytes by category as in ``Expectation.held``."""
    sizes = TensorSizes(cell, layout, backend)
    if issubclass(backend, ZeroBackend):
        moments = _zero2(sizes, backend, held) if backend.stage == 2 else _zero3(sizes, backend, held)
    elif issubclass(backend, FSDP2Backend):
        moments = _fsdp2(sizes, backend, held)
    else:
        moments = _replicated(sizes, held)
    fixed = dict(held)
    if backend.sharding is Sharding.OPTIMIZER:
        fixed["parameters"] = 4 * sizes.shard(layout)  # the rest is gathered, and freed by the last backward
    at = max(moments, key=lambda moment: moment.total)
    changing = {"gradients": at.gradients, "activations": at.activations, "temporaries": at.temporaries}
    return Footprint(at.name, fixed | changing)


class TensorSizes:
    """Sizes of the tensors of a window: of activations and work space in bytes, of weights in elements."""

    def __init__(self, cell: Cell, layout: Layout, backend: type[Backend]) -> None:
        self.cell = cell
        self.layout = layout
        self.backend = backend
        self.model = SIZES[cell.model]
        self.tokens = cell.micro_batch_size * cell.sequence_length
        self.tied = self.model.tied
        self.num_blocks = self.model.num_layers
        self.is_bf16 = cell.precision is Precision.BF16
        self.autocast = self.is_bf16 and backend.bf16_as != BF16_PARAMETERS
        self.element = 2 if self.is_bf16 else 4
        """Bytes of an element that is computed with."""
        self.is_single = cell.accumulate == 1
        """Whether the window has one micro-batch, so that no gradients are held before its backward."""
        self.zeroes_late = self.is_single and issubclass(backend, LightningBackend)
        """Whether the gradients of the window before are freed after the first forward, as Lightning's Trainer does."""

    @cached_property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.model.num_heads * self.model.head_size

    @cached_property
    def key(self) -> int:
        """Width of all key heads, and of all value heads, as attention takes them."""
        if self.cell.device is Device.CUDA and not self.is_bf16:
            return self.query  # they are repeated for each query head (bench/workload/llama.py:attend)
        return self.model.num_kv_heads * self.model.head_size

    @cached_property
    def residual_element(self) -> int:
        """Bytes of an element of the residual stream: autocast keeps it and the norms in fp32."""
        return 4 if self.autocast else self.element

    @cached_property
    def stream(self) -> int:
        """The residual stream, or its gradient."""
        return self.tokens * self.residual_element * self.model.hidden_size

    @cached_property
    def norm(self) -> int:
        """What a norm saves: its input in fp32, a scalar per token, and what it normalized."""
        return self.tokens * (4 * self.model.hidden_size + 4) + self.stream

    @cached_property
    def inner(self) -> int:
        """One of the inner activations of an MLP."""
        return self.tokens * self.element * self.model.intermediate_size

    @cached_property
    def mlp(self) -> int:
        """Three gradients in the backward of an MLP, less the saved tensor that is freed by then."""
        return self.stream + 2 * self.inner

    @cached_property
    def block(self) -> int:
        """What a block saves."""
        num_casts = 5 if self.autocast else 2  # what two norms return; autocast copies it for each product with it
        casts = num_casts * self.tokens * self.element * self.model.hidden_size
        attention = self.tokens * (self.element * 2 * (self.query + self.key) + 4 * self.model.num_heads)
        return 2 * self.norm + casts + attention + 4 * self.inner

    @cached_property
    def kept(self) -> int:
        """What is left of a block after its forward."""
        kept = self.stream if self.cell.activation_checkpointing else self.block
        if self.cell.selective_checkpointing:  # the results of attention, and of every second of the seven products
            width = 2 * self.query + self.key + self.model.intermediate_size + self.model.hidden_size
            kept += self.tokens * (self.element * width + 4 * self.model.num_heads)
        return kept

    @cached_property
    def outside(self) -> int:
        """What is saved outside the blocks: the last norm and its result, targets, rotary angles."""
        last_norm = self.norm + self.tokens * self.element * self.model.hidden_size
        angles = 2 * self.cell.sequence_length * self.model.head_size * self.residual_element
        return last_norm + 8 * self.tokens + angles

    @cached_property
    def saved(self) -> int:
        """All that is saved after a forward."""
        return self.num_blocks * self.kept + self.outside

    @cached_property
    def saved_after_block(self) -> int:
        """The same without one block."""
        return self.saved - self.kept

    def saved_at(self, passed: int) -> int:
        """Activations during the backward of a block, after that of so many others."""
        return self.saved - passed * self.kept + self.block - self.kept

    @cached_property
    def logits(self) -> int:
        """Elements of tokens x vocabulary."""
        return self.tokens * self.model.vocab_size

    @cached_property
    def log_softmax(self) -> int:
        """The logits, also in fp32, and their log-softmax."""
        return (10 if self.is_bf16 else 8) * self.logits

    @cached_property
    def loss(self) -> int:
        return 12 * self.logits

    @cached_property
    def table(self) -> int:
        """Elements of the embedding and of the head."""
        return self.model.vocab_size * self.model.hidden_size

    @cached_property
    def num_table_gradients(self) -> int:
        """Gradients of tables at the end of a backward; a tied head's is added to the embedding's, into a third."""
        return 3 if self.tied else 1

    @cached_property
    def head(self) -> int:
        """The gradients of logits, head weight and residual stream."""
        return self.element * (self.logits + self.table) + self.stream

    @cached_property
    def mlp_weight(self) -> int:
        return self.model.hidden_size * self.model.intermediate_size

    @cached_property
    def cast_blocks(self) -> int:
        """Copies of the blocks' weights that autocast makes and autograd saves."""
        if not self.autocast:
            return 0
        return 2 * self.num_blocks * (self.model.num_block_parameters - 2 * self.model.hidden_size)

    @cached_property
    def cast_head(self) -> int:
        """The same of the head."""
        return 2 * self.table if self.autocast else 0

    def step(self, gradients: int, state: int, flat: int = 0) -> Moment:
        """``foreach`` takes the root of all second moments at once (torch/optim/adam.py:_multi_tensor_adam)."""
        roots = state // 2 if self.cell.optimizer == "adamw-foreach" else 0
        return Moment("step", gradients, 0, flat + roots)

    def shard(self, layout: Layout) -> int:
        """Elements of a rank's shards in FSDP2."""
        ranks = self.cell.group_size(RankGroup.SHARD)
        return formulas.padded(layout.parameters, ranks) // ranks


def _replicated(sizes: TensorSizes, held: Mapping[str, int]) -> Iterator[Moment]:
    """DDP and a single process: parameters and gradients are whole, and autocast casts the weights."""
    whole, table = 4 * sizes.layout.num_parameters, 4 * sizes.table
    # DDP's buckets, of which reduced gradients are views, and the sums of a deferred reduction beside them.
    has_views = issubclass(sizes.backend, DDPBackend) and sizes.backend.bucket_views
    before = held["gradients"]
    if sizes.is_single:
        before = whole if has_views else 0
    of_head = table if sizes.tied or (sizes.is_single and not has_views) else 0
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
    end = before
    if not has_views:
        end = whole - table if sizes.is_single else whole
    yield Moment("embedding", end, 0, sizes.num_table_gradients * table + sizes.stream)
    yield sizes.step(whole, held["optimizer_state"])


def _fsdp2(sizes: TensorSizes, backend: type[FSDP2Backend], held: Mapping[str, int]) -> Iterator[Moment]:
    """Units are gathered, and their gradients reduced in fp32 (torch/distributed/fsdp/_fully_shard).

    An all-gather and a reduce-scatter have buffers of their own. In the backward the next unit is gathered ahead, and
    the input of a reduction lives until the next one. The root is gathered from forward to backward, and reduced last.
    """
    cell, element, layout = sizes.cell, sizes.element, formulas.units_of(backend, sizes.layout)
    splits_root = layout is not sizes.layout  # the embedding is a unit of its own, and the head is reduced first
    ranks = cell.group_size(RankGroup.SHARD)
    units = {unit: formulas.padded(parameters, ranks) for unit, parameters in layout.units.items()}
    root, block = units[ROOT], units[1]
    last = units[max(units)] if splits_root else root
    shards = 4 * sizes.shard(layout)
    before = 0 if sizes.is_single else held["gradients"]
    sums = backend.sync is Sync.DEFERRED and not sizes.is_single
    """Whether whole gradients are held, to which those of a micro-batch are added at once."""
    gathered, current, ahead = element * sum(units.values()), 0, 0
    if backend.sharding is Sharding.PARAMS:  # resharded after the forward
        gathered, current = element * root, element * block
        ahead = current if ranks > 1 else 0
    reduced = 0 if sums else 4 * block
    of_head = element * sizes.table if sizes.tied or not sums or sizes.is_bf16 else 0

    def reduction(unit: int) -> int:
        new = 0 if sums else element * unit
        return new + 4 * unit + 4 * unit // ranks

    late = held["gradients"] if sizes.zeroes_late else before
    yield Moment("forward", late, sizes.saved, sizes.log_softmax + gathered)
    yield Moment("loss", before, sizes.saved, sizes.loss + gathered)
    yield Moment("head", before, sizes.saved, sizes.head + gathered + ahead)
    if splits_root:
        yield Moment("reduce", before, sizes.saved, sizes.stream + ahead + reduction(root))
        gathered = of_head = 0
    in_block = gathered + current + ahead + of_head + element * sizes.mlp_weight + sizes.mlp
    of_root = 4 * root if splits_root and not sums else 0
    yield Moment("block", before, sizes.saved_at(0), in_block + of_root)
    yield Moment("block", before, sizes.saved_at(1), in_block + reduced)
    after_block = sizes.stream + gathered + ahead + of_head + reduction(block)
    yield Moment("reduce", before, sizes.saved_after_block, after_block)
    summed_last = 4 * last if sums else 0
    at_end = shards - 4 * last // ranks if sizes.is_single else before
    if splits_root:  # the embedding is gathered ahead, and copied, during the backward of the first block
        yield Moment("embedding", at_end - summed_last, 0, reduction(block) + current + 2 * element * last)
    gathered = element * last
    if backend.sharding is Sharding.OPTIMIZER and not sizes.is_single:
        gathered = element * sum(units.values())  # in all micro-batches but the last
    within = 0
    if cell.replicate and backend.sync is Sync.EAGER and not sizes.is_single:
        within = shards  # which HSDP has reduced within the shard group, until the end of the backward
    num_tables = sizes.num_table_gradients if sizes.tied else last // sizes.table
    in_embedding = element * sizes.table * num_tables + gathered + sizes.stream + reduced + within
    yield Moment("embedding", at_end - summed_last, 0, in_embedding)
    at_end = shards - 4 * last // ranks if sums else at_end
    yield Moment("reduce", at_end, 0, reduction(last) + summed_last + within)
    yield sizes.step(shards, held["optimizer_state"])


def _zero2(sizes: TensorSizes, backend: type[ZeroBackend], held: Mapping[str, int]) -> Iterator[Moment]:
    """Whole flat parameters, a partition of masters and gradients, and buckets from which gradients are reduced.

    In fp32 the gradients are those of all parameters that overlap the partition, whole; a backward collects new ones
    and adds them at its end (deepspeed/runtime/zero/stage_1_and_2.py). A table, larger than a bucket, is reduced alone.
    """
    cell, layout, element, table = sizes.cell, sizes.layout, sizes.element, sizes.element * sizes.table
    options, ranks = zero.options_of(backend, cell, layout), cell.world_size
    is_deferred = backend.sync is Sync.DEFERRED
    partition = zero.flat(layout, ranks) // ranks
    overlap = max(zero.overlapping(layout, ranks, rank) for rank in {0, min(1, ranks - 1), ranks - 1})
    kept = 4 * (partition if sizes.is_bf16 else overlap)
    sums = held["gradients"] if is_deferred else kept
    before = 0 if sizes.is_single else sums
    bucket = options["reduce_bucket_size"]
    buckets = element * bucket * (2 if options["overlap_comm"] else 1)
    piece = min(sizes.table, -(-bucket // partition) * partition)  # of a table, reduced at once
    casts = 4 if sizes.is_bf16 else 0
    alone = table + casts * piece
    if piece < sizes.table:
        alone += element * piece
    yield Moment("loss", before, sizes.saved, sizes.loss)
    yield Moment("head", before, sizes.saved, sizes.head)
    if is_deferred:
        of_head = table if sizes.tied or sizes.is_single else 0
        yield Moment("block", before, sizes.saved_at(0), sizes.mlp + of_head)
        end = sums - table if sizes.is_single else sums
        yield Moment("embedding", end, 0, sizes.num_table_gradients * table)
        yield Moment("flush", sums, 0, buckets + 4 * overlap + alone - table)
    else:
        during = kept if sizes.is_bf16 else before
        of_head = table if sizes.tied else 0
        # The last rank has new gradients of its own from the start; the fullest has little but the table, reduced last.
        last = 0 if sizes.is_bf16 else 4 * zero.overlapping(layout, ranks, ranks - 1)
        early = last if sizes.is_single else max(0, 2 * last - kept)
        if not sizes.tied:
            yield Moment("head", during, sizes.saved, alone + buckets + early + sizes.stream)
        yield Moment("block", during, sizes.saved_at(0), sizes.mlp + buckets + early + of_head)
        copies = casts + element if ranks > 1 else casts
        flat = min(bucket, layout.num_parameters) * copies + element * sizes.mlp_weight
        reduction = sizes.stream + buckets + early + of_head + flat
        is_last = bucket >= layout.num_parameters  # everything is reduced at the end of the backward
        yield Moment("reduce", during, 0 if is_last else sizes.saved_after_block, reduction)
        added = 0 if sizes.is_bf16 or 2 * partition <= sizes.table else kept
        yield Moment("embedding", during, 0, buckets + added + sizes.num_table_gradients * table)
    yield Moment("step", kept, 0, 0 if sizes.is_bf16 else 4 * partition)
    yield sizes.step(4 * partition, held["optimizer_state"])


def _zero3(sizes: TensorSizes, backend: type[ZeroBackend], held: Mapping[str, int]) -> Iterator[Moment]:
    """Partitions of everything and a bucket are held; so many parameters are gathered as may be, and a table.

    deepspeed/runtime/zero/stage3.py.
    """
    layout, table = sizes.layout, sizes.element * sizes.table
    is_deferred = backend.sync is Sync.DEFERRED
    whole = 4 * layout.num_parameters
    sums = held["gradients"]
    partitions = sums - whole if is_deferred else sums
    before = partitions if sizes.is_single else sums
    options = zero.options_of(backend, sizes.cell, layout)
    gathered = gathered_table = 0
    if sizes.cell.world_size > 1:
        gathered = sizes.element * min(layout.num_parameters, options["stage3_max_live_parameters"])
        gathered_table = table
    resident = gathered if backend.own_defaults else 0  # from forward to backward
    of_head = table if sizes.tied or (is_deferred and sizes.is_single) else 0
    yield Moment("loss", before, sizes.saved, sizes.loss + resident)
    in_head = resident if backend.own_defaults else gathered_table
    yield Moment("head", before, sizes.saved, sizes.head + in_head)
    yield Moment("block", before, sizes.saved_at(0), sizes.mlp + of_head + gathered)
    end = sums - table if is_deferred and sizes.is_single else sums
    yield Moment("embedding", end, 0, sizes.num_table_gradients * table + gathered_table)
    if is_deferred:
        yield Moment("flush", sums, 0, held["communication"])
    else:
        if not sizes.tied:
            reduced_table = table + 4 * sizes.table if sizes.is_bf16 else table
            yield Moment("head", before, sizes.saved, reduced_table + sizes.stream + gathered)
        filled = min(held["communication"], whole)
        yield Moment("reduce", before, sizes.saved_after_block, sizes.stream + of_head + gathered + filled)
    yield sizes.step(partitions, held["optimizer_state"], flat=partitions)
