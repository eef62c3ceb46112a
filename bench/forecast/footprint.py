"""A rank's memory at its peak, by category: a window is replayed tensor by tensor, without the tensors.

The replay allocates and frees, in order, what the model, autograd and the framework do in up to three micro-batches and
the update, each as its source does it; the peak is the largest sum. Held bytes (parameters, gradients, optimizer state)
are those of ``bench.judge.formulas``. Nothing is fitted. The moments are:

- ``forward``; ``loss``: its forward and backward, with all activations and up to three fp32 tensors of tokens x
  vocabulary: the log-softmax that was saved, the gradient of nll_loss, and that of the logits;
- ``head``: the backward of the head and the last norm; ``block``: the backward of a block;
- ``reduce``: a block's backward is over, and the framework reduces its gradients; ``root``: the same for the rest;
- ``flush``: gradients are reduced after the last backward; ``step``: the optimizer's step.

Activations are counted as by Korthikanti et al. (arXiv:2205.05198, section 4), every tensor that autograd saves for
the backward, for the Llama block of transformers (``replay_decoder``). With activation checkpointing a block keeps its
input (their "full recomputation"), and what it saves is alive during its own backward only. Not counted are the CUDA
context, the allocator's rounding and fragmentation, what libraries allocate (cuBLAS, NCCL), and the tokens of all
windows, which the bench itself holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.backends import accelerate, torchtitan
from bench.backends.base import BF16_PARAMETERS, Backend
from bench.forecast.live import Live, Widths
from bench.forecast.replay_decoder import Decoder
from bench.forecast.replay_frameworks import DDP, FSDP2, CarvedFSDP2, Framework, Whole
from bench.forecast.replay_zero import Stage2, Stage3
from bench.judge import zero
from bench.plan.cell import REFERENCE, Cell, Device, Precision, Sharding
from bench.plan.models import SIZES
from bench.workload.layout import Layout

REPLAYED = 3
"""Micro-batches of a window that are replayed: the first, one in between, and the last; others are like the second."""
SEEN_RANKS = 2
"""Where ranks differ, so many of the first and of the last are replayed, which hold embedding and head, the largest."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """A rank's memory at its peak."""

    moment: str
    """See the docstring of the module."""
    parts: dict[str, int]
    """Bytes at that moment, by category of ``bench.forecast.live``."""

    @property
    def peak(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


def declined(cell: Cell, backend: type[Backend]) -> str:
    """Why the memory of such a cell is not predicted; empty if it is."""
    if cell.compiled:
        return "the compiler decides what compiled blocks save and need"
    if cell.activation_checkpointing and getattr(backend, "stage", 2) == 3:
        return "the order in which ZeRO-3 gathers parameters for recomputation is not replayed"
    return ""


def footprint(
    cell: Cell,
    layout: Layout,
    backend: type[Backend],
    held: Mapping[str, int],
    activation_bytes: int | None = None,
) -> Footprint:
    """The memory of the rank with the highest peak.

    ``held``: bytes by category, of which the optimizer's state is used, and for torchtitan the number of tokens.
    ``activation_bytes`` replaces the count of what autograd saves in one micro-batch.
    """
    found = [_replay(cell, layout, backend, held, activation_bytes, rank) for rank in _ranks(cell, backend)]
    return max(found, key=lambda one: one.peak)


def _ranks(cell: Cell, backend: type[Backend]) -> list[int]:
    """The ranks to replay: one, but several for ZeRO-2, whose partitions hold different parameters."""
    is_stage2 = backend.stage == 2
    ranks = range(cell.num_processes if is_stage2 else 1)
    return sorted({*ranks[:SEEN_RANKS], *ranks[-SEEN_RANKS:]})


def _replay(
    cell: Cell,
    layout: Layout,
    backend: type[Backend],
    held: Mapping[str, int],
    activation_bytes: int | None,
    rank: int,
) -> Footprint:
    """The peak of one rank."""
    bf16 = cell.precision is Precision.BF16
    live = Live()
    framework = _framework(live, cell, layout, backend, held["optimizer_state"], rank)
    decoder = Decoder(
        live,
        framework,
        layout,
        SIZES[cell.model],
        samples=cell.micro_batch_size,
        sequence_length=cell.sequence_length,
        widths=Widths.of(bf16=bf16, autocast=backend.bf16_as != BF16_PARAMETERS),
        saved_bytes=activation_bytes,
        checkpointed=cell.activation_checkpointing,
        repeated=cell.device is Device.CUDA and not bf16,  # bench/workload/llama.py:attend
    )
    if issubclass(backend, torchtitan.TorchtitanEager):
        live.make("number of tokens", "communication", held["communication"])
    num_micro_batches = min(cell.accumulate, REPLAYED)
    for index in range(num_micro_batches):
        framework.start(first=index == 0, last=index == num_micro_batches - 1)
        decoder.forward()
        framework.zero()
        decoder.backward()
    live.moment = "flush"
    framework.end()
    live.moment = "step"
    framework.step()
    return Footprint(live.peak_moment, live.peak_parts)


def _framework(live: Live, cell: Cell, layout: Layout, backend: type[Backend], state: int, rank: int) -> Framework:
    """The replay of the backend's framework."""
    if backend.stage:
        settings = zero.settings(cell, layout, backend.stage)
        if backend.stage == 2:
            return Stage2(live, cell, layout, backend, state, settings, rank)
        return Stage3(live, cell, layout, backend, state, settings)
    if backend.name == REFERENCE:
        return Whole(live, cell, layout, backend, state)
    kind: type[Framework] = DDP if backend.sharding is Sharding.NONE else FSDP2
    if issubclass(backend, accelerate.AccelerateFSDP2) and not SIZES[cell.model].tied:
        kind = CarvedFSDP2
    return kind(live, cell, layout, backend, state)
