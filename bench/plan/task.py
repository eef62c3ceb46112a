"""What a process group is asked to do: the passes of a cell and their windows; it travels to the ranks as JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from bench import fields
from bench.plan.cell import Cell, Device
from bench.plan.world import World

EXTRA_PASSES = ("update", "collectives", "memory", "accumulation", "dispatch")
"""Passes that run once per cell; their answers do not vary from repeat to repeat."""
COUNTING_PASSES = ("collectives", "memory")
"""Those of them that compare no values, and so mean something in every world."""
CUDA_PASSES = ("exposure",)
"""The same, of cells on CUDA with other ranks to wait for over NCCL."""
AT_ONE_N = ("collectives", "memory", "accumulation", "dispatch")
"""Passes over NCCL of one N among cells that differ in nothing else: what they count is in proportion to N or does not
depend on it, and they watch every operator in Python, which takes minutes where N is large."""


def extra_passes(cell: Cell) -> tuple[str, ...]:
    """The passes that a cell has beside the time pass.

    What is compiled runs by itself, out of sight of the memory and dispatch passes. Of the reference only the update is
    asked for on CUDA, where it may take longer than all else.
    """
    on_cuda = cell.device is Device.CUDA
    if on_cuda and cell.is_reference:
        return ("update",)
    own = EXTRA_PASSES if cell.world.has_values else COUNTING_PASSES
    asked = (*own, *(CUDA_PASSES if on_cuda and cell.world.times_communication else ()))
    return tuple(name for name in asked if not (cell.compiled and name in ("memory", "dispatch")))


def passes(cells: Sequence[Cell]) -> dict[str, tuple[str, ...]]:
    """The passes of each cell of a run, by id: ``time`` before others, where anything is computed.

    Those of AT_ONE_N are of the N at which most backends can be held side by side, the smallest of several; not of 1,
    where nothing is accumulated, if there is another.
    """
    found = {cell: (*["time"] * cell.world.computes, *extra_passes(cell)) for cell in cells}
    watched = [cell for cell in cells if "exposure" in found[cell]]
    beside = Counter(dataclasses.replace(cell, backend="") for cell in watched)
    chosen: dict[Cell, Cell] = {}

    def rank(cell: Cell) -> tuple[bool, int, int]:
        return cell.accumulate == 1, -beside[dataclasses.replace(cell, backend="")], cell.accumulate

    for cell in sorted(watched, key=rank):
        if chosen.setdefault(dataclasses.replace(cell, accumulate=1, twin=""), cell) != cell:
            found[cell] = tuple(name for name in found[cell] if name not in AT_ONE_N)
    return {cell.cell_id: asked for cell, asked in found.items()}


SETTLED_WINDOWS = 2
"""Windows before the counted one in the collectives and memory passes.

DDP rebuilds its buckets in the first window, ZeRO-3 traces its modules in it, and AdamW makes its state at its end.
"""

CPU_WINDOWS = 2
"""Windows whose CPU time is taken; the smaller counts, since whatever disturbs a process only adds to it."""


@dataclass(kw_only=True)
class Task:
    """What a process group is asked to do. It travels to the ranks as JSON."""

    entry: ClassVar[str] = "bench.launch.rank:main"
    """``module:function``, called on every rank with the task's JSON."""
    work: ClassVar[str]
    """``module:function``, called by ``entry`` as ``work(task, rank, device)``; what it returns is plain JSON."""

    backend: str
    """Name of the backend, whose packages the fork server imports."""
    world_size: int
    """W."""
    folder: str
    """Where each rank writes ``rank<r>.json``, and torch elastic its logs."""
    device: Device = Device.CPU
    threads: int = 1
    """Threads of each rank for operators on the CPU."""
    seed: int = 0
    world: World = World.REAL
    """What the ranks are."""

    @property
    def num_processes(self) -> int:
        """Ranks that exist."""
        return self.world_size if self.world.has_all_ranks else 1

    def to_json(self) -> str:
        """One line."""
        kind = type(self)
        return json.dumps({**dataclasses.asdict(self), "kind": f"{kind.__module__}:{kind.__qualname__}"})

    @staticmethod
    def from_json(text: str) -> Task:
        """The inverse of ``to_json``."""
        values = json.loads(text)
        module, _, name = values.pop("kind").partition(":")
        task: Task = fields.read(getattr(importlib.import_module(module), name), values)
        return task


@dataclass(kw_only=True)
class Spec(Task):
    """One trial: the passes of a cell. Who takes part follows from the cell."""

    work: ClassVar[str] = "bench.measure.trial:work"

    cell: Cell
    passes: tuple[str, ...]
    """``time`` and any of ``extra_passes``, in order."""
    reference: str
    """The safetensors file of the reference's update: written by the reference's update pass, read by all others."""
    corpus: str | None = None
    """Path of the corpus file, if the cell names one."""
    backend: str = field(init=False)
    world_size: int = field(init=False)
    device: Device = field(init=False)
    seed: int = field(init=False)
    world: World = field(init=False)

    def __post_init__(self) -> None:
        cell = self.cell
        self.backend, self.device, self.seed = cell.backend, cell.device, cell.seed
        self.world_size, self.world = cell.world_size, cell.world
