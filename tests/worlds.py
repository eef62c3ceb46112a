"""Several cells, one after the other, in one process group: pretended or over gloo."""

from __future__ import annotations

import contextlib
import gc
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bench.backends.base import registry
from bench.errors import UnsupportedError
from bench.judge.formulas import layout_of
from bench.launch.launcher import Launcher
from bench.measure.trial import RankTrial
from bench.plan.cell import Cell, Status
from bench.plan.task import Spec, Task
from bench.workload import load
from bench.workload.layout import Layout, record
from tests.factories import make_cell

UNEVEN = "tests.own_workload:Uneven"
"""A model that nothing divides."""
Found = dict[str, Any]
"""What a rank found out about a cell."""


@contextlib.contextmanager
def pretended(world_size: int) -> Iterator[None]:
    """A process group of which only this rank exists: shapes are true, and values are not."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(kw_only=True)
class Cells(Task):
    """Cells of one world, all virtual or none."""

    work: ClassVar[str] = "tests.worlds:work"
    backend: str = "lightning-deepspeed-zero2"
    """Whose packages are imported before: all there are."""

    cells: tuple[Cell, ...]
    passes: tuple[str, ...]


def work(task: Cells, rank: int, device: Any) -> dict[str, Any]:
    """One rank's part: what it found of each cell, or None where the backend refused."""
    trials: list[Found | None] = []
    for cell in task.cells:
        gc.collect()
        spec = Spec(cell=cell, passes=task.passes, folder=task.folder, reference="")
        try:
            trial = RankTrial(spec, rank, device, registry()[cell.backend]).run()
        except UnsupportedError:
            trials.append(None)
        else:
            trials.append(
                {**trial, "peak_rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
            )
    return {"status": Status.OK, "trials": trials}


def world_cell(backend: str, world_size: int, **changes: Any) -> Cell:
    """One sample per micro-batch and two micro-batches per window, of a small model that nothing divides."""
    values = {"accumulate": 2, "sequence_length": 8, "warmup_windows": 1, "timed_windows": 2}
    values |= {
        "workload": UNEVEN,
        "model": "2",
        "backend": backend,
        "world_size": world_size,
    } | changes
    return make_cell(**{"global_batch_size": values["accumulate"] * world_size} | values)


def by_rank(
    launcher: Launcher,
    folder: Path,
    cells: Sequence[Cell],
    passes: tuple[str, ...] = ("collectives", "memory"),
) -> list[list[Found | None]]:
    """What each rank found out about each of the cells, which share a world; None where a backend refused."""
    first = cells[0]
    task = Cells(
        cells=tuple(cells),
        world_size=first.world_size,
        world=first.world,
        device=first.device,
        folder=str(folder),
        passes=passes,
    )
    outcome = launcher.run(task, 550)
    assert outcome.status is Status.OK, f"{outcome.reason}\n{outcome.traceback}"
    return [[rank["trials"][i] for rank in outcome.ranks] for i in range(len(cells))]


def measure(
    launcher: Launcher, folder: Path, cells: Sequence[Cell], *passes: str
) -> dict[str, Found]:
    """What rank 0 of the cells' common world found out, by backend."""
    found = by_rank(launcher, folder, cells, passes or ("collectives", "memory"))
    return {
        cell.backend: ranks[0]
        for cell, ranks in zip(cells, found, strict=True)
        if ranks[0] is not None
    }


def layout(cell: Cell) -> Layout:
    """The layout of the cell's model: calculated for a shipped one, else read off the built model."""
    if found := layout_of(cell):
        return found
    workload = load(cell, None)
    model = workload.model()
    return record(model, workload.blocks(model), workload.loss, workload.data(1))
