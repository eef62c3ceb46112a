"""A rank's memory at its peak, by category, in closed form.

Parameters, gradients, optimizer state and buffers that are held have exact formulas
(``bench.judge.formulas``). At each moment that can have the peak, what autograd has saved and what
lives only for that moment is added. The largest sum is the peak. Nothing is fitted. The moments
are:

- ``gather``: FSDP2's forward gathers the first block, before the root's buffer is freed;
- ``forward``: its end, with the logits and the log-softmax;
- ``loss``: all activations, and three fp32 tensors of tokens x vocabulary (the log-softmax and two
  gradients);
- ``head``: the backward of the output head: the gradients of its output and of its weight;
- ``block``: the backward of the last blocks, whose MLP has three gradients as large as its inner
  activations;
- ``reduce``: a unit's gradients are reduced; ``flush``: deferred gradients are reduced after the
  backward;
- ``embedding``: the end of the backward, where a tied head's gradient is added to the embedding's;
- ``step``: the optimizer's step.

Activations are all tensors that autograd saves for the backward (Korthikanti et al.,
arXiv:2205.05198, section 4) in a Llama block of transformers with fused attention. With h = hidden
size, q = heads x head size, k = the same for the key-value heads and i = the MLP's width, a block
saves per token: two norms, each with its input in fp32 (h), what it normalized (h) and what it
returns (h); queries, keys, values and the output of attention (2q + 2k); the MLP's gate, its SiLU,
the other branch and their product (4i); and one fp32 scalar per head and per norm. With activation
checkpointing a block keeps only its input, and saves the rest during its own backward; selectively,
it also keeps what ``bench.backends.blocks`` names.

With LoRA a frozen matrix saves no input of its own, and a frozen norm not what it normalized
(``bench.forecast.lora``). The first block's input needs no gradient then, so that its first norm
saves nothing, and neither does dropout of what that returns.

Short-lived and smaller tensors are left out, and so are the CUDA context, the allocator's rounding
and fragments, what libraries allocate (cuBLAS, NCCL), and the tokens of all windows, which the
bench itself holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from bench.backends.base import BF16_PARAMETERS, Backend, Offloading
from bench.backends.deepspeed import ZeroBackend
from bench.backends.fsdp2 import FSDP2Backend
from bench.backends.lightning import LightningBackend
from bench.backends.plain import DDPBackend
from bench.forecast.lora import HEAD, OF_NORMS, LoRA
from bench.judge import formulas, zero
from bench.judge.offload import USES
from bench.plan.categories import COPIED_TO_DEVICE, COPIED_TO_HOST, HELD, ON_HOST, PINNED
from bench.plan.cell import Cell, Device, Precision, RankGroup, Sharding, Sync
from bench.plan.models import LlamaSize, shape_of
from bench.workload.layout import ROOT, Layout


@dataclass(frozen=True, slots=True)
class Footprint:
    """A rank's memory at its peak."""

    moment: str
    """See the docstring of the module."""
    parts: dict[str, int]
    """Bytes by category: those of ``Expectation.held``, ``activations``, and ``temporaries`` for
    everything else."""

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
    """Gathered and cast parameters, gradients of one micro-batch, buffers of collectives, work
    space."""

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.temporaries


def declined(
    cell: Cell,
    backend: type[Backend],
    *,
    bf16_parameters: bool = False,
    lora: LoRA | None = None,
) -> str:
    """Why the memory of such a cell is not predicted; empty if it is."""
    reason = ""
    if lora is not None:
        reason = _declined_lora(cell, backend, lora)
    if bf16_parameters and not reason:
        reason = _declined_bf16(backend)
    if reason:
        return reason
    if cell.selective_checkpointing and model_of(cell).num_experts:
        return "there is no formula for what selective checkpointing keeps of experts"
    if cell.compiled:
        return "the compiler decides what compiled blocks save and need"
    if not issubclass(backend, ZeroBackend) or not cell.activation_checkpointing:
        return ""
    if backend.stage == 3 and backend.own_defaults:
        return "there is no formula for what ZeRO-3 gathers during recomputation"
    return ""


def _declined_bf16(backend: type[Backend]) -> str:
    """Why the memory of bf16 parameters is not predicted; empty if it is."""
    if not issubclass(backend, DDPBackend | FSDP2Backend):
        return "it keeps fp32 masters of bf16 parameters"
    if issubclass(backend, Offloading):
        return "there is no formula for bf16 parameters that are offloaded"
    return ""


def _declined_lora(cell: Cell, backend: type[Backend], lora: LoRA) -> str:
    """Why the memory of LoRA is not predicted; empty if it is."""
    if model_of(cell).num_experts:
        return "there is no formula for what frozen experts save"
    if cell.selective_checkpointing:
        return "there is no formula for what selective checkpointing keeps beside frozen weights"
    if not issubclass(backend, DDPBackend | FSDP2Backend) or issubclass(backend, Offloading):
        return "there is no formula for its frozen weights"
    if lora.fp32 and not issubclass(backend, DDPBackend):
        return "there is no formula for fp32 and bf16 weights in one unit"
    if issubclass(backend, FSDP2Backend) and backend.splits_root:
        return "there is no formula for its frozen weights"
    return ""


def model_of(cell: Cell) -> LlamaSize:
    """The shape of the cell's model, which must be known."""
    found = shape_of(cell.model)
    assert found is not None, "callers ask for none that is unknown"
    return found


def footprint(
    cell: Cell,
    layout: Layout,
    backend: type[Backend],
    held: Mapping[str, int],
    *,
    bf16_parameters: bool = False,
    lora: LoRA | None = None,
) -> Footprint:
    """The memory of the fullest rank at its peak; ``held``: bytes as in ``Expectation.held``.

    With ``bf16_parameters`` there are no fp32 masters: parameters, gradients and moments are bf16.
    With ``lora`` the layout is that of the frozen weights.
    """
    sizes = TensorSizes(cell, layout, backend, bf16_parameters=bf16_parameters, lora=lora)
    if issubclass(backend, ZeroBackend) and backend.stage == 2:
        moments = _zero2(sizes, backend, held)
    elif issubclass(backend, ZeroBackend):
        moments = _zero3(sizes, backend, held)
    elif issubclass(backend, FSDP2Backend):
        moments = _fsdp2(sizes, backend, held)
    else:
        moments = _replicated(sizes, held)
    fixed = dict(held)
    if backend.sharding is Sharding.OPTIMIZER:
        # The rest is gathered, and freed by the last backward.
        fixed["parameters"] = sizes.master * sizes.shard(sizes.layout)
    at = max(moments, key=lambda moment: moment.total)
    changing = {
        "gradients": at.gradients,
        "activations": at.activations,
        "temporaries": at.temporaries,
    }
    return Footprint(at.name, fixed | changing)


class TensorSizes:
    """Sizes of a window's tensors: activations and work space in bytes, weights in elements."""

    def __init__(
        self,
        cell: Cell,
        layout: Layout,
        backend: type[Backend],
        *,
        bf16_parameters: bool = False,
        lora: LoRA | None = None,
    ) -> None:
        self.cell = cell
        self.lora = lora
        self.layout = self.trained = layout
        """All parameters, and those that are trained."""
        if lora is not None:
            self.layout, self.trained = lora.whole(layout), lora.trained(layout)
        self.backend = backend
        self.model = model_of(cell)
        self.tokens = cell.micro_batch_size * cell.sequence_length
        self.tied = self.model.tied
        self.num_blocks = self.model.num_layers
        self.is_bf16 = cell.precision is Precision.BF16
        self.autocast = self.is_bf16 and backend.bf16_as != BF16_PARAMETERS and not bf16_parameters
        self.master = 4
        """Bytes of an element of what is held, and of reduced gradients."""
        if bf16_parameters:
            self.master = 2
        self.element = 4
        """Bytes of an element that is computed with."""
        if self.is_bf16:
            self.element = 2
        self.trained_master, self.low_element = self.master, self.element
        """Bytes of an element of what is trained, and of what LoRA's matrices read and return."""
        if lora is not None and lora.fp32:
            self.trained_master = self.low_element = 4
        self.offloads = issubclass(backend, Offloading) and cell.device is Device.CUDA
        """Whether shards rest in other memory than the device's, to which they are copied."""
        self.is_single = cell.accumulate == 1
        """Whether the window has one micro-batch, so that no gradients are held before its
        backward."""
        self.zeroes_late = self.is_single and issubclass(backend, LightningBackend)
        """Whether the gradients of the window before are freed after the first forward, as by
        Lightning's Trainer."""

    def before(self, gradients: int) -> int:
        """Of the gradients that are held between micro-batches, those before the last backward."""
        if self.is_single:
            return 0
        return gradients

    @cached_property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.model.num_heads * self.model.head_size

    @cached_property
    def key(self) -> int:
        """Width of all key heads, and of all value heads, as attention takes them."""
        if self.cell.device is Device.CUDA and not self.is_bf16:
            # They are repeated for each query head (bench/workload/llama.py:attend).
            return self.query
        return self.model.num_kv_heads * self.model.head_size

    @cached_property
    def residual_element(self) -> int:
        """Bytes of an element of the residual stream: autocast keeps it and the norms in fp32."""
        if self.autocast:
            return 4
        return self.element

    @cached_property
    def stream(self) -> int:
        """The residual stream, or its gradient."""
        return self.tokens * self.residual_element * self.model.hidden_size

    @cached_property
    def norm(self) -> int:
        """What a norm saves: its input in fp32, a scalar per token, and what it normalized.

        The latter is for the gradient of its weight.
        """
        saved = self.tokens * (4 * self.model.hidden_size + 4)
        if self.lora is None:
            saved += self.stream
        return saved

    @cached_property
    def inner(self) -> int:
        """One of the inner activations of an MLP."""
        return self.tokens * self.element * self.model.intermediate_size

    @cached_property
    def mlp(self) -> int:
        """Three gradients in the backward of an MLP, less the saved tensor that is freed then."""
        num_inner = 2
        if not self.saves_product:
            num_inner = 3
        return self.model.experts_per_token * (self.stream + num_inner * self.inner)

    @property
    def saves_product(self) -> bool:
        """Whether the last matrix of an MLP keeps its input."""
        return self.lora is None or "down_proj" in self.lora.targets

    @cached_property
    def block(self) -> int:
        """What a block saves."""
        num_casts = 2  # what two norms return
        if self.autocast:
            num_casts = 5  # a copy of it for each product that reads it
        if self.lora is not None:
            num_casts = self.lora.num_inputs(each=self.autocast or self.lora.copies_inputs)
        casts = num_casts * self.tokens * self.low_element * self.model.hidden_size
        heads = self.element * 2 * (self.query + self.key) + 4 * self.model.num_heads
        in_heads = self.tokens * heads + self.head_norms
        saved = 2 * self.norm + casts + in_heads + self.mlp_saved
        if self.lora is not None:
            saved += self.low_rank * len(self.lora.in_blocks)
            saved += sum(self.dropped(name) for name in self.lora.in_blocks)
            if self.lora.copies_inputs and "o_proj" in self.lora.targets:
                saved += self.tokens * self.low_element * self.query  # and the output of attention
            if "down_proj" in self.lora.targets:  # a copy instead of the product
                saved += self.inner * self.low_element // self.element - self.inner
        return saved

    @cached_property
    def low_rank(self) -> int:
        """What the first of LoRA's two matrices returns."""
        if self.lora is None:
            return 0
        return self.tokens * self.low_element * self.lora.rank

    def dropped(self, target: str) -> int:
        """What dropout saves beside its result, before a target of LoRA."""
        if self.lora is None or not self.lora.dropout:
            return 0
        width, element = self.model.hidden_size, self.residual_element  # what a norm returns
        if target == "o_proj":
            width, element = self.query, self.element
        elif target == "down_proj":
            width, element = self.model.intermediate_size, self.element
        if self.cell.device is Device.CUDA:
            element = 1
        elif self.lora.fp32:
            element = 4
        return self.tokens * element * width

    @cached_property
    def head_norms(self) -> int:
        """What norms of queries and keys save, where a model has them, as ``norm``."""
        if not self.model.norms_heads:
            return 0
        num_heads = self.model.num_heads + self.model.num_kv_heads
        of_head = 4 * self.model.head_size + 4
        if self.lora is None:
            of_head += self.residual_element * self.model.head_size
        return self.tokens * num_heads * of_head

    @cached_property
    def mlp_saved(self) -> int:
        """What an MLP saves: gate, SiLU, the other branch and their product.

        Experts also save what each is given of the tokens that are sent to it, and what it returns,
        which is weighted; their router saves its logits and their softmax in fp32
        (transformers/integrations/moe.py:grouped_mm_experts_forward).
        """
        if not self.model.num_experts:
            num_inner = 3
            if self.saves_product:
                num_inner = 4
            return num_inner * self.inner
        ends = 2 * self.tokens * self.element * self.model.hidden_size
        router = 8 * self.tokens * self.model.num_experts
        return self.model.experts_per_token * (4 * self.inner + ends) + router

    @cached_property
    def kept(self) -> int:
        """What is left of a block after its forward."""
        if not self.cell.activation_checkpointing:
            return self.block
        if not self.cell.selective_checkpointing:
            return self.stream
        # The results of attention, and of every second of the seven products.
        width = 2 * self.query + self.key + self.model.intermediate_size + self.model.hidden_size
        return self.stream + self.tokens * (self.element * width + 4 * self.model.num_heads)

    @cached_property
    def outside(self) -> int:
        """What is saved outside blocks: the last norm and its result, targets, rotary angles."""
        last_norm = self.norm
        if self.lora is None or HEAD in self.lora.targets:
            last_norm += self.tokens * self.low_element * self.model.hidden_size
        if self.lora is not None and HEAD in self.lora.targets:
            last_norm += self.low_rank + self.dropped(HEAD)
        angles = 2 * self.cell.sequence_length * self.model.head_size * self.residual_element
        return last_norm + 8 * self.tokens + angles

    @cached_property
    def saved(self) -> int:
        """All that is saved after a forward."""
        without_gradient = 0
        if self.lora is not None and not self.cell.activation_checkpointing:
            without_gradient = self.norm
            for name in self.lora.in_blocks:
                if name in OF_NORMS[0]:
                    without_gradient += self.dropped(name)
        return self.num_blocks * self.kept + self.outside - without_gradient

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
        if self.is_bf16:
            return (2 + 4 + 4) * self.logits
        return (4 + 4) * self.logits

    @cached_property
    def loss(self) -> int:
        return 12 * self.logits

    @cached_property
    def table(self) -> int:
        """Elements of the embedding and of the head."""
        return self.model.vocab_size * self.model.hidden_size

    @cached_property
    def trained_table(self) -> int:
        """The same of what has a gradient."""
        if self.lora is not None:
            return 0
        return self.table

    @cached_property
    def num_table_gradients(self) -> int:
        """Gradients of tables at the end of a backward.

        The gradient of a tied head is added to that of the embedding, into a third.
        """
        if self.tied:
            return 3
        return 1

    @cached_property
    def head(self) -> int:
        """The gradients of logits, head weight and residual stream."""
        return self.element * (self.logits + self.trained_table) + self.stream

    @cached_property
    def mlp_weight(self) -> int:
        """Elements of an MLP's largest weight that is trained; experts' first two are one tensor."""
        weight = self.model.hidden_size * self.model.intermediate_size
        if self.lora is not None:
            return self.lora.rank * self.model.intermediate_size
        if self.model.num_experts:
            return 2 * self.model.num_experts * weight
        return weight

    @cached_property
    def cast_blocks(self) -> int:
        """Copies of the blocks' weights that autocast makes and autograd saves."""
        if not self.autocast:
            return 0
        casts = 2 * self.num_blocks * self.model.num_matrix_parameters  # not those of norms
        if self.lora is not None:
            casts += 2 * self.trained.num_parameters
        return casts

    @cached_property
    def cast_head(self) -> int:
        """The same of the head."""
        if not self.autocast:
            return 0
        return 2 * self.table

    def step(self, gradients: int, state: int, flat: int = 0) -> Moment:
        """The optimizer's step.

        ``foreach`` takes the root of all second moments at once
        (torch/optim/adam.py:_multi_tensor_adam).
        """
        roots = 0
        if self.cell.optimizer == "adamw-foreach":
            roots = state // 2
        return Moment("step", gradients, 0, flat + roots)

    def shard(self, layout: Layout) -> int:
        """Elements of a rank's shards in FSDP2."""
        ranks = self.cell.group_size(RankGroup.SHARD)
        return formulas.padded(layout.parameters, ranks) // ranks


def _replicated(sizes: TensorSizes, held: Mapping[str, int]) -> Iterator[Moment]:
    """DDP and a single process: parameters and gradients are whole, and weights are cast."""
    whole = sizes.trained_master * sizes.trained.num_parameters
    table = sizes.master * sizes.trained_table
    before, end, of_head = sizes.before(held["gradients"]), whole, 0
    if issubclass(sizes.backend, DDPBackend) and sizes.backend.bucket_views:
        # Reduced gradients are views of the buckets, and the sums of a deferred reduction are
        # beside them.
        if sizes.is_single:
            before = whole
        end = before
    elif sizes.is_single:
        end, of_head = whole - table, table
    if sizes.tied:
        of_head = table
    casts, head = sizes.cast_blocks + sizes.cast_head, sizes.head
    weight = sizes.trained_master * sizes.mlp_weight
    if sizes.autocast:
        # The gradient of the cast is cast to fp32.
        head = max(head, table + 2 * sizes.trained_table + sizes.stream)
        weight = 6 * sizes.mlp_weight
    late = before
    if sizes.zeroes_late:
        late = whole
    yield Moment("forward", late, sizes.saved, sizes.log_softmax + casts)
    if sizes.cell.activation_checkpointing:
        casts = sizes.cast_blocks // sizes.num_blocks + sizes.cast_head
    yield Moment("loss", before, sizes.saved, sizes.loss + casts)
    yield Moment("head", before, sizes.saved, head + casts)
    # In the backward of the first of three products.
    first_product = (sizes.mlp + sizes.stream) // 2 + weight
    in_block = max(sizes.mlp, first_product) + casts - sizes.cast_head
    yield Moment("block", before, sizes.saved_at(0), in_block + of_head)
    yield Moment("embedding", end, 0, sizes.num_table_gradients * table + sizes.stream)
    yield sizes.step(whole, held["optimizer_state"])


class UnitSizes:
    """The units that FSDP2 shards: padded elements of some of them, and bytes of their buffers."""

    def __init__(self, sizes: TensorSizes, backend: type[FSDP2Backend]) -> None:
        layout = formulas.units_of(backend, sizes.layout)
        self.ranks = sizes.cell.group_size(RankGroup.SHARD)
        padded = self._padded(layout)
        self.element, self.master = sizes.element, sizes.master
        self.root = self.last = padded[ROOT]
        """``last``: the one that is reduced last."""
        self.block = padded[1]
        self.every = sum(padded.values())
        self.splits_root = layout is not sizes.layout
        """Whether the embedding is a unit of its own, and the head, with the norm, is reduced
        first."""
        if self.splits_root:
            self.last = padded[max(padded)]
        self.trained_block, self.trained_last = self.block, self.last
        """Of the block and of the last one, what is trained."""
        trained = layout
        if sizes.lora is not None:
            trained = sizes.trained
            of_units = self._padded(trained)
            self.trained_block, self.trained_last = of_units[1], of_units.get(ROOT, 0)
        self.shards = self.master * sizes.shard(trained)
        """Bytes of a rank's reduced gradients, as large as its parameters."""
        if sizes.offloads:
            self.shards = 0
        self.sums = backend.sync is Sync.DEFERRED and not sizes.is_single
        """Whether whole gradients are held, to which those of a micro-batch are added at once."""
        self.gathered, self.current = self.element * self.every, 0
        """Bytes of parameters that stay gathered in a backward, and of the block's that are freed
        again."""
        if backend.sharding is Sharding.PARAMS:  # resharded after the forward
            self.gathered, self.current = self.element * self.root, self.element * self.block
        self.ahead = 0
        """Bytes that are gathered ahead."""
        if self.ranks > 1:
            self.ahead = self.current

    def _padded(self, layout: Layout) -> dict[int, int]:
        """The padded elements of each unit."""
        found = {}
        for unit, of_unit in layout.units.items():
            found[unit] = formulas.padded(of_unit, self.ranks)
        return found

    def reduction(self, unit: int) -> int:
        """The reduction of a unit: its gradients, unless they are sums already, and two buffers."""
        buffers = self.master * unit + self.master * unit // self.ranks
        if self.sums:
            return buffers
        return self.element * unit + buffers

    @property
    def reduced(self) -> int:
        """The input of the last block's reduction, which lives until the next one."""
        if self.sums:
            return 0
        return self.master * self.trained_block

    @property
    def summed_last(self) -> int:
        """The sums of the last unit."""
        if not self.sums:
            return 0
        return self.master * self.trained_last


def _fsdp2(
    sizes: TensorSizes, backend: type[FSDP2Backend], held: Mapping[str, int]
) -> Iterator[Moment]:
    """Units are gathered, and gradients reduced in fp32 (torch/distributed/fsdp/_fully_shard).

    An all-gather and a reduce-scatter have buffers of their own. In the backward the next unit is
    gathered ahead, and the input of a reduction lives until the next one. The root is gathered from
    forward to backward, and reduced last.
    """
    units = UnitSizes(sizes, backend)
    before = sizes.before(held["gradients"])
    late = before
    if sizes.zeroes_late:
        late = held["gradients"]
    if units.ranks > 1 and not units.splits_root:
        # What is gathered is in a buffer, from which it is copied.
        yield Moment("gather", late, 0, 2 * units.element * (units.root + units.block))
    yield Moment("forward", late, sizes.saved, sizes.log_softmax + units.gathered)
    yield Moment("loss", before, sizes.saved, sizes.loss + units.gathered)
    yield Moment("head", before, sizes.saved, sizes.head + units.gathered + units.ahead)
    yield from _fsdp2_blocks(sizes, units, before)
    yield from _fsdp2_end(sizes, units, backend, before)
    yield sizes.step(units.shards, held["optimizer_state"])


def _fsdp2_blocks(sizes: TensorSizes, units: UnitSizes, before: int) -> Iterator[Moment]:
    """The backwards of the blocks."""
    gathered, of_head, of_root = units.gathered, 0, 0
    is_cast = units.element < units.master
    if sizes.tied or is_cast or not units.sums:
        of_head = units.element * sizes.trained_table
    if units.splits_root:
        in_reduction = sizes.stream + units.ahead + units.reduction(units.root)
        yield Moment("reduce", before, sizes.saved, in_reduction)
        gathered = of_head = 0
        if not units.sums:
            of_root = units.master * units.root
    beside = gathered + units.ahead + of_head
    in_block = beside + units.current + units.element * sizes.mlp_weight + sizes.mlp
    yield Moment("block", before, sizes.saved_at(0), in_block + of_root)
    yield Moment("block", before, sizes.saved_at(1), in_block + units.reduced)
    in_reduction = sizes.stream + beside + units.reduction(units.trained_block)
    yield Moment("reduce", before, sizes.saved_after_block, in_reduction)


def _fsdp2_end(
    sizes: TensorSizes, units: UnitSizes, backend: type[FSDP2Backend], before: int
) -> Iterator[Moment]:
    """The end of the backward: the embedding, and the reduction of the last unit."""
    all_but_last = max(0, units.shards - units.master * units.trained_last // units.ranks)
    at_end = before
    if sizes.is_single:
        at_end = all_but_last
    if units.splits_root:
        # The embedding is gathered ahead, and copied, during the backward of the first block.
        copied = units.reduction(units.block) + units.current + 2 * units.element * units.last
        yield Moment("embedding", at_end - units.summed_last, 0, copied)
    gathered, within = units.element * units.last, 0
    if backend.sharding is Sharding.OPTIMIZER and not sizes.is_single:
        gathered = units.element * units.every  # in all micro-batches but the last
    if sizes.cell.replicate and backend.sync is Sync.EAGER and not sizes.is_single:
        # HSDP has reduced them within the shard group, until the end of the backward.
        within = units.shards
    num_tables = units.last // sizes.table
    if sizes.tied:
        num_tables = sizes.num_table_gradients
    gradients = units.element * sizes.trained_table * num_tables
    in_embedding = gradients + gathered + sizes.stream + units.reduced + within
    yield Moment("embedding", at_end - units.summed_last, 0, in_embedding)
    if units.sums:
        at_end = all_but_last
    reduced = units.reduction(units.trained_last)
    yield Moment("reduce", at_end, 0, reduced + units.summed_last + within)


class Zero2Sizes:
    """Partitions, and buckets for reduction, in bytes unless elements are named."""

    def __init__(
        self, sizes: TensorSizes, backend: type[ZeroBackend], held: Mapping[str, int]
    ) -> None:
        layout, self.ranks = sizes.layout, sizes.cell.world_size
        options = zero.options_of(backend, sizes.cell, layout)
        self.bucket = options.reduce_bucket_size
        """Elements of a bucket."""
        self.buckets = sizes.element * self.bucket
        if options.overlap_comm:
            self.buckets *= 2
        self.partition = zero.flat(layout, self.ranks) // self.ranks
        """Elements of a rank's partition."""
        some = {0, min(1, self.ranks - 1), self.ranks - 1}
        self.overlap = 4 * max(zero.overlapping(layout, self.ranks, rank) for rank in some)
        """The parameters that overlap the fullest rank's partition, in fp32."""
        self.kept, self.cast = self.overlap, 0
        """The gradients that the fullest rank keeps, and what a gradient of one element takes to be
        cast to fp32."""
        if sizes.is_bf16:
            self.kept, self.cast = 4 * self.partition, 4
        self.flat = 4 * self.partition
        """The gradient of the masters, into which those that are kept are copied."""
        self.stepped = self.flat
        """The gradients with which the masters are updated."""
        self.collects = not sizes.is_bf16
        """Whether a backward collects new gradients, and adds them at its end."""
        self.before = sizes.before(self.kept)
        """Of those that are kept, what is there before the last backward."""
        if issubclass(backend, Offloading):
            # A bucket at a time, and into a permanent gradient of the masters.
            self.overlap = self.flat = 0
            self.collects = False
            self.kept = held["gradients"]
            if backend.sync is Sync.DEFERRED:
                self.kept -= 4 * layout.num_parameters
            self.stepped = self.kept
            self.before = sizes.before(self.kept)
            if not sizes.offloads:
                self.before = self.kept
        self.table = sizes.element * sizes.table
        # So much is reduced at once.
        piece = min(sizes.table, -(-self.bucket // self.partition) * self.partition)
        self.alone = self.table + self.cast * piece
        """A table that is reduced alone, since it is larger than a bucket."""
        if piece < sizes.table:
            self.alone += sizes.element * piece


def _zero2(
    sizes: TensorSizes, backend: type[ZeroBackend], held: Mapping[str, int]
) -> Iterator[Moment]:
    """Whole flat parameters, a partition of masters and gradients, and buckets for reduction.

    In fp32 the gradients are those of all parameters that overlap the partition, whole; a backward
    collects new ones and adds them at its end (deepspeed/runtime/zero/stage_1_and_2.py).
    """
    of_stage = Zero2Sizes(sizes, backend, held)
    if backend.sync is Sync.DEFERRED:
        yield from _zero2_deferred(sizes, of_stage, held["gradients"])
    else:
        yield from _zero2_eager(sizes, of_stage)
    flat = of_stage.flat
    if sizes.is_bf16:
        flat = 0
    yield Moment("step", of_stage.kept, 0, flat)
    yield sizes.step(of_stage.stepped, held["optimizer_state"])


def _zero2_deferred(sizes: TensorSizes, of_stage: Zero2Sizes, sums: int) -> Iterator[Moment]:
    """Whole gradients are summed, and reduced after the backward."""
    before, end, of_head = sizes.before(sums), sums, 0
    if sizes.is_single:
        end, of_head = sums - of_stage.table, of_stage.table
    if sizes.tied:
        of_head = of_stage.table
    yield Moment("loss", before, sizes.saved, sizes.loss)
    yield Moment("head", before, sizes.saved, sizes.head)
    yield Moment("block", before, sizes.saved_at(0), sizes.mlp + of_head)
    yield Moment("embedding", end, 0, sizes.num_table_gradients * of_stage.table)
    in_flush = of_stage.buckets + of_stage.overlap + of_stage.alone - of_stage.table
    yield Moment("flush", sums, 0, in_flush)


def _zero2_eager(sizes: TensorSizes, of_stage: Zero2Sizes) -> Iterator[Moment]:
    """Gradients are reduced from buckets during the backward."""
    layout, buckets = sizes.layout, of_stage.buckets
    before = during = of_stage.before
    # The last rank has new gradients of its own from the start; the fullest has little but the
    # table, reduced last.
    early = 4 * zero.overlapping(layout, of_stage.ranks, of_stage.ranks - 1)
    if not sizes.is_single:
        early = max(0, 2 * early - of_stage.kept)
    added, of_head = of_stage.kept, 0
    if 2 * of_stage.partition <= sizes.table:
        added = 0
    if not of_stage.collects:
        during, early, added = of_stage.kept, 0, 0
    if sizes.tied:
        of_head = of_stage.table
    yield Moment("loss", before, sizes.saved, sizes.loss)
    yield Moment("head", before, sizes.saved, sizes.head)
    in_reduction = sizes.stream + buckets + early
    if not sizes.tied:
        yield Moment("head", during, sizes.saved, of_stage.alone + in_reduction)
    yield Moment("block", during, sizes.saved_at(0), sizes.mlp + buckets + early + of_head)
    copied, saved = of_stage.cast, sizes.saved_after_block
    if of_stage.ranks > 1:
        copied += sizes.element
    if of_stage.bucket >= layout.num_parameters:
        saved = 0  # everything is reduced at the end of the backward
    flat = min(of_stage.bucket, layout.num_parameters) * copied + sizes.element * sizes.mlp_weight
    yield Moment("reduce", during, saved, in_reduction + of_head + flat)
    in_embedding = buckets + added + sizes.num_table_gradients * of_stage.table
    yield Moment("embedding", during, 0, in_embedding)


def _zero3(
    sizes: TensorSizes, backend: type[ZeroBackend], held: Mapping[str, int]
) -> Iterator[Moment]:
    """Partitions of everything and a bucket are held; parameters and a table are gathered.

    As many parameters as may be (deepspeed/runtime/zero/stage3.py).
    """
    layout, table = sizes.layout, sizes.element * sizes.table
    whole = 4 * layout.num_parameters
    is_deferred = backend.sync is Sync.DEFERRED
    sums = end = held["gradients"]
    partitions, of_head = sums, 0
    if is_deferred:
        partitions = sums - whole
    if is_deferred and sizes.is_single:
        end, of_head = sums - table, table
    if sizes.tied:
        of_head = table
    before = sums
    if sizes.is_single:
        before = partitions
    options = zero.options_of(backend, sizes.cell, layout)
    gathered = gathered_table = resident = 0
    if sizes.cell.world_size > 1 or sizes.offloads:
        gathered = sizes.element * min(layout.num_parameters, options.stage3_max_live_parameters)
        gathered_table = table
    in_head = gathered_table
    if backend.own_defaults:
        in_head = resident = gathered  # from forward to backward
    yield Moment("loss", before, sizes.saved, sizes.loss + resident)
    yield Moment("head", before, sizes.saved, sizes.head + in_head)
    yield Moment("block", before, sizes.saved_at(0), sizes.mlp + of_head + gathered)
    yield Moment("embedding", end, 0, sizes.num_table_gradients * table + gathered_table)
    if is_deferred:
        yield Moment("flush", sums, 0, held["communication"])
    else:
        if not sizes.tied:
            reduced_table = table
            if sizes.is_bf16:
                reduced_table += 4 * sizes.table
            yield Moment("head", before, sizes.saved, reduced_table + sizes.stream + gathered)
        filled = min(held["communication"], whole)
        yield Moment(
            "reduce", before, sizes.saved_after_block, sizes.stream + of_head + gathered + filled
        )
    flat = _flat_gradient(backend, partitions)
    yield sizes.step(partitions, held["optimizer_state"], flat=flat)


def _flat_gradient(backend: type[ZeroBackend], partitions: int) -> int:
    """Bytes of the masters' gradient if it is made for the step; with offload it is permanent."""
    if issubclass(backend, Offloading):
        return 0
    return partitions


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFootprint:
    """A rank's memory of the host at the update, where a backend offloads from a device; bytes."""

    parts: dict[str, int]
    """By category, as in ``Footprint``."""
    pinned: int
    """Of these, in tensors of pinned memory."""
    to_device: int
    to_host: int
    """Copied in one optimizer step."""

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def host_footprint(
    cell: Cell, layout: Layout, backend: type[Backend], beside: Mapping[str, int]
) -> HostFootprint | None:
    """The memory of the host; None where nothing is offloaded to other memory.

    ``beside`` is as in ``Expectation.beside``.

    At the update the masters' gradient is there under deferred sync too, and ``foreach`` takes the
    root of all second moments at once, as on a device.
    """
    if not beside:
        return None
    parts = {use: beside[f"{ON_HOST}_{HELD}_{use}"] for use in USES}
    pinned = beside[PINNED]
    if issubclass(backend, FSDP2Backend):
        ranks = cell.group_size(RankGroup.SHARD)
        gradients = 4 * formulas.local(layout.parameters, ranks, 0)
        pinned += gradients - parts["gradients"]
        parts["gradients"] = gradients
    parts["temporaries"] = 0
    if cell.optimizer == "adamw-foreach":
        parts["temporaries"] = parts["optimizer_state"] // 2
    return HostFootprint(
        parts=parts,
        pinned=pinned,
        to_device=beside[COPIED_TO_DEVICE],
        to_host=beside[COPIED_TO_HOST],
    )
