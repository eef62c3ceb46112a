"""A rank's memory at its peak, by category: a window replayed tensor by tensor, without tensors.

The replay makes and drops, in order, what the model, autograd and the framework make and drop in up to
three micro-batches and the update, each as its source does it; the peak is the largest sum. Held bytes (parameters,
gradients, optimizer state) are those of ``bench.judge.formulas``. Nothing is fitted. The moments:

- ``forward``, and ``loss``: its forward and its backward, with all activations and in fp32 up to three tensors of
  tokens x vocabulary: the log-softmax that was saved, the gradient of nll_loss, and that of the logits;
- ``head``: the backward of the head and the last norm; ``block``: of a block;
- ``reduce``: a block's backward is over, and a framework reduces its gradients; ``root``: the same of the rest;
- ``flush``: gradients are reduced after the last backward; ``step``: the optimizer's step.

Activations are counted as Korthikanti et al. do (arXiv:2205.05198, section 4): every tensor that autograd saves for
the backward; but for a Llama block in transformers, see ``replay_decoder``. With activation checkpointing
a block keeps its input (their "full recomputation"), and what it saves is there during its own backward only.
Not counted: the CUDA context, the allocator's rounding and fragmentation, what libraries allocate (cuBLAS, NCCL), and
what the bench itself holds: the tokens of all windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.backends.base import BF16_PARAMETERS, Backend
from bench.backends.deepspeed import DeepSpeedZero2Eager
from bench.backends.lightning import LightningDeepSpeedZero2
from bench.forecast.live import Live, Widths
from bench.forecast.replay_decoder import Decoder
from bench.forecast.replay_frameworks import DDP, FSDP2, Framework, Whole
from bench.forecast.replay_zero import Stage2, Stage3
from bench.judge.formulas import zero_settings
from bench.plan.cell import REFERENCE, Cell, Device, Precision, Sharding
from bench.plan.models import SIZES
from bench.workload.layout import Layout

ACCURACY = "within 0.6 % of the measured one in every cell, tiny in fp32 and 8b in bf16 on fake tensors, on the CPU"
"""Of the peaks, as docs/memory-and-bytes.md has them; tests/studies/test_bytes_page.py holds it."""
REPLAYED = 3
"""Micro-batches of a window that are replayed: its first, one between, and its last; the others are as the second."""
SEEN_RANKS = 2
"""Where ranks differ, the first and the last so many are replayed: embedding and head, the largest, are at the ends."""


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


def declined(cell: Cell, backend: type[Backend]) -> str:
    """Why the memory of such a cell is not predicted, in words; empty if it is."""
    if cell.compiled:
        return "what compiled blocks save and need is the compiler's choice"
    if cell.activation_checkpointing and getattr(backend, "stage", 2) == 3:
        return "in which order ZeRO-3 gathers for what is computed once more is not replayed"
    return ""


def footprint(
    cell: Cell,
    layout: Layout,
    backend: type[Backend],
    held: Mapping[str, int],
    activation_bytes: int | None = None,
) -> Footprint:
    """The peak of the rank with the highest, by category. Of ``held`` the optimizer's state is taken.

    ``activation_bytes`` replaces the count of what autograd saves.
    """
    found = [_replay(cell, layout, backend, held, activation_bytes, rank) for rank in _ranks(cell, backend)]
    return max(found, key=lambda one: one.peak)


def _ranks(cell: Cell, backend: type[Backend]) -> list[int]:
    """Ranks that exist and differ: those of ZeRO-2, whose partitions hold other parameters."""
    is_stage2 = issubclass(backend, DeepSpeedZero2Eager | LightningDeepSpeedZero2) and backend.stage == 2
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
    """One rank's peak."""
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
    """What the backend's framework does with parameters and gradients."""
    if issubclass(backend, DeepSpeedZero2Eager | LightningDeepSpeedZero2):
        settings = zero_settings(cell, layout, backend.stage)
        if backend.stage == 2:
            return Stage2(live, cell, layout, backend, state, settings, rank)
        return Stage3(live, cell, layout, backend, state, settings)
    if backend.name == REFERENCE:
        return Whole(live, cell, layout, backend, state)
    kind = DDP if backend.sharding is Sharding.NONE else FSDP2
    return kind(live, cell, layout, backend, state)
