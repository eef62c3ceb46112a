"""A rank's memory at its peak, by category: what is held exactly, and a model of what comes and goes beside it.

Held bytes (parameters, gradients, optimizer state, buffers of communication) are those of ``bench.analysis.formulas``.
The rest is estimated at these moments of a window's later micro-batches, and the peak is the largest of their sums:

- ``loss``: the backward of the cross-entropy; activations of all blocks, and in fp32 three tensors of tokens x
  vocabulary: the log-softmax that was saved, the gradient of nll_loss, and that of the logits;
- ``head``: the backward of the head and the last norm, with the gradients of the logits and of the head's weight;
- ``block``: the backward of the last block's MLP; activations of all blocks, and what is gathered;
- ``next``: the same of the block before it, while the last block's gradients are still on their way;
- ``reduce``: the end of that block's backward, with all its gradients;
- ``send``: the last block's backward is over, and its gradients are copied into what is sent;
- ``root``: the end of the backward, when the gradients of embedding and head are reduced; no activations;
- ``step``: the optimizer's step; AdamW's ``foreach`` makes the root of the second moment of all its parameters at once
  (torch/optim/adamw.py:_multi_tensor_adam, ``exp_avg_sq_sqrt``): 4 bytes per parameter of the rank.

Activations are counted as Korthikanti et al. do (arXiv:2205.05198, section 4): every tensor that autograd saves for
the backward, nothing recomputed; but for a Llama block in transformers (modeling_llama.py), see ``activations``.
The moments and what each holds were settled on peaks of the tracked tensors that the memory pass measured on the CPU:
the tiny model, N = 1 to 3, W = 2 and 4, fp32 and bf16, all backends. There the estimate is off by ACCURACY. At the
scale of the larger models, and on CUDA, it has not been checked.
Not counted: the CUDA context, the allocator's rounding and fragmentation, and what libraries allocate (cuBLAS, NCCL).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.analysis.formulas import zero_settings
from bench.analysis.formulas.core import ceil_to
from bench.backends.base import BF16_PARAMETERS, Backend
from bench.backends.deepspeed import DeepSpeedZero2Eager
from bench.backends.lightning import LightningDeepSpeedZero2
from bench.cell import Cell, Precision, Sharding, Sync
from bench.workload.shapes import ROOT, Layout
from bench.workload.sizes import SIZES, LlamaSize

ACCURACY = "0.6 % in the median and 7 % at most"
"""Of the peak, in 128 cells."""
HELD = ("parameters", "gradients", "optimizer_state")
"""Categories that the formulas give exactly, but for gradients while the first or last micro-batch replaces them."""
ESTIMATED = ("parameters_transient", "gradients_transient", "communication", "activations", "temporaries")
"""Categories that are a model: parameters gathered or cast for computing beside the held ones, gradients of one
micro-batch that are not yet added or reduced; buffers of collectives, beside those that the formulas give; what
autograd saves for the backward; and the work space of loss, backward and optimizer."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """A rank's memory at its peak."""

    moment: str
    """One of those of the module's docstring."""
    parts: dict[str, int]
    """Bytes by category of HELD and ESTIMATED, at that moment."""

    @property
    def peak(self) -> int:
        """Their sum in bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one micro-batch on one rank."""

    block: int
    """Saved by one block."""
    head: int
    """Saved after the blocks, but for the log-softmax."""
    log_softmax: int
    """Its output, in fp32."""
    work: int
    """Made by the backward of a block's MLP at most, less what it has freed by then: gradients of the gate and of the
    other branch, and of the residual."""
    norm: int
    """Made by the backward of the last norm: four fp32 tensors of tokens x hidden."""


def activations(size: LlamaSize, tokens: int, precision: Precision, *, autocast: bool) -> Activations:
    """What autograd saves, in bytes; h hidden, q = heads x head size, k likewise of the key heads, i the MLP's width.

    Per token and block: two norms, each with its input (fp32), what it normalized and what it returns, 6h in all;
    queries, keys, values and the output of attention, 2q + 2k, with one log-sum per head (fp32); the MLP's gate, its
    SiLU, the other branch and their product, 4i; and one root mean square per norm (fp32). Elements have 4 bytes in
    fp32; in bf16 2, but for the norms' inputs (8h) and the scalars. Autocast keeps both of a norm's tensors in fp32 and
    casts what it returns once for each of the five matrix products that read it: 16h + 10h bytes. Attention is a fused
    kernel; the math kernel would keep the scores too.
    """
    h, q, k = size.hidden_size, size.num_heads * size.head_size, size.num_kv_heads * size.head_size
    i, scalars = size.intermediate_size, 4 * (size.num_heads + 2)
    element = 4 if precision is Precision.FP32 else 2
    norms, head = 6 * h * element, 3 * h * element + 4
    if precision is Precision.BF16:
        norms, head = (26 * h, 10 * h + 4) if autocast else (16 * h, 8 * h + 4)
    return Activations(
        block=tokens * (norms + element * (2 * q + 2 * k + 4 * i) + scalars),
        head=tokens * head,
        log_softmax=tokens * 4 * size.vocab_size,
        work=tokens * (2 * i + h) * element,
        norm=tokens * 4 * h * 4,
    )


def footprint(
    cell: Cell,
    layout: Layout,
    backend: type[Backend],
    held: Mapping[str, int],
    activation_bytes: int | None = None,
) -> Footprint:
    """The peak of a rank, by category: ``held`` by the formulas, and what comes and goes.

    ``activation_bytes`` replaces the estimate of what autograd saves.
    """
    size = SIZES[cell.model]
    autocast = cell.precision is Precision.BF16 and backend.bf16_as != BF16_PARAMETERS
    tokens = cell.micro_batch_size * cell.sequence_length
    saved = activations(size, tokens, cell.precision, autocast=autocast)
    blocks = size.num_layers * saved.block
    before_loss = blocks + saved.head
    if activation_bytes is not None:
        blocks = before_loss = activation_bytes
    logits = saved.log_softmax // (1 if cell.precision is Precision.FP32 else 2)
    two_less, one_less = (blocks * max(0, size.num_layers - done) // size.num_layers for done in (2, 1))
    own: dict[str, dict[str, int]] = {
        "loss": {"activations": before_loss, "temporaries": 3 * saved.log_softmax},
        "head": {"activations": before_loss, "temporaries": max(logits, saved.norm)},
        "block": {"activations": blocks, "temporaries": saved.work},
        "next": {"activations": one_less, "temporaries": saved.work},
        "reduce": {"activations": two_less},
        "send": {"activations": one_less},
        "root": {},
        "step": {},
    }
    if cell.optimizer == "adamw-foreach":
        own["step"] = {"temporaries": held["optimizer_state"] // 2}
    found = []
    for moment, more in _transient(cell, layout, backend, autocast=autocast).items():
        parts = dict.fromkeys((*HELD, *ESTIMATED), 0) | dict(held) | own[moment] | more
        found.append(Footprint(moment, parts))
    return max(found, key=lambda one: one.peak)


def _transient(cell: Cell, layout: Layout, backend: type[Backend], *, autocast: bool) -> dict[str, dict[str, int]]:
    """By moment: what comes and goes, and the gradients where they are not the held ones.

    The gradients of a window of one micro-batch begin with its backward and are there, reduced, at its end.
    """
    if issubclass(backend, DeepSpeedZero2Eager | LightningDeepSpeedZero2):
        found = _zero(cell, layout, backend)
    elif backend.sharding is Sharding.NONE:
        found = _ddp(layout, autocast=autocast)
        if cell.accumulate == 1:
            for moment in ("loss", "head", "block"):
                found[moment]["gradients"] = 0
    else:
        found = _fsdp2(cell, layout, backend)
    return found


def _ddp(layout: Layout, *, autocast: bool) -> dict[str, dict[str, int]]:
    """Copies that autocast makes, and new gradients.

    Autocast keeps a bf16 copy of every matrix until the loss is left (torch/amp/autocast_mode.py, its cache), and
    autograd saves it for the backward. A new gradient is whole beside the sum until it is added.
    """
    matrices = {"parameters_transient": 2 * sum(p.numel for p in layout.parameters if len(p.shape) > 1) * autocast}
    return {
        "loss": {**matrices},
        "head": {**matrices, "gradients_transient": 4 * _head(layout)},
        "block": {**matrices, "gradients_transient": 4 * _largest_of_blocks(layout)},
        "root": {"gradients_transient": 4 * _head(layout)},
        "step": {},
    }


def _fsdp2(cell: Cell, layout: Layout, backend: type[Backend]) -> dict[str, dict[str, int]]:
    """Units that are gathered, and their gradients on the way to the reduce-scatter.

    The root stays gathered from forward to the end of backward; of the blocks the current one, and the all-gather's
    output for the next (_fsdp_param_group.py:_backward_prefetch); all, where they are not resharded after forward.

    Gradients of a unit are whole until its post_backward. A reduce-scatter's fp32 input stays until the next unit's
    (_fsdp_param_group.py:reduce_scatter_states), so that it lies beside the next unit's gradients. The head's gradient
    waits for the root's post_backward, the last one. Deferred sync adds to the whole sum, in fp32 at once; in the last
    micro-batch a unit's sum is copied into the reduce-scatter's input, after its parameters are resharded
    (_fsdp_collectives.py:foreach_reduce), and after the last unit there are shards only.
    """
    element = 2 if cell.precision is Precision.BF16 else 4
    world_size, block, head = cell.world_size, layout.block_parameters, _head(layout)
    largest = _largest_of_blocks(layout)
    root = sum(p.numel for p in layout.parameters if p.unit == ROOT)
    shards = 4 * ceil_to(layout.num_parameters, world_size) // world_size
    if backend.sharding is Sharding.PARAMS:
        of_root, of_block, ahead = element * root, element * (root + block), element * block
    else:  # what is held for the window is in the held parameters
        whole = 0 if backend.sharding is Sharding.OPTIMIZER else element * layout.num_parameters
        of_root, of_block, ahead = whole, whole, 0
    summed = backend.sync is Sync.DEFERRED and cell.accumulate > 1
    waiting = 0 if summed and element == 4 else element * head  # fp32 is added to the sum where it is made
    found = {
        "loss": {"parameters_transient": of_root},
        "head": {
            "parameters_transient": of_root,
            "communication": ahead,
            "gradients_transient": element * head,
        },
        "block": {
            "parameters_transient": of_block,
            "communication": ahead,
            "gradients_transient": waiting + element * largest,
        },
        "next": {
            "parameters_transient": of_block,
            "communication": ahead + 4 * block,
            "gradients_transient": waiting + element * largest,
        },
        "reduce": {
            "parameters_transient": of_block,
            "communication": ahead + 4 * block,
            "gradients_transient": waiting + element * block,
        },
        "root": {"gradients": shards, "communication": 4 * (root + block), "gradients_transient": element * root},
        "step": {"gradients": shards},
    }
    if summed:
        del found["next"], found["reduce"]  # the sum of the last block is gone by then
        found["send"] = {
            "parameters_transient": of_root,
            "communication": ahead + 4 * block + 4 * block // world_size,
            "gradients_transient": waiting,
        }
        found["root"]["gradients_transient"] = 4 * root
    if cell.accumulate == 1:
        of_block_shard = 4 * block // world_size
        for moment in found.keys() - {"root", "step"}:
            found[moment]["gradients"] = of_block_shard if moment in ("next", "reduce") else 0
    return found


def _zero(cell: Cell, layout: Layout, backend: type[Backend]) -> dict[str, dict[str, int]]:
    """Buckets, and for stage 3 what is gathered.

    Stage 2 fills a bucket, or two if communication overlaps, in the dtype of the model and copies it to fp32 to send
    it (stage_1_and_2.py:setup_buckets, allreduce_bucket); a parameter larger than a bucket goes alone. In fp32 the
    reduced gradients of a micro-batch are beside the sum, in bf16 they are added at once (``grads_in_partition`` and
    _use_compact_grad_partition_buffer). Stage 3 gathers up to ``stage3_max_live_parameters``, and the head by itself;
    its bucket is held, and cast to send; its step has the gradient twice, as it was summed and as the masters' own.
    Deferred sync fills its buckets after the last backward, when no activations are left.
    """
    stage: int = backend.stage  # type: ignore[attr-defined]
    settings = zero_settings(cell, layout, stage)
    world_size, head, largest = cell.world_size, _head(layout), _largest_of_blocks(layout)
    element = 2 if cell.precision is Precision.BF16 else 4
    shards = 4 * ceil_to(layout.num_parameters, world_size) // world_size
    deferred = backend.sync is Sync.DEFERRED
    held = 4 * settings.reduce_bucket if stage == 3 else 0
    filled = element * settings.reduce_bucket * (2 if settings.overlap else 1) * (stage == 2 and not deferred)
    cast = 0 if deferred else 4 * settings.reduce_bucket * (element == 2 or stage == 3)
    if cast and stage == 2:
        cast += element * settings.reduce_bucket  # flattened before it is cast
    beside = shards if stage == 2 and element == 4 and not deferred and cell.accumulate > 1 else 0
    of_head = {"parameters_transient": element * head if stage == 3 else 0}
    live = {"parameters_transient": element * settings.max_live if stage == 3 else 0}
    alone = 0 if deferred else 4 * head * (element == 2 or stage == 3)
    sums = {"gradients": shards * (1 if stage == 2 else 2)} if deferred or stage == 3 else {}
    at_end = element * settings.reduce_bucket * (stage == 2) if deferred else filled + alone
    found = {
        "loss": {**of_head, "communication": held},
        "head": {**of_head, "communication": held + filled + alone, "gradients_transient": element * head},
        "block": {**live, "communication": held + filled, "gradients_transient": element * largest},
        "send": {**live, "communication": held + filled + cast, "gradients_transient": element * largest + beside},
        "root": {**of_head, "communication": held + at_end, "gradients_transient": element * head + beside},
        "step": {**sums, "communication": held},
    }
    if deferred:
        del found["send"]  # nothing is sent before the last backward is over
    if cell.accumulate == 1 and (deferred or (stage == 2 and element == 4)):
        for moment in ("loss", "head", "block"):  # the others have buffers for the reduced gradients that stay
            found[moment]["gradients"] = shards if stage == 3 else 0
    return found


def _head(layout: Layout) -> int:
    """Elements of the root's largest parameter: the head's, or that of the embedding it shares."""
    return max(p.numel for p in layout.parameters if p.unit == ROOT)


def _largest_of_blocks(layout: Layout) -> int:
    """Elements of the largest parameter of a block."""
    return max(p.numel for p in layout.parameters if p.unit != ROOT)
