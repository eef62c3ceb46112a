"""The peak of a cell's rank 0, measured by a trial on fake tensors: what runs is the framework itself."""

from __future__ import annotations

import dataclasses
import tempfile

from bench.backends import blocks
from bench.errors import InputError
from bench.judge.formulas import BUILT_IN
from bench.launch import gpus
from bench.launch.launcher import Launcher
from bench.plan.cell import Cell, Device, Status
from bench.plan.task import Spec

TIMEOUT_S = 3600
"""Sharding fake tensors for a thousand ranks takes over ten minutes."""


def exact_peak(cell: Cell, name: str) -> int:
    """Bytes at the peak, less the tokens and constants that the bench and the model's buffers hold.

    Raises InputError for a backend or a device that cannot do it.
    """
    backend = BUILT_IN[name]
    replicas = cell.replicate if backend.replicate else 0
    cell = dataclasses.replace(cell, backend=name, replicate=replicas, virtual=True, fake_tensors=True)
    lacks = blocks.refusal(cell, backend) or backend.missing(cell.device)
    if cell.device is Device.CUDA and not gpus.gpus():
        lacks = "no GPU is visible; add --device cpu, on which ZeRO has one bucket less and fp32 attention smaller keys"
    if lacks:
        raise InputError(f"--exact: {lacks}")
    with Launcher(cell.device) as launcher, tempfile.TemporaryDirectory(prefix="accumulation-bench-") as folder:
        outcome = launcher.run(Spec(cell=cell, passes=("memory",), folder=folder, reference=""), TIMEOUT_S)
    if outcome.status is not Status.OK:
        raise InputError(f"--exact: the trial ended as {outcome.status}: {outcome.reason}")
    memory: dict[str, int] = outcome.ranks[0]["memory"]
    return memory["peak"] - memory["peak_other"]
