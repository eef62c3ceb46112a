"""What a process group is asked to do: the passes of a cell and their windows; it travels to the ranks as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from bench.plan import world
from bench.plan.cell import Cell, Device

EXTRA_PASSES = ("update", "collectives", "memory", "accumulation", "dispatch")
"""Passes that run once per cell; their answers do not vary from repeat to repeat."""
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
    on_cuda = cell.device is Device.CUDA and not cell.virtual
    over_nccl = on_cuda and not cell.shared_gpu
    if on_cuda and cell.is_reference:
        return ("update",)
    asked = (*EXTRA_PASSES, *(CUDA_PASSES if over_nccl else ()))
    return tuple(name for name in asked if not (cell.compiled and name in ("memory", "dispatch")))


def passes(cells: Sequence[Cell]) -> dict[str, tuple[str, ...]]:
    """The passes of each cell of a run, ``time`` before others, by id.

    Those of AT_ONE_N are of the N at which most backends can be held side by side, the smallest of several; not of 1,
    where nothing is accumulated, if there is another.
    """
    found = {cell: ("time", *extra_passes(cell)) for cell in cells}
    watched = [cell for cell in cells if "exposure" in found[cell]]
    beside = Counter(dataclasses.replace(cell, backend="") for cell in watched)
    chosen: dict[Cell, Cell] = {}

    def rank(cell: Cell) -> tuple[bool, int, int]:
        return cell.accumulate == 1, -beside[dataclasses.replace(cell, backend="")], cell.accumulate

    for cell in sorted(watched, key=rank):
        if chosen.setdefault(dataclasses.replace(cell, accumulate=1, twin=""), cell) != cell:
            found[cell] = tuple(name for name in found[cell] if name not in AT_ONE_N)
    return {cell.cell_id: world.passes(cell, asked) for cell, asked in found.items()}


@dataclass(kw_only=True)
class Spec:
    """What one trial is asked to do; travels as JSON."""

    entry: ClassVar[str] = "bench.measure.trial:run_rank"

    cell: Cell
    passes: tuple[str, ...]
    """``time`` and any of ``extra_passes``, in order."""
    folder: str
    """Where each rank writes ``rank<r>.json``."""
    reference: str
    """The safetensors file of the reference's update: written by the reference's update pass, read by all others."""
    corpus: str | None = None
    """Path of the corpus file, if the cell names one."""
    threads: int = 1
    """Threads of each rank for operators on the CPU."""

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return self.cell.backend

    @property
    def world_size(self) -> int:
        """Number of processes: the ranks that exist, which is one in a virtual world."""
        return 1 if self.cell.virtual else self.cell.world_size

    def to_json(self) -> str:
        """One line."""
        return json.dumps({**dataclasses.asdict(self), "cell": self.cell.to_dict()})

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """The inverse of ``to_json``."""
        values = json.loads(text)
        return cls(**{**values, "cell": Cell.from_dict(values["cell"]), "passes": tuple(values["passes"])})


SETTLED_WINDOWS = 2
"""Windows before the counted one in the collectives and memory passes.

DDP rebuilds its buckets in the first window, ZeRO-3 traces its modules in it, and AdamW makes its state at its end.
"""

CPU_WINDOWS = 2
"""Windows whose CPU time is taken; the smaller counts, since whatever disturbs a process only adds to it."""


class Task(Protocol):
    """What a process group is started for."""

    entry: ClassVar[str]
    """``module:function``, called on every rank with the task's JSON; see ``bench.launch.rank.live``."""
    folder: str
    """Where each rank writes ``rank<r>.json``, and torch elastic its logs."""

    @property
    def backend(self) -> str:
        """Name of the backend, whose packages the fork server imports."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def to_json(self) -> str:
        """One line."""
