"""Closed formulas: from a cell and the layout of its model to collectives and held bytes, for every built-in backend.

Plain arithmetic, no torch: ``expect(cell, layout)`` for a cell, ``layout_of(cell)`` for the shipped models' layouts.
What a formula was read from is said in its docstring. Valid for the versions in constraints.txt.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, cast

from bench.analysis.formulas import ddp, fsdp2, zero
from bench.analysis.formulas.core import Expectation, Row, Tally, wire_bytes
from bench.analysis.formulas.zero import ZeroSettings
from bench.backends.base import Backend, Job
from bench.backends.deepspeed import BACKENDS as DEEPSPEED
from bench.backends.deepspeed import DeepSpeedZero2Eager, zero_config
from bench.backends.fabric import BACKENDS as FABRIC
from bench.backends.fsdp2 import BACKENDS as FSDP2
from bench.backends.lightning import BACKENDS as LIGHTNING
from bench.backends.lightning import LightningBackend, LightningDDP, LightningDeepSpeedZero2
from bench.backends.plain import BACKENDS as PLAIN
from bench.backends.plain import DDPEager, Reference
from bench.cell import SGD, Cell, Device, Precision
from bench.workload.shapes import Layout, llama_layout
from bench.workload.sizes import SIZES

__all__ = ["Expectation", "Row", "expect", "layout_of", "wire_bytes", "zero_settings"]

BUILT_IN: dict[str, type[Backend]] = {b.name: b for b in (*PLAIN, *FSDP2, *DEEPSPEED, *LIGHTNING, *FABRIC)}


def layout_of(cell: Cell) -> Layout | None:
    """The layout of a cell's model if it is a shipped one; None for other workloads, whose ranks hand theirs back."""
    if cell.workload != "llama" or cell.model not in SIZES:
        return None
    return _shipped(cell.model)


@cache
def _shipped(model: str) -> Layout:
    """Asked for once per trial of a run."""
    return llama_layout(SIZES[model])


def expect(cell: Cell, layout: Layout, *, rank: int = 0) -> Expectation | None:
    """What the cell's backend does in a settled window and holds between micro-batches on a rank.

    None for a backend that is not built in, and for ZeRO-3 with activation checkpointing, which gathers for what is
    computed once more in an order that is not replayed. A world of any size; nothing of it needs to exist.
    """
    backend = BUILT_IN.get(cell.backend)
    if backend is None or (cell.activation_checkpointing and getattr(backend, "stage", 2) == 3):
        return None
    tally, held = _of_backend(backend, cell, layout, rank)
    if issubclass(backend, LightningBackend) and cell.world_size > 1:
        # The Trainer's flag of SIGTERM, once per micro-batch, whichever strategy
        # (lightning/pytorch/loops/training_epoch_loop.py:_broadcast_sigterm_tensor).
        tally.add("broadcast", "int64", [1], cell.accumulate)
    return Expectation(collectives=tally.rows(), held=held)


def _of_backend(backend: type[Backend], cell: Cell, layout: Layout, rank: int) -> tuple[Tally, dict[str, int]]:
    """The framework's part: collectives, and held bytes by category."""
    n, w = cell.accumulate, cell.world_size
    bf16, clip = cell.precision is Precision.BF16, bool(cell.clip_norm)
    if issubclass(backend, Reference):
        whole = 4 * layout.num_parameters
        held = {"parameters": whole, "gradients": whole, "communication": 0}
        return Tally(), {**held, "optimizer_state": _moments(cell, layout.num_parameters, len(layout.parameters))}
    if issubclass(backend, DDPEager | LightningDDP):
        state = _moments(cell, layout.num_parameters, len(layout.parameters))
        return ddp.collectives(layout, n, backend.sync), {**ddp.held(layout), "optimizer_state": state}
    if issubclass(backend, DeepSpeedZero2Eager | LightningDeepSpeedZero2):
        settings = zero_settings(cell, layout, backend.stage)
        held = zero.held(layout, w, rank, sync=backend.sync, bf16=bf16, zero=settings)
        stage = zero.stage2 if backend.stage == 2 else zero.stage3
        masters, tensors = zero.masters(layout, w, settings)
        tally = stage(layout, n, w, sync=backend.sync, bf16=bf16, zero=settings)
        return tally, {**held, "optimizer_state": _moments(cell, masters, tensors)}
    tally = fsdp2.collectives(layout, n, w, sync=backend.sync, sharding=backend.sharding, bf16=bf16, clip=clip)
    held = fsdp2.held(layout, w, sync=backend.sync, sharding=backend.sharding, bf16=bf16)
    state = _moments(cell, fsdp2.local(layout.parameters, w, rank), len(layout.parameters))
    return tally, {**held, "optimizer_state": state}


def _moments(cell: Cell, numel: int, num_tensors: int) -> int:
    """Bytes of the optimizer's state for a rank's fp32 parameters: two moments and one step counter per tensor.

    torch/optim/adam.py:_init_group: the counter is an fp32 scalar, on the host unless the optimizer is fused; on CUDA
    it then is not counted. SGD without momentum keeps nothing.
    """
    if cell.optimizer == SGD:
        return 0
    counters = cell.device is Device.CPU or cell.optimizer == "adamw-fused"
    return 8 * numel + (4 * num_tensors if counters else 0)


def zero_settings(cell: Cell, layout: Layout, stage: int) -> ZeroSettings:
    """The settings that the backends really give to DeepSpeed for this cell."""
    job = SimpleNamespace(
        cell=cell,
        block_parameters=layout.block_parameters,
        bf16=cell.precision is Precision.BF16,
        clip_norm=cell.clip_norm,
        device=SimpleNamespace(type=str(cell.device)),
    )
    values: dict[str, Any] = zero_config(stage, cast("Job", job))["zero_optimization"]
    return ZeroSettings(
        stage=stage,
        reduce_bucket=values["reduce_bucket_size"],
        prefetch=values["stage3_prefetch_bucket_size"],
        max_live=values["stage3_max_live_parameters"],
        overlap=values["overlap_comm"],
    )
