"""What a run will do, before it does it: cells, what is skipped and why, and rough estimates of time and memory."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.backends.base import Backend
from bench.cell import SGD, Cell, Device, Sharding, Sync
from bench.journal import JOURNAL
from bench.probes.dispatch import CPU_WINDOWS
from bench.probes.flops import peak_flops
from bench.taps import SETTLED_WINDOWS
from bench.workload.sizes import SIZES

CPU_FLOPS_PER_CORE = 2e10
"""FLOP/s that one core is assumed to reach in fp32 training; for the estimate of time only."""
GPU_EFFICIENCY = 0.35
"""Part of the datasheet peak that a GPU is assumed to reach; for the estimate of time only."""
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


def skipped(cells: Sequence[Cell], backends: Mapping[str, type[Backend]]) -> dict[str, str]:
    """Why backends of these cells cannot run here, by name; those that can are not listed."""
    reasons = {}
    for name, device in {(cell.backend, cell.device) for cell in cells}:
        if reason := backends[name].missing(device):
            reasons[name] = reason
    return reasons


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
    cell: Cell, backend: type[Backend], walls: Mapping[str, float], *, cores: int, device_name: str
) -> Estimate:
    """Time and memory of one cell. Only the shipped models' sizes are known without building them."""
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
        peak = peak_flops(device_name, cell.precision)
        if peak is None:
            return Estimate(None, "unknown", memory)
        step = flops / (peak * GPU_EFFICIENCY * (1 if cell.virtual or cell.shared_gpu else cell.world_size))
    else:
        reductions = cell.accumulate if backend.sync is Sync.EAGER else 1
        wire = 4 * parameters * (reductions + 2 * cell.accumulate * (backend.sharding is Sharding.PARAMS))
        sent = 0 if cell.virtual or cell.world_size == 1 else wire
        step = flops / (CPU_FLOPS_PER_CORE * cores) + sent / LOOPBACK_BYTES_PER_S
    extra = 1 + 2 * (SETTLED_WINDOWS + 1)  # update; collectives and memory; the accumulation pass has a tiny model
    extra += SETTLED_WINDOWS + CPU_WINDOWS + 1  # dispatch
    windows = cell.windows + extra / 3
    return Estimate(FIXED_S + windows * step, "rough", memory)


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
