"""Rough estimates of the time of a run's trials before it starts."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.files import RESULTS
from bench.forecast.fit import predicted_bytes
from bench.plan.cell import REFERENCE, Cell, Device, Precision, Sharding, Sync
from bench.plan.models import SIZES, LlamaSize
from bench.plan.schedule import Cost
from bench.plan.task import CPU_WINDOWS, SETTLED_WINDOWS
from bench.plan.task import passes as passes_of
from bench.plan.world import Candidate
from bench.run import machine
from bench.run.journal import JOURNAL
from bench.run.machine import peak_flops

CPU_FLOPS_PER_CORE = 2e10
"""FLOP/s that one core is assumed to reach in fp32 training."""
GPU_EFFICIENCY = 0.35
"""Share of the datasheet peak that a GPU is assumed to reach."""
GPU_FP32_FLOPS = 3e13
"""FLOP/s that a GPU is assumed to reach in fp32 without TF32: half of an H100's peak."""
GPU_LINK_BYTES_PER_S = 3.6e11
"""Assumed rate of NCCL's gathers and reductions, over (W - 1) / W of the bytes: 80 % of the 450 GB/s that an H100's
NVLinks have in each direction."""
GPU_LAYER_S = 1e-3
"""Minimum time of a layer's forward and backward in one micro-batch: launching about 150 kernels."""
WATCHED_LAYER_S = {"collectives": 3e-3, "memory": 10e-3, "dispatch": 3e-3, "exposure": 3e-3}
"""The same with a dispatch mode or the profiler, which handle every operator in Python."""
PLAIN_LAYER_S = 0.1
"""Time of a layer's forward and backward on fake tensors, about 670 operators, which the dispatch pass runs for
comparison."""
GPU_TRIAL_S = 8.0
"""Assumed fixed cost of a trial on a GPU: 1 s to fork and import the framework, 3 s for the CUDA context and loading
kernels, 2 s for NCCL's communicators, 2 s to exit."""
COPIED_BYTES_PER_S = 4e9
"""Bytes per second that one core copies or compares, or that are copied between host and device."""
LOOPBACK_BYTES_PER_S = 4e8
"""Assumed rate of gloo's reductions over loopback."""
FIXED_S = 1.5
"""Assumed fixed cost of a trial."""


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
    return {cell_id: statistics.median(seconds) for cell_id, seconds in walls.items() if seconds}


def costs(
    cells: Sequence[Cell],
    backends: Mapping[str, Candidate],
    gpus: Sequence[Mapping[str, Any]],
    skipped: Collection[str],
) -> dict[str, Cost]:
    """The cost of each cell on these GPUs, or on this CPU if there are none, by id; ``skipped`` ids are not run.

    Times are those of earlier runs here, otherwise ``estimate``; peaks are those of ``bench.forecast.fit``.
    """
    walls = earlier_walls(RESULTS)
    passes = passes_of([cell for cell in cells if cell.cell_id not in skipped])
    device_name, cores = (str(gpus[0]["name"]) if gpus else "cpu"), machine.num_cores()
    found = {}
    for cell in cells:
        own, backend = passes.get(cell.cell_id, ()), backends[cell.backend]
        seconds, once_s = estimate(cell, backend, own, cores=cores, device_name=device_name)
        if cell.cell_id in walls:
            seconds, once_s = walls[cell.cell_id], 0.0
        found[cell.cell_id] = Cost(seconds, predicted_bytes(cell), once_s)
    return found


def estimate(
    cell: Cell, backend: Candidate, passes: Sequence[str], *, cores: int, device_name: str
) -> tuple[float | None, float]:
    """Seconds of a trial, and those that its extra ``passes`` add once if they are expensive; None if unknown.

    The size of a model of one's own is unknown, and so is the time on fake tensors, which Python's overhead bounds.
    """
    if cell.workload != "llama" or not cell.world.computes:
        return None, 0.0
    size = SIZES[cell.model]
    tokens = cell.micro_batch_size * cell.sequence_length * cell.accumulate * cell.num_processes
    flops = size.flops_per_token(cell.sequence_length) * tokens
    if cell.device is Device.CUDA:
        return _on_gpu(cell, backend, size, flops, device_name, passes)
    reductions = 1 if backend.sync is Sync.DEFERRED else cell.accumulate
    wire = 4 * size.num_parameters * (reductions + 2 * cell.accumulate * (backend.sharding is Sharding.PARAMS))
    sent = 0 if cell.num_processes == 1 else wire
    step = flops / (CPU_FLOPS_PER_CORE * cores) + sent / LOOPBACK_BYTES_PER_S
    extra = 1 + 2 * (SETTLED_WINDOWS + 1)  # update; collectives and memory; the accumulation pass has a tiny model
    extra += SETTLED_WINDOWS + CPU_WINDOWS + 1  # dispatch
    return FIXED_S + (cell.windows + extra / 3) * step, 0.0


def _on_gpu(
    cell: Cell, backend: Candidate, size: LlamaSize, flops: float, device_name: str, passes: Sequence[str]
) -> tuple[float | None, float]:
    """The same on a GPU: startup, and steps bound by computing, launching or sending."""
    known = peak_flops(device_name, Precision.BF16)
    if known is None:
        return None, 0.0
    peak = GPU_FP32_FLOPS if cell.precision is Precision.FP32 else known * GPU_EFFICIENCY
    again = 4 / 3 if cell.activation_checkpointing or cell.backend == REFERENCE else 1  # forward computed twice
    step = again * flops / (peak * (1 if cell.world.shares_gpus else cell.num_processes))
    layers = cell.accumulate * size.num_layers
    step = max(step, layers * GPU_LAYER_S, _sent(cell, backend, size.num_parameters) / GPU_LINK_BYTES_PER_S)
    once = 0.0
    for name in passes:
        if name == "update":  # weights before and after, change, reference, comparison in fp64
            once += step + 8 * 4 * size.num_parameters / COPIED_BYTES_PER_S
        elif name in WATCHED_LAYER_S:
            once += (SETTLED_WINDOWS + 1) * max(step, layers * WATCHED_LAYER_S[name])
            once += size.num_layers * PLAIN_LAYER_S if name == "dispatch" else 0
    return GPU_TRIAL_S + cell.windows * step, once


def _sent(cell: Cell, backend: Candidate, parameters: int) -> float:
    """Bytes that a rank on a GPU gathers and reduces per window: 2 per bf16 parameter, 4 per gradient."""
    if cell.num_processes == 1:
        return 0.0
    reductions = 1 if backend.sync is Sync.DEFERRED else cell.accumulate
    gathers = 2 * cell.accumulate if backend.sharding is Sharding.PARAMS else 1  # forward and backward, or the update
    gathers *= 2 if cell.precision is Precision.BF16 else 4
    each = 4 * reductions * (2 if backend.sharding is Sharding.NONE else 1) + gathers
    return each * parameters * (cell.world_size - 1) / cell.world_size
