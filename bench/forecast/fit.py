"""Which cells fit into a GPU's memory, by prediction; ``run`` and ``plan`` skip the others.

``exact_peak`` measures the peak of rank 0 by a trial on fake tensors: what runs is the framework
itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from bench.backends import blocks
from bench.errors import InputError
from bench.forecast.prediction import Prediction
from bench.judge.formulas import BUILT_IN, expect, layout_of
from bench.launch import gpus
from bench.launch.launcher import Launcher, LauncherError
from bench.plan.cell import REFERENCE, Cell, Device, Status
from bench.plan.task import Spec
from bench.workload import slice_size


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory of a GPU that no prediction counts."""

    what: str
    num_bytes: int
    """Of each rank on the GPU."""
    least: float
    """Share of a rank's peak, on top: the smallest that was published."""
    most: float
    """The largest."""
    source: str


CONTEXT = Reserve("CUDA context", 781 * 2**20, 0.0, 0.0, "github.com/pytorch/pytorch/issues/34323")
NCCL = Reserve(
    "one NCCL communicator",
    688 * 2**20,
    0.0,
    0.0,
    "github.com/NVIDIA/nccl/issues/964, on A100 with NVLink",
)
FRAGMENTS = Reserve(
    "what the allocator reserves beyond the peak",
    0,
    0.06,
    0.37,
    "published trainings that report both, docs/memory-and-bytes.md",
)
"""tests/studies/test_published_peaks.py compares these shares with the published figures."""


def reserves(*, nccl: bool) -> tuple[Reserve, ...]:
    """What is kept free on a GPU, with its sources."""
    if nccl:
        return (CONTEXT, NCCL, FRAGMENTS)
    return (CONTEXT, FRAGMENTS)


@dataclass(frozen=True, slots=True)
class ReservedBytes:
    """What is kept free beside a peak, in bytes: by the least and the most that was published."""

    least: int
    most: int


def reserve(peak_bytes: int, *, nccl: bool, ranks: int = 1) -> ReservedBytes:
    """What is kept free on a GPU on which so many ranks have this peak each."""
    least = most = 0
    for kept in reserves(nccl=nccl):
        least += ranks * (kept.num_bytes + int(kept.least * peak_bytes))
        most += ranks * (kept.num_bytes + int(kept.most * peak_bytes))
    return ReservedBytes(least, most)


@cache
def predicted_bytes(cell: Cell) -> int | None:
    """The peak of a rank's memory in bytes; None for what is not predicted.

    A reference sees its batch in slices (``bench.workload``), of which the largest counts.
    """
    layout, backend = layout_of(cell), BUILT_IN.get(cell.backend)
    if layout is None or backend is None or Prediction(cell, backend, layout).is_missing:
        return None
    if backend.name == REFERENCE:
        size = slice_size(cell.global_batch_size, cell.sequence_length)
        cell = dataclasses.replace(cell, accumulate=2, global_batch_size=2 * size)
    if expect(cell, layout) is None:
        return None
    return Prediction(cell, backend, layout).memory.peak


def peaks(cells: Sequence[Cell]) -> dict[str, int]:
    """The predicted peaks by cell id, without references, whose memory is not measured."""
    found = {}
    for cell in cells:
        peak = predicted_bytes(cell)
        if peak is not None and not cell.is_reference:
            found[cell.cell_id] = peak
    return found


def too_large(cells: Sequence[Cell], memory_bytes: int, num_gpus: int) -> dict[str, str]:
    """Why cells on CUDA do not fit into so many GPUs with so much memory each, by id.

    Only those are in it that do not fit. Little is kept free: the least that was published. A cell
    whose reference does not fit could not be checked, and so does not fit either. Ranks that share
    a GPU (``bench.launch.rank``) are assumed to be at their peaks at the same time.
    """
    found: dict[str, str] = {}
    for cell in cells:
        if cell.device is not Device.CUDA or not cell.world.computes:
            continue
        reason = _too_large(cell, memory_bytes, num_gpus)
        if not reason and cell.world.has_values:
            reason = _too_large(cell.reference(), memory_bytes, num_gpus)
        if reason:
            found[cell.cell_id] = reason
    return found


def _too_large(cell: Cell, memory_bytes: int, num_gpus: int) -> str:
    """Why one cell does not fit; empty if it does."""
    shared, peak = cell.world.shares_gpus, predicted_bytes(cell)
    ranks = 1
    if shared:
        ranks = -(-cell.world_size // num_gpus)
    if peak is None:
        return ""
    free = reserve(peak, nccl=cell.num_processes > 1 and cell.uses_nccl, ranks=ranks).least
    if ranks * peak <= memory_bytes - free:
        return ""
    who = cell.model
    if cell.is_reference:
        who = f"the fp32 reference of {cell.model}"
    if ranks > 1:
        who += f" on {ranks} ranks of one GPU"
    has = f"the GPU has {memory_bytes / 2**30:.0f} GiB"
    if ranks * peak <= memory_bytes:
        has += f", of which at least {free / 2**30:.1f} GiB are kept free"
    return f"{who} needs {ranks * peak / 2**30:.0f} GiB by prediction, {has}"


TIMEOUT_S = 3600
"""Sharding fake tensors for a thousand ranks takes over ten minutes."""


def exact_peak(cell: Cell, name: str) -> int:
    """Bytes at the peak, less the tokens and constants that the bench and the model's buffers hold.

    Raises InputError for a backend or a device that cannot do it.
    """
    backend = BUILT_IN[name]
    replicas = 0
    if backend.replicate:
        replicas = cell.replicate
    cell = dataclasses.replace(
        cell, backend=name, replicate=replicas, virtual=True, fake_tensors=True
    )
    lacks = blocks.refusal(cell, backend)
    if not lacks:
        lacks = backend.missing(cell.device)
    if cell.device is Device.CUDA and not gpus.gpus():
        lacks = (
            "no GPU is visible; add --device cpu, on which ZeRO has one bucket less and fp32 "
            "attention smaller keys"
        )
    if lacks:
        raise InputError(f"--exact: {lacks}")
    try:
        with Launcher(cell.device) as launcher:
            outcome = launcher.run(Spec(cell=cell, passes=("memory",), reference=""), TIMEOUT_S)
    except LauncherError as error:
        raise InputError(f"--exact: {error}") from error
    if outcome.status is not Status.OK:
        raise InputError(f"--exact: the trial ended as {outcome.status}: {outcome.reason}")
    memory: dict[str, int] = outcome.ranks[0]["memory"]
    return memory["peak"] - memory["peak_other"]
