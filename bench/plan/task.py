"""Tasks of a process group, such as the passes of a cell; they travel to the ranks as JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from bench import validation
from bench.plan.cell import Cell, Device
from bench.plan.models import CONFIG_FILES
from bench.plan.world import World

EXTRA_PASSES = ("update", "collectives", "memory", "accumulation", "dispatch")
"""Passes that run once per cell, because their results do not vary between repeats."""
COUNTING_PASSES = ("collectives", "memory")
"""The passes that compare no values, so they are valid in every world."""
CUDA_PASSES = ("exposure",)
"""Passes that run once per cell on CUDA whose ranks communicate over NCCL."""
SEES_NO_COMPILED_CODE = ("memory", "dispatch")
"""Passes that see operators one by one."""
AT_ONE_N = ("collectives", "memory", "accumulation", "dispatch")
"""Passes that on CUDA run at only one N of otherwise equal cells: what they count is proportional
to N or independent of it, and they intercept every operator in Python, which takes minutes for a
large N."""


def extra_passes(cell: Cell) -> tuple[str, ...]:
    """The passes of a cell besides the time pass.

    Compiled code is invisible to the memory and dispatch passes. References on CUDA run only the
    update pass, because they may take longer than everything else.
    """
    on_cuda = cell.device is Device.CUDA
    if on_cuda and cell.is_reference:
        return ("update",)
    asked: tuple[str, ...] = EXTRA_PASSES
    if not cell.world.has_values:
        asked = COUNTING_PASSES
    if cell.uses_nccl:
        asked = (*asked, *CUDA_PASSES)
    if cell.compiled:
        asked = tuple(name for name in asked if name not in SEES_NO_COMPILED_CODE)
    return asked


def passes(cells: Sequence[Cell]) -> dict[str, tuple[str, ...]]:
    """The passes of each cell of a run, by id; ``time`` comes first if anything is computed.

    The passes of AT_ONE_N run at the N shared by the most backends, the smallest of several. N = 1,
    where nothing is accumulated, is used only if there is no other.
    """
    found = {cell: extra_passes(cell) for cell in cells}
    watched = [cell for cell in cells if "exposure" in found[cell]]
    num_backends = Counter(_without_backend(cell) for cell in watched)

    def rank(cell: Cell) -> tuple[bool, int, int]:
        return cell.accumulate == 1, -num_backends[_without_backend(cell)], cell.accumulate

    chosen: dict[Cell, Cell] = {}
    """The cell that runs the passes of AT_ONE_N, by what is equal of those that differ in N."""
    for cell in sorted(watched, key=rank):
        of_any_n = dataclasses.replace(cell, accumulate=1, twin="")
        if chosen.setdefault(of_any_n, cell) != cell:
            found[cell] = tuple(name for name in found[cell] if name not in AT_ONE_N)
    of_cells = {}
    for cell, asked in found.items():
        of_cells[cell.cell_id] = asked
        if cell.world.computes:
            of_cells[cell.cell_id] = ("time", *asked)
    return of_cells


def _without_backend(cell: Cell) -> Cell:
    """What is equal of the cells of all backends."""
    return dataclasses.replace(cell, backend="", replicate=0)


SETTLED_WINDOWS = 2
"""Windows before the counted one in the collectives and memory passes.

In the first window DDP rebuilds its buckets, ZeRO-3 traces its modules, and AdamW creates its
state. """

CPU_WINDOWS = 2
"""Windows whose CPU time is measured. The minimum counts, because disturbances only add time."""


@dataclass(kw_only=True)
class Task:
    """A task of a process group, serialized as JSON."""

    entry: ClassVar[str] = ""
    """``module:function``, called on every rank with the task's JSON; empty for that of
    ``bench.launch``."""
    work: ClassVar[str] = ""
    """``module:function``, called by ``entry`` as ``work(task, rank, device)``; returns JSON. Empty
    for a trial."""

    backend: str
    """Name of the backend; the fork server imports its packages."""
    world_size: int
    folder: str = ""
    """Folder for each rank's ``rank<r>.json`` and torch elastic's logs; by default one that is
    removed at the end."""
    device: Device = Device.CPU
    threads: int = 1
    """CPU threads per rank for operators."""
    seed: int = 0
    world: World = World.REAL
    shared_nccl: bool = False
    """Whether ranks that share a GPU communicate over NCCL."""
    num_nodes: int = 1
    plugin: str = ""
    """``module:Class`` of a backend of another package, the only one whose module the ranks import;
    set by the launcher."""

    @property
    def num_processes(self) -> int:
        if self.world.has_all_ranks:
            return self.world_size
        return 1

    def to_json(self) -> str:
        kind = type(self)
        return json.dumps(
            {**dataclasses.asdict(self), "kind": f"{kind.__module__}:{kind.__qualname__}"}
        )

    @staticmethod
    def from_json(text: str) -> Task:
        values = json.loads(text)
        module, _, name = values.pop("kind").partition(":")
        task: Task = validation.read(getattr(importlib.import_module(module), name), values)
        return task


@dataclass(kw_only=True)
class Spec(Task):
    """One trial: the passes of a cell. The fields of the group follow from the cell."""

    cell: Cell
    passes: tuple[str, ...]
    """``time`` and any of ``extra_passes``, in order."""
    reference: str
    """The safetensors file with the reference's update: written by the reference's update pass,
    read by all others."""
    corpus: str | None = None
    """Path of the corpus file, if the cell uses one."""
    config: str | None = None
    """Path of the config of transformers that the cell's workload names; found by itself."""
    backend: str = field(init=False)
    world_size: int = field(init=False)
    device: Device = field(init=False)
    seed: int = field(init=False)
    world: World = field(init=False)
    shared_nccl: bool = field(init=False)
    num_nodes: int = field(init=False)

    def __post_init__(self) -> None:
        cell = self.cell
        self.backend, self.device, self.seed = cell.backend, cell.device, cell.seed
        self.world_size, self.world, self.num_nodes = cell.world_size, cell.world, cell.num_nodes
        self.shared_nccl = cell.shared_nccl
        if self.config is not None:
            CONFIG_FILES[cell.workload] = Path(self.config)
        elif cell.workload in CONFIG_FILES:
            self.config = str(CONFIG_FILES[cell.workload])
