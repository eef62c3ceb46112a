"""Rough estimates of a run's time and memory before it starts, and the datasheet peaks behind MFU.

A device that is not listed has no peak, and its rows have no MFU relative to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.plan.cell import REFERENCE, SGD, Cell, Device, Precision, Sharding, Sync
from bench.plan.models import SIZES, LlamaSize
from bench.plan.task import CPU_WINDOWS, SETTLED_WINDOWS
from bench.plan.world import Candidate

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
ACTIVATION_BYTES_PER_ELEMENT = 40
"""Bytes of activations per token, layer and unit of hidden size without recomputation: 34 in 16-bit without dropout
(Korthikanti et al., arXiv:2205.05198, equation 1), more in fp32."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The estimated cost of a cell."""

    seconds: float | None
    """Per trial; None if unknown."""
    source: str
    """``measured`` in an earlier run of the same cell, ``rough`` (from the model's size), or ``unknown``."""
    memory_bytes: int | None
    """Peak of one rank; None if unknown."""
    once_s: float = 0.0
    """Seconds that the extra passes add to one trial of the cell, if they are expensive."""

    def total(self, repeats: int) -> float:
        """Seconds of this many trials, one of them with the extra passes; 0 if unknown."""
        return 0.0 if self.seconds is None else self.seconds * repeats + self.once_s


def estimate(
    cell: Cell,
    backend: Candidate,
    walls: Mapping[str, float],
    *,
    cores: int,
    device_name: str,
    passes: Sequence[str] = (),
) -> Cost:
    """Estimate time and memory of one cell. Only shipped models have a known size without being built.

    ``walls`` are measured seconds per trial by cell id; ``passes`` are the passes of the cell
    (``bench.plan.task.passes``).
    """
    if cell.workload != "llama":
        return Cost(walls.get(cell.cell_id), "measured" if cell.cell_id in walls else "unknown", None)
    size = SIZES[cell.model]
    parameters = size.num_parameters
    moments = 0 if cell.optimizer == SGD else 2
    memory = state_bytes(parameters, backend.sharding, backend.sync, cell.world_size, cell.accumulate, moments)
    tokens = cell.micro_batch_size * cell.sequence_length
    memory += tokens * (size.num_layers * size.hidden_size * ACTIVATION_BYTES_PER_ELEMENT + 12 * size.vocab_size)
    if cell.cell_id in walls:
        return Cost(walls[cell.cell_id], "measured", memory)
    if not cell.world.computes:
        return Cost(None, "unknown", memory)  # bound by Python overhead
    flops = size.flops_per_token(cell.sequence_length) * tokens * cell.accumulate * cell.num_processes
    if cell.device is Device.CUDA:
        return _on_gpu(cell, backend, size, flops, memory, device_name, passes)
    reductions = cell.accumulate if backend.sync is Sync.EAGER else 1
    wire = 4 * parameters * (reductions + 2 * cell.accumulate * (backend.sharding is Sharding.PARAMS))
    sent = 0 if cell.num_processes == 1 else wire
    step = flops / (CPU_FLOPS_PER_CORE * cores) + sent / LOOPBACK_BYTES_PER_S
    extra = 1 + 2 * (SETTLED_WINDOWS + 1)  # update; collectives and memory; the accumulation pass has a tiny model
    extra += SETTLED_WINDOWS + CPU_WINDOWS + 1  # dispatch
    windows = cell.windows + extra / 3
    return Cost(FIXED_S + windows * step, "rough", memory)


def _on_gpu(
    cell: Cell,
    backend: Candidate,
    size: LlamaSize,
    flops: float,
    memory: int,
    device_name: str,
    passes: Sequence[str],
) -> Cost:
    """Cost of a trial on a GPU: startup, initial weights, and steps bound by computing, launching or sending."""
    known = peak_flops(device_name, Precision.BF16)
    peak = GPU_FP32_FLOPS if cell.precision is Precision.FP32 else known and known * GPU_EFFICIENCY
    if known is None or peak is None:
        return Cost(None, "unknown", memory)
    again = 4 / 3 if cell.activation_checkpointing or cell.backend == REFERENCE else 1  # forward computed twice
    step = again * flops / (peak * (1 if cell.world.shares_gpus else cell.num_processes))
    layers = cell.accumulate * size.num_layers
    step = max(step, layers * GPU_LAYER_S, _sent(cell, backend, size.num_parameters) / GPU_LINK_BYTES_PER_S)
    copy = 4 * size.num_parameters / COPIED_BYTES_PER_S
    seconds = GPU_TRIAL_S + cell.windows * step
    once = 0.0
    for name in passes:
        if name == "update":
            once += step + 8 * copy  # weights before and after, change, reference, comparison in fp64
        elif name in WATCHED_LAYER_S:
            once += (SETTLED_WINDOWS + 1) * max(step, layers * WATCHED_LAYER_S[name])
            once += size.num_layers * PLAIN_LAYER_S if name == "dispatch" else 0
    return Cost(seconds, "rough", memory, once)


def _sent(cell: Cell, backend: Candidate, parameters: int) -> float:
    """Bytes that a rank on a GPU gathers and reduces per window: 2 per bf16 parameter, 4 per gradient."""
    if cell.num_processes == 1:
        return 0.0
    reductions = cell.accumulate if backend.sync is Sync.EAGER else 1
    gathers = 2 * cell.accumulate if backend.sharding is Sharding.PARAMS else 1  # forward and backward, or the update
    gathers *= 2 if cell.precision is Precision.BF16 else 4
    each = 4 * reductions * (2 if backend.sharding is Sharding.NONE else 1) + gathers
    return each * parameters * (cell.world_size - 1) / cell.world_size


def state_bytes(
    parameters: int, sharding: Sharding, sync: Sync, world_size: int, accumulate: int, moments: int = 2
) -> int:
    """Bytes per rank of fp32 parameters, fp32 gradients and optimizer moments (two for AdamW).

    With deferred sync and N > 1 a sharded backend holds whole gradients.
    """
    whole_gradients = sharding in (Sharding.NONE, Sharding.OPTIMIZER) or (sync is Sync.DEFERRED and accumulate > 1)
    shards = {
        "parameters": world_size if sharding is Sharding.PARAMS else 1,
        "gradients": 1 if whole_gradients else world_size,
        "moments": 1 if sharding is Sharding.NONE else world_size,
    }
    return (
        4 * parameters // shards["parameters"]
        + 4 * parameters // shards["gradients"]
        + 4 * moments * parameters // shards["moments"]
    )


PEAK_FLOPS: dict[str, dict[str, float]] = {
    "H100 NVL": {"bf16": 835e12},
    "H100 PCIe": {"bf16": 756e12},
    "H100": {"bf16": 989e12},
    "H200 NVL": {"bf16": 835e12},
    "H200": {"bf16": 989e12},
    "A100": {"bf16": 312e12},
}
"""Dense tensor-core FLOP/s by a substring of the device name and by precision, from NVIDIA's datasheets.

The first match counts, so longer names come first. No fp32 peak is listed, because the TF32 switch decides which one
applies.
"""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of one device, or None if unknown."""
    if "MIG" in device_name:
        return None  # a MIG slice has only part of the peak
    for part, peaks in PEAK_FLOPS.items():
        if part in device_name:
            return peaks.get(precision)
    return None
