"""What a run will do, before it does it: cells, what is skipped and why, and rough estimates of time and memory."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import blocks
from bench.backends.base import Backend
from bench.cell import REFERENCE, SGD, Cell, Device, Precision, Sharding, Sync
from bench.journal import JOURNAL
from bench.probes.dispatch import CPU_WINDOWS
from bench.probes.flops import peak_flops
from bench.taps import SETTLED_WINDOWS
from bench.workload.sizes import SIZES, LlamaSize

CPU_FLOPS_PER_CORE = 2e10
"""FLOP/s that one core is assumed to reach in fp32 training; for the estimate of time only."""
GPU_EFFICIENCY = 0.35
"""Part of the datasheet peak that a GPU is assumed to reach; for the estimate of time only."""
GPU_FP32_FLOPS = 3e13
"""FLOP/s that a GPU is assumed to reach in fp32, without TF32: half of what an H100 has."""
GPU_LINK_BYTES_PER_S = 3.6e11
"""Rate at which NCCL is assumed to gather or reduce, over (W - 1) / W of the bytes: 80 % of what the NVLinks of an H100
have in each direction, 450 GB/s."""
GPU_LAYER_S = 1e-3
"""Least time of a layer's forward and backward in one micro-batch, which is that of launching some 150 kernels."""
WATCHED_LAYER_S = {"collectives": 3e-3, "memory": 10e-3, "dispatch": 3e-3, "exposure": 3e-3}
"""The same where each operator passes a dispatch mode, or the profiler, in Python."""
PLAIN_LAYER_S = 0.1
"""Time of a layer's forward and backward on fake tensors, with which the dispatch pass compares: some 670 operators."""
GPU_TRIAL_S = 8.0
"""Assumed fixed cost of a trial on a GPU: a second to fork and to import the framework, three for the CUDA context and
to load libraries' kernels, two for NCCL's communicators, two to end."""
COPIED_BYTES_PER_S = 4e9
"""Bytes that one core copies or compares per second, between host and device too."""
LOOPBACK_BYTES_PER_S = 4e8
"""Rate at which gloo is assumed to reduce over loopback; for the estimate of time only."""
FIXED_S = 1.5
"""Assumed fixed cost of a trial."""
ACTIVATION_BYTES_PER_ELEMENT = 40
"""Bytes of activations per token, layer and unit of hidden size, without recomputation: 34 in 16-bit after Korthikanti
et al. (arXiv:2205.05198, equation 1) without dropout, and more in fp32; for the estimate of memory only."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a cell will need, roughly."""

    seconds: float | None
    """Of one trial; None if unknown."""
    source: str
    """``measured`` in an earlier run of the same cell, or ``rough`` from the model's size."""
    memory_bytes: int | None
    """Of one rank at the peak; None if unknown."""
    once_s: float = 0.0
    """Seconds that the extra passes add to one trial of the cell, where they are known to cost much."""

    def total(self, repeats: int) -> float:
        """Seconds of so many trials, one of them with the extra passes; 0 if unknown."""
        return 0.0 if self.seconds is None else self.seconds * repeats + self.once_s


def skip(cell: Cell, backend: type[Backend]) -> str:
    """Why a cell cannot run here, in one line; empty if it can."""
    return backend.missing(cell.device) or blocks.refusal(cell, backend) or blocks.missing(cell)


def skipped(cells: Sequence[Cell], backends: Mapping[str, type[Backend]]) -> dict[str, str]:
    """Why cells cannot run here, by id; those that can are not listed."""
    reasons = {cell.cell_id: skip(cell, backends[cell.backend]) for cell in cells}
    return {cell_id: reason for cell_id, reason in reasons.items() if reason}


def earlier_walls(results: Path) -> dict[str, float]:
    """Median wall seconds of good trials by cell id, over all runs under ``results``."""
    walls: dict[str, list[float]] = defaultdict(list)
    for path in results.glob(f"*/{JOURNAL}"):
        for line in path.read_bytes().splitlines():
            try:
                record = json.loads(line)
                if record["status"] == "ok":
                    walls[record["cell_id"]].append(float(record["wall_s"]))
            except (ValueError, KeyError, TypeError):
                continue  # only a better guess is lost
    return {cell_id: statistics.median(seconds) for cell_id, seconds in walls.items() if seconds}


def estimate(
    cell: Cell,
    backend: type[Backend],
    walls: Mapping[str, float],
    *,
    cores: int,
    device_name: str,
    passes: Sequence[str] = (),
) -> Estimate:
    """Time and memory of one cell. Only the shipped models' sizes are known without building them.

    ``passes`` are those that the cell has on a GPU (``bench.spec.passes``).
    """
    if cell.workload != "llama":
        return Estimate(walls.get(cell.cell_id), "measured" if cell.cell_id in walls else "unknown", None)
    size = SIZES[cell.model]
    parameters = size.num_parameters
    moments = 0 if cell.optimizer == SGD else 2
    memory = state_bytes(parameters, backend.sharding, backend.sync, cell.world_size, cell.accumulate, moments)
    tokens = cell.micro_batch_size * cell.sequence_length
    memory += tokens * (size.num_layers * size.hidden_size * ACTIVATION_BYTES_PER_ELEMENT + 12 * size.vocab_size)
    if cell.cell_id in walls:
        return Estimate(walls[cell.cell_id], "measured", memory)
    flops = size.flops_per_token(cell.sequence_length) * cell.sequence_length * cell.global_batch_size
    if cell.fake_tensors:
        return Estimate(None, "unknown", memory)  # nothing is computed; what it takes is Python's time
    if cell.virtual:
        flops //= cell.world_size  # of one rank, and nothing is sent
    if cell.device is Device.CUDA:
        return _on_gpu(cell, backend, size, flops, memory, device_name, passes)
    reductions = cell.accumulate if backend.sync is Sync.EAGER else 1
    wire = 4 * parameters * (reductions + 2 * cell.accumulate * (backend.sharding is Sharding.PARAMS))
    sent = 0 if cell.virtual or cell.world_size == 1 else wire
    step = flops / (CPU_FLOPS_PER_CORE * cores) + sent / LOOPBACK_BYTES_PER_S
    extra = 1 + 2 * (SETTLED_WINDOWS + 1)  # update; collectives and memory; the accumulation pass has a tiny model
    extra += SETTLED_WINDOWS + CPU_WINDOWS + 1  # dispatch
    windows = cell.windows + extra / 3
    return Estimate(FIXED_S + windows * step, "rough", memory)


def _on_gpu(
    cell: Cell,
    backend: type[Backend],
    size: LlamaSize,
    flops: float,
    memory: int,
    device_name: str,
    passes: Sequence[str],
) -> Estimate:
    """A trial on a GPU: processes, initial weights, and steps as long as computing, launching or sending takes."""
    known = peak_flops(device_name, Precision.BF16)
    peak = GPU_FP32_FLOPS if cell.precision is Precision.FP32 else known and known * GPU_EFFICIENCY
    if known is None or peak is None:
        return Estimate(None, "unknown", memory)
    again = 4 / 3 if cell.activation_checkpointing or cell.backend == REFERENCE else 1  # the forward once more
    step = again * flops / (peak * (1 if cell.virtual or cell.shared_gpu else cell.world_size))
    layers = cell.accumulate * size.num_layers
    step = max(step, layers * GPU_LAYER_S, _sent(cell, backend, size.num_parameters) / GPU_LINK_BYTES_PER_S)
    copy = 4 * size.num_parameters / COPIED_BYTES_PER_S
    seconds = GPU_TRIAL_S + cell.windows * step
    once = 0.0
    for name in passes:
        if name == "update":
            once += step + 8 * copy  # weights before and after, their change, the reference's, both compared in fp64
        elif name in WATCHED_LAYER_S:
            once += (SETTLED_WINDOWS + 1) * max(step, layers * WATCHED_LAYER_S[name])
            once += size.num_layers * PLAIN_LAYER_S if name == "dispatch" else 0
    return Estimate(seconds, "rough", memory, once)


def _sent(cell: Cell, backend: type[Backend], parameters: int) -> float:
    """Bytes that a rank on a GPU gathers and reduces in a window: 2 of a parameter in bf16, 4 of a gradient."""
    if cell.virtual or cell.world_size == 1:
        return 0.0
    reductions = cell.accumulate if backend.sync is Sync.EAGER else 1
    gathers = 2 * cell.accumulate if backend.sharding is Sharding.PARAMS else 1  # forward and backward, or the update
    gathers *= 2 if cell.precision is Precision.BF16 else 4
    each = 4 * reductions * (2 if backend.sharding is Sharding.NONE else 1) + gathers
    return each * parameters * (cell.world_size - 1) / cell.world_size


def state_bytes(
    parameters: int, sharding: Sharding, sync: Sync, world_size: int, accumulate: int, moments: int = 2
) -> int:
    """Bytes per rank of fp32 parameters, fp32 gradients and the optimizer's moments (AdamW's two), by what is sharded.

    With deferred sync a sharded backend holds whole gradients as soon as there is a window to defer over.
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
