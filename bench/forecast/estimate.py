"""Rough estimates of the time of a run's trials: steps of ``predict``, at assumed rates."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.backends.base import Offloading
from bench.backends.deepspeed import ZeroBackend
from bench.files import INPUT_BYTES, RESULTS, read_regular
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
from bench.plan.gpu_kinds import kind_of, peak_flops
from bench.plan.models import SIZES
from bench.plan.schedule import Cost
from bench.plan.task import CPU_WINDOWS, SETTLED_WINDOWS
from bench.plan.task import passes as passes_of
from bench.run import machine
from bench.run.journal import JOURNAL, MANIFEST
from bench.run.runner import RENEWED_FOR_S

CPU_FLOPS_PER_CORE = 2e10
"""FLOP/s that one core is assumed to reach in fp32 training."""
GPU_EFFICIENCY = 0.35
"""Share of the datasheet peak that a GPU is assumed to reach."""
GPU_FP32_FLOPS = 4e13
"""FLOP/s that a GPU is assumed to reach in fp32 without TF32: 80 % of what products of 8192 x 8192
reach on an H100, 5.2e13 (``matmul`` in results/h100/run.json)."""
LINKS = {Device.CPU: Link(bytes_per_s=4e8), Device.CUDA: Link(bytes_per_s=3.6e11)}
"""Gloo over loopback; 80 % of the 450 GB/s that an H100's NVLinks have in each direction."""
GPU_LAYER_S = {
    Sharding.NONE: 3.3e-3,
    Sharding.OPTIMIZER: 5.6e-3,
    Sharding.GRADS: 5.6e-3,
    Sharding.PARAMS: 6.7e-3,
}
"""Minimum time of a layer's forward and backward in one micro-batch: what the host takes to launch
its kernels.

In results/h100, where a window of N = 2 of two layers is bound by launching, a launch takes 22 us
under DDP, 33 under ZeRO-2, 41 under FSDP2 and 56 under ZeRO-3 (``step_seconds`` /
``num_launches``). For each layer and micro-batch of 135m they launch 149, 168, 141 and 136 kernels,
the update included (results/gpu-stub/waits.csv). FSDP2's and ZeRO-3's are averaged."""
WATCHED_LAYER_S = {"memory": 10e-3, "dispatch": 6.7e-3, "exposure": 6.7e-3}
"""The same with a dispatch mode or the profiler, which handle every operator in Python."""
PLAIN_LAYER_S = 0.1
"""Time of a layer's forward and backward on fake tensors, about 670 operators, which the dispatch
pass runs for comparison."""
TRIAL_S = {Device.CPU: 1.5, Device.CUDA: 3.0}
"""Fixed cost of a trial, and of the checks of its first one where the model is small. On a GPU:
trials in results/h100 took 2 to 5 s, nearly all of it to fork, for the CUDA context, to load
kernels, and to exit."""
NCCL_S = 4.0
"""Assumed addition where several ranks set up NCCL's communicators and take them down."""
COMPILE_S = 7.0
"""Of a trial with compiled blocks, in results/h100-compiled."""
START_S = {Device.CPU: 0.0, Device.CUDA: 45.0}
"""Of a run, before its first trial. On an H100, 19 s from run.json to the end of the first trial,
18 s for the fork servers of DeepSpeed and Lightning beside each other (gaps in results/h100), and 8
s to ask torch for the GPUs."""
RENEWAL_S = 20.0
"""Of one renewal of the fork servers (``bench.run.runner``) on an H100."""
OFFLOADED_BYTES_PER_S = 2e10
"""Assumed rate of copies between device and pinned memory of the host, as over PCIe 4.0 x16, and of
the update on the host, which reads parameters, gradients and moments and writes all but the
gradients (28 bytes per element in fp32)."""
COPIED_BYTES_PER_S = 2e9
"""Bytes per second that are copied between device and new memory of the host, or read from a file
that is in memory."""


class TrialSeconds(NamedTuple):
    """What the trials of a cell take, in seconds."""

    each: float | None
    """None if unknown."""
    once: float = 0.0
    """What its extra passes add to one of them, if they are expensive."""


@dataclass(frozen=True, slots=True)
class EarlierWalls:
    """Wall times of a cell's good trials in seconds."""

    timed: list[float] = field(default_factory=list)
    """Of those with the time pass alone."""
    checked: list[float] = field(default_factory=list)
    """Of those with extra passes."""

    def instead_of(self, estimated: TrialSeconds) -> TrialSeconds:
        """What follows from the medians; what the extra passes add is estimated if none has run."""
        if not self.timed:
            return TrialSeconds(statistics.median(self.checked))
        each = statistics.median(self.timed)
        if not self.checked:
            return TrialSeconds(each, estimated.once)
        return TrialSeconds(each, max(0.0, statistics.median(self.checked) - each))


def earlier_walls(results: Path, gpus: Sequence[Mapping[str, object]]) -> dict[str, EarlierWalls]:
    """The walls of the runs under ``results`` on such GPUs, or on such a CPU, by cell id.

    What cannot be read is left out, since the estimate is only less precise without it.
    """
    if gpus:
        asked = _hardware({"gpus": gpus}, has_gpus=True)
    else:
        asked = _hardware(machine.machine(), has_gpus=False)
    found: dict[str, EarlierWalls] = {}
    for path in results.glob(f"*/{JOURNAL}"):
        try:
            about = json.loads(read_regular(path.with_name(MANIFEST), INPUT_BYTES))["machine"]
            if _hardware(about, has_gpus=bool(gpus)) != asked:
                continue
            lines = read_regular(path, INPUT_BYTES).splitlines()
        except (OSError, ValueError, LookupError, TypeError):
            continue
        for line in lines:
            try:
                record = json.loads(line)
                cell_id, wall_s = record["cell_id"], float(record["wall_s"])
                has_extra = set(record.get("passes", ())) > {"time"}
                if record["status"] != "ok":
                    continue
                walls = found.setdefault(cell_id, EarlierWalls())
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            if has_extra:
                walls.checked.append(wall_s)
            else:
                walls.timed.append(wall_s)
    return found


def _hardware(facts: Mapping[str, Any], *, has_gpus: bool) -> tuple[object, ...]:
    """What of a machine decides how long a trial takes: the kind of its GPUs, or its CPU.

    Raises LookupError or TypeError for what is no description of such a machine.
    """
    if not has_gpus:
        return facts["cpu"], facts["cores"]
    name = str(facts["gpus"][0]["name"])
    kind = kind_of(name)
    if kind is None or "mig" in name.casefold():
        return (name,)
    return (kind,)


def costs(
    cells: Sequence[Cell], gpus: Sequence[Mapping[str, object]], skipped: Collection[str]
) -> dict[str, Cost]:
    """The cost of each cell by id, on these GPUs, or on this CPU if there are none.

    ``skipped`` ids are not run. Times are those of earlier runs on such a machine, otherwise
    estimates; peaks are those of ``bench.forecast.fit``. For compiled blocks they are those of uncompiled ones,
    which need more.
    """
    walls = earlier_walls(RESULTS, gpus)
    passes = passes_of([cell for cell in cells if cell.cell_id not in skipped])
    found = {}
    for cell in cells:
        seconds = _seconds(cell, passes.get(cell.cell_id, ()), gpus)
        earlier = walls.get(cell.cell_id)
        if earlier is not None:
            seconds = earlier.instead_of(seconds)
        peak = predicted_bytes(dataclasses.replace(cell, compiled=False))
        found[cell.cell_id] = Cost(seconds.each, peak, seconds.once)
    return found


def _seconds(
    cell: Cell, passes: Sequence[str], gpus: Sequence[Mapping[str, object]]
) -> TrialSeconds:
    """Estimated seconds of the trials with these extra passes.

    The size of a model of one's own is unknown, and so is the time on fake tensors, which Python's
    overhead dominates.
    """
    rate = _flops_per_s(cell, gpus)
    if cell.workload != "llama" or not cell.world.computes or rate is None:
        return TrialSeconds(None)
    step = _step(cell, rate)
    if cell.device is not Device.CPU:
        return _on_gpu(cell, passes, step)
    num_extra = 1 + SETTLED_WINDOWS + 1  # update; memory and collectives
    num_extra += SETTLED_WINDOWS + CPU_WINDOWS + 1  # dispatch; accumulation has a tiny model
    timed_s, once_s = TRIAL_S[cell.device] + cell.windows * step.serial, 0.0
    if passes:
        once_s = num_extra * step.serial
    return TrialSeconds(timed_s, once_s)


def _step(cell: Cell, rate: float) -> TimeEstimate:
    """An optimizer step at a rate in FLOP/s."""
    recomputes = cell.activation_checkpointing or cell.backend == REFERENCE
    computed = dataclasses.replace(cell, activation_checkpointing=recomputes)
    compute_s, _ = compute_seconds(computed, rate)
    if cell.device is Device.CPU or cell.world.shares_gpus:
        compute_s *= cell.num_processes
    sent = None
    if cell.num_processes > 1:
        sent = predicted_communication(cell, LINKS[cell.device])
    if sent is None:
        return TimeEstimate(compute_s, compute_s)
    return sent.beside(compute_s)


def _on_gpu(cell: Cell, passes: Sequence[str], step: TimeEstimate) -> TrialSeconds:
    """The trials of a cell on a GPU, whose steps take at least as long as launching them."""
    size = SIZES[cell.model]
    layers = cell.accumulate * size.num_layers
    step_s = max(step.overlapped, layers * _layer_s(cell)) + _offload_s(cell)
    around_s, once_s = _around_s(cell), 0.0
    for name in passes:
        if name == "update":
            # Weights go to the host, and back with the reference's change to be compared.
            once_s += step_s + around_s + 3 * 4 * size.num_parameters / COPIED_BYTES_PER_S
        elif name in WATCHED_LAYER_S:
            watched_s = max(step_s, layers * WATCHED_LAYER_S[name])
            once_s += (SETTLED_WINDOWS + 1) * watched_s + around_s
        if name == "dispatch":
            once_s += size.num_layers * PLAIN_LAYER_S
    fixed_s = TRIAL_S[cell.device]
    if cell.num_processes > 1:
        fixed_s += NCCL_S
    if cell.compiled:
        fixed_s += COMPILE_S
    return TrialSeconds(fixed_s + around_s + cell.windows * step_s, once_s)


def _around_s(cell: Cell) -> float:
    """What a framework copies between device and host before and after its training, on one rank.

    In bf16 the bench keeps the weights for DeepSpeed's masters on the host, and Lightning's trainer
    ends by moving weights, gradients and moments there (strategies/strategy.py: ``teardown``). In
    results/h100-1b that made a trial 4 s longer under ZeRO-2, 8 under ZeRO-3, and 15 under
    Lightning's DDP.
    """
    backend, size = BUILT_IN.get(cell.backend), SIZES[cell.model]
    if backend is None:
        return 0.0
    copied = 0.0
    if issubclass(backend, ZeroBackend) and cell.precision is Precision.BF16:
        copied += 2 * 4 * size.num_parameters
    if backend.framework.startswith("Lightning "):
        held = 4.0 * 4 * size.num_parameters
        if backend.sharding is not Sharding.NONE:
            held /= cell.world_size
        copied += held
    return copied / COPIED_BYTES_PER_S


def _layer_s(cell: Cell) -> float:
    """The time to launch a layer's forward and backward.

    Of compiled blocks, and of backends of one's own, it is taken to be that of DDP.
    """
    backend = BUILT_IN.get(cell.backend)
    if backend is None:
        return GPU_LAYER_S[Sharding.NONE]
    return GPU_LAYER_S[backend.sharding]


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
    """Seconds in which fork servers are renewed, between pairs of repeats of ``trials_s``."""
    if not any(cell.device is Device.CUDA for cell in cells):
        return 0.0
    return RENEWAL_S * min((repeats - 1) // 2, int(trials_s / RENEWED_FOR_S))


def _flops_per_s(cell: Cell, gpus: Sequence[Mapping[str, object]]) -> float | None:
    """The rate of a GPU, or of all cores; None for an unknown GPU."""
    if cell.device is Device.CPU:
        return CPU_FLOPS_PER_CORE * machine.num_cores()
    name = ""
    if gpus:
        name = str(gpus[0]["name"])
    peak = peak_flops(name, Precision.BF16)
    if peak is None:
        return None
    if cell.precision is Precision.FP32:
        return GPU_FP32_FLOPS
    return peak * GPU_EFFICIENCY
