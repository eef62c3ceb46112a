"""Rough estimates of the time of a run's trials before it starts: steps as ``predict`` has them, at assumed rates."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.files import RESULTS
from bench.forecast.fit import predicted_bytes
from bench.forecast.prediction import Link, TimeEstimate, compute_seconds, predicted_communication
from bench.plan.cell import REFERENCE, Cell, Device, Precision
from bench.plan.models import SIZES
from bench.plan.schedule import Cost
from bench.plan.task import CPU_WINDOWS, SETTLED_WINDOWS
from bench.plan.task import passes as passes_of
from bench.run import machine
from bench.run.journal import JOURNAL

CPU_FLOPS_PER_CORE = 2e10
"""FLOP/s that one core is assumed to reach in fp32 training."""
GPU_EFFICIENCY = 0.35
"""Share of the datasheet peak that a GPU is assumed to reach."""
GPU_FP32_FLOPS = 3e13
"""FLOP/s that a GPU is assumed to reach in fp32 without TF32: half of an H100's peak."""
LINKS = {Device.CPU: Link(bytes_per_s=4e8), Device.CUDA: Link(bytes_per_s=3.6e11)}
"""Gloo over loopback; 80 % of the 450 GB/s that an H100's NVLinks have in each direction."""
GPU_LAYER_S = 1e-3
"""Minimum time of a layer's forward and backward in one micro-batch: launching about 150 kernels."""
WATCHED_LAYER_S = {"memory": 10e-3, "dispatch": 3e-3, "exposure": 3e-3}
"""The same with a dispatch mode or the profiler, which handle every operator in Python."""
PLAIN_LAYER_S = 0.1
"""Time of a layer's forward and backward on fake tensors, about 670 operators, which the dispatch pass runs for
comparison."""
TRIAL_S = {Device.CPU: 1.5, Device.CUDA: 8.0}
"""Assumed fixed cost of a trial. On a GPU: 1 s to fork and import the framework, 3 s for the CUDA context and loading
kernels, 2 s for NCCL's communicators, 2 s to exit."""
COPIED_BYTES_PER_S = 4e9
"""Bytes per second that one core copies or compares, or that are copied between host and device."""


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


def costs(cells: Sequence[Cell], gpus: Sequence[Mapping[str, Any]], skipped: Collection[str]) -> dict[str, Cost]:
    """The cost of each cell on these GPUs, or on this CPU if there are none, by id; ``skipped`` ids are not run.

    Times are those of earlier runs here, otherwise estimates; peaks are those of ``bench.forecast.fit``. For compiled
    blocks they are those of uncompiled ones, which need more.
    """
    walls = earlier_walls(RESULTS)
    passes = passes_of([cell for cell in cells if cell.cell_id not in skipped])
    found = {}
    for cell in cells:
        known = walls.get(cell.cell_id)
        seconds, once_s = (known, 0.0) if known else _seconds(cell, passes.get(cell.cell_id, ()), gpus)
        found[cell.cell_id] = Cost(seconds, predicted_bytes(dataclasses.replace(cell, compiled=False)), once_s)
    return found


def _seconds(cell: Cell, passes: Sequence[str], gpus: Sequence[Mapping[str, Any]]) -> tuple[float | None, float]:
    """Seconds of a trial, and those that its extra ``passes`` add once if they are expensive; None if unknown.

    The size of a model of one's own is unknown, and so is the time on fake tensors, which Python's overhead dominates.
    """
    if cell.workload != "llama" or not cell.world.computes or (rate := _flops_per_s(cell, gpus)) is None:
        return None, 0.0
    is_cpu, size = cell.device is Device.CPU, SIZES[cell.model]
    recomputed = cell.activation_checkpointing or cell.backend == REFERENCE
    compute_s, _ = compute_seconds(dataclasses.replace(cell, activation_checkpointing=recomputed), rate)
    compute_s *= cell.num_processes if is_cpu or cell.world.shares_gpus else 1
    sent = predicted_communication(cell, LINKS[cell.device]) if cell.num_processes > 1 else None
    step = sent.beside(compute_s) if sent else TimeEstimate(compute_s, compute_s)
    if is_cpu:
        extra = 1 + SETTLED_WINDOWS + 1  # update; memory and collectives; the accumulation pass has a tiny model
        extra += SETTLED_WINDOWS + CPU_WINDOWS + 1  # dispatch
        return TRIAL_S[cell.device] + (cell.windows + extra / 3) * step.serial, 0.0
    layers, once = cell.accumulate * size.num_layers, 0.0
    step_s = max(step.overlapped, layers * GPU_LAYER_S)
    for name in passes:
        if name == "update":  # weights before and after, change, reference, comparison in fp64
            once += step_s + 8 * 4 * size.num_parameters / COPIED_BYTES_PER_S
        elif name in WATCHED_LAYER_S:
            once += (SETTLED_WINDOWS + 1) * max(step_s, layers * WATCHED_LAYER_S[name])
            once += size.num_layers * PLAIN_LAYER_S if name == "dispatch" else 0
    return TRIAL_S[cell.device] + cell.windows * step_s, once


def _flops_per_s(cell: Cell, gpus: Sequence[Mapping[str, Any]]) -> float | None:
    """The rate of a GPU, or of all cores; None for an unknown GPU."""
    if cell.device is Device.CPU:
        return CPU_FLOPS_PER_CORE * machine.num_cores()
    peak = machine.peak_flops(str(gpus[0]["name"]) if gpus else "", Precision.BF16)
    return peak and (GPU_FP32_FLOPS if cell.precision is Precision.FP32 else peak * GPU_EFFICIENCY)
