"""Rough estimates of the time of a run's trials before it starts: steps as ``predict`` has them, at assumed rates."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.backends.base import Offloading
from bench.backends.deepspeed import ZeroBackend
from bench.files import RESULTS
from bench.forecast.fit import predicted_bytes
from bench.forecast.prediction import (
    Link,
    Prediction,
    TimeEstimate,
    compute_seconds,
    predicted_communication,
)
from bench.judge.formulas import BUILT_IN, layout_of
from bench.plan.cell import REFERENCE, Cell, Device, Precision, Sharding
from bench.plan.models import SIZES
from bench.plan.schedule import Cost
from bench.plan.task import CPU_WINDOWS, SETTLED_WINDOWS
from bench.plan.task import passes as passes_of
from bench.run import machine
from bench.run.journal import JOURNAL
from bench.run.runner import RENEWED_FOR_S

CPU_FLOPS_PER_CORE = 2e10
"""FLOP/s that one core is assumed to reach in fp32 training."""
GPU_EFFICIENCY = 0.35
"""Share of the datasheet peak that a GPU is assumed to reach."""
GPU_FP32_FLOPS = 4e13
"""FLOP/s that a GPU is assumed to reach in fp32 without TF32: 80 % of what products of 8192 x 8192 reach on an H100,
5.2e13 (``matmul`` in results/h100/run.json)."""
LINKS = {Device.CPU: Link(bytes_per_s=4e8), Device.CUDA: Link(bytes_per_s=3.6e11)}
"""Gloo over loopback; 80 % of the 450 GB/s that an H100's NVLinks have in each direction."""
GPU_LAYER_S = {
    Sharding.NONE: 3.3e-3,
    Sharding.OPTIMIZER: 5.6e-3,
    Sharding.GRADS: 5.6e-3,
    Sharding.PARAMS: 6.7e-3,
}
"""Minimum time of a layer's forward and backward in one micro-batch: what the host takes to launch its kernels.

In results/h100, where a window of N = 2 of two layers is bound by launching, a launch takes 22 us under DDP, 33 under
ZeRO-2, 41 under FSDP2 and 56 under ZeRO-3 (``step_seconds`` / ``num_launches``). For each layer and micro-batch of 135m
they launch 149, 168, 141 and 136 kernels, the update included (results/gpu-stub/waits.csv). FSDP2's and ZeRO-3's
are averaged."""
WATCHED_LAYER_S = {"memory": 10e-3, "dispatch": 6.7e-3, "exposure": 6.7e-3}
"""The same with a dispatch mode or the profiler, which handle every operator in Python."""
PLAIN_LAYER_S = 0.1
"""Time of a layer's forward and backward on fake tensors, about 670 operators, which the dispatch pass runs for
comparison."""
TRIAL_S = {Device.CPU: 1.5, Device.CUDA: 3.0}
"""Fixed cost of a trial, and of the checks of its first one where the model is small. On a GPU: trials in results/h100
took 2 to 5 s, nearly all of it to fork, for the CUDA context, to load kernels, and to exit."""
NCCL_S = 4.0
"""Assumed addition where several ranks set up NCCL's communicators and take them down."""
COMPILE_S = 7.0
"""Of a trial with compiled blocks, in results/h100-compiled."""
START_S = {Device.CPU: 0.0, Device.CUDA: 45.0}
"""Of a run, before its first trial. On an H100, 19 s from run.json to the end of the first trial, 18 s for the fork
servers of DeepSpeed and Lightning beside each other (gaps in results/h100), and 8 s to ask torch for the GPUs."""
RENEWAL_S = 20.0
"""Of one renewal of the fork servers (``bench.run.runner``) on an H100."""
OFFLOADED_BYTES_PER_S = 2e10
"""Assumed rate of copies between device and pinned memory of the host, as over PCIe 4.0 x16, and of the update on the
host, which reads parameters, gradients and moments and writes all but the gradients (28 bytes per element in fp32)."""
COPIED_BYTES_PER_S = 2e9
"""Bytes per second that are copied between device and new memory of the host, or read from a file that is in memory."""


def earlier_walls(results: Path) -> dict[str, float]:
    """Median wall time of good trials in seconds, by cell id, over all runs under ``results``."""
    walls: dict[str, list[float]] = defaultdict(list)
    for path in results.glob(f"*/{JOURNAL}"):
        for line in path.read_bytes().splitlines():
            try:
                record = json.loads(line)
                if record["status"] == "ok":
                    walls[record["cell_id"]].append(float(record["wall_s"]))
            except (ValueError, KeyError, TypeError):
                continue  # the estimate is only less precise
    return {cell_id: statistics.median(seconds) for cell_id, seconds in walls.items()}


def costs(
    cells: Sequence[Cell], gpus: Sequence[Mapping[str, Any]], skipped: Collection[str]
) -> dict[str, Cost]:
    """The cost of each cell on these GPUs, or on this CPU if there are none, by id; ``skipped`` ids are not run.

    Times are those of earlier runs here, otherwise estimates; peaks are those of ``bench.forecast.fit``. For compiled
    blocks they are those of uncompiled ones, which need more.
    """
    walls = earlier_walls(RESULTS)
    passes = passes_of([cell for cell in cells if cell.cell_id not in skipped])
    found = {}
    for cell in cells:
        known = walls.get(cell.cell_id)
        seconds, once_s = (
            (known, 0.0) if known else _seconds(cell, passes.get(cell.cell_id, ()), gpus)
        )
        found[cell.cell_id] = Cost(
            seconds, predicted_bytes(dataclasses.replace(cell, compiled=False)), once_s
        )
    return found


def _seconds(
    cell: Cell, passes: Sequence[str], gpus: Sequence[Mapping[str, Any]]
) -> tuple[float | None, float]:
    """Seconds of a trial, and those that its extra ``passes`` add once if they are expensive; None if unknown.

    The size of a model of one's own is unknown, and so is the time on fake tensors, which Python's overhead dominates.
    """
    if (
        cell.workload != "llama"
        or not cell.world.computes
        or (rate := _flops_per_s(cell, gpus)) is None
    ):
        return None, 0.0
    is_cpu, size = cell.device is Device.CPU, SIZES[cell.model]
    recomputed = cell.activation_checkpointing or cell.backend == REFERENCE
    compute_s, _ = compute_seconds(
        dataclasses.replace(cell, activation_checkpointing=recomputed), rate
    )
    compute_s *= cell.num_processes if is_cpu or cell.world.shares_gpus else 1
    sent = predicted_communication(cell, LINKS[cell.device]) if cell.num_processes > 1 else None
    step = sent.beside(compute_s) if sent else TimeEstimate(compute_s, compute_s)
    if is_cpu:
        extra = (
            1 + SETTLED_WINDOWS + 1
        )  # update; memory and collectives; the accumulation pass has a tiny model
        extra += SETTLED_WINDOWS + CPU_WINDOWS + 1  # dispatch
        return TRIAL_S[cell.device] + (cell.windows + extra / 3) * step.serial, 0.0
    layers, once = cell.accumulate * size.num_layers, 0.0
    step_s = max(step.overlapped, layers * _layer_s(cell)) + _offload_s(cell)
    around_s = _around_s(cell)
    for name in passes:
        if (
            name == "update"
        ):  # weights to the host, and back with the reference's change to be compared
            once += step_s + around_s + 3 * 4 * size.num_parameters / COPIED_BYTES_PER_S
        elif name in WATCHED_LAYER_S:
            once += (SETTLED_WINDOWS + 1) * max(step_s, layers * WATCHED_LAYER_S[name]) + around_s
            once += size.num_layers * PLAIN_LAYER_S if name == "dispatch" else 0
    fixed_s = TRIAL_S[cell.device] + NCCL_S * (cell.num_processes > 1) + COMPILE_S * cell.compiled
    return fixed_s + around_s + cell.windows * step_s, once


def _around_s(cell: Cell) -> float:
    """What a framework copies between device and host before and after its training, on one rank.

    In bf16 the bench keeps the weights for DeepSpeed's masters on the host, and Lightning's trainer ends by moving
    weights, gradients and moments there (strategies/strategy.py: ``teardown``). In results/h100-1b that made a trial 4
    s longer under ZeRO-2, 8 under ZeRO-3, and 15 under Lightning's DDP.
    """
    backend, size = BUILT_IN.get(cell.backend), SIZES[cell.model]
    if backend is None:
        return 0.0
    copied = 0.0
    if issubclass(backend, ZeroBackend) and cell.precision is Precision.BF16:
        copied += 2 * 4 * size.num_parameters
    if backend.framework.startswith("Lightning "):
        held = 4 * 4 * size.num_parameters
        copied += held if backend.sharding is Sharding.NONE else held / cell.world_size
    return copied / COPIED_BYTES_PER_S


def _layer_s(cell: Cell) -> float:
    """The time to launch a layer's forward and backward; of compiled blocks and backends of one's own as of DDP."""
    backend = BUILT_IN.get(cell.backend)
    return GPU_LAYER_S[backend.sharding if backend else Sharding.NONE]


def _offload_s(cell: Cell) -> float:
    """What a step takes longer since shards rest on the host; 0 where they do not."""
    backend, layout = BUILT_IN.get(cell.backend), layout_of(cell)
    if backend is None or layout is None or not issubclass(backend, Offloading):
        return 0.0
    host = Prediction(cell, backend, layout).host
    if host is None:
        return 0.0
    updated = 28 * SIZES[cell.model].num_parameters / cell.world_size
    return (host.to_device + host.to_host + updated) / OFFLOADED_BYTES_PER_S


def start_s(cells: Collection[Cell]) -> float:
    """Seconds of a run before its first trial."""
    return max((START_S[cell.device] for cell in cells), default=0.0)


def renewals_s(cells: Collection[Cell], repeats: int, trials_s: float) -> float:
    """Seconds in which the fork servers are renewed, between pairs of repeats that take ``trials_s`` in all."""
    if not any(cell.device is Device.CUDA for cell in cells):
        return 0.0
    return RENEWAL_S * min((repeats - 1) // 2, int(trials_s / RENEWED_FOR_S))


def _flops_per_s(cell: Cell, gpus: Sequence[Mapping[str, Any]]) -> float | None:
    """The rate of a GPU, or of all cores; None for an unknown GPU."""
    if cell.device is Device.CPU:
        return CPU_FLOPS_PER_CORE * machine.num_cores()
    peak = machine.peak_flops(str(gpus[0]["name"]) if gpus else "", Precision.BF16)
    return peak and (GPU_FP32_FLOPS if cell.precision is Precision.FP32 else peak * GPU_EFFICIENCY)
