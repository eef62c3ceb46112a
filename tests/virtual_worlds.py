"""Several cells, one after the other, in one process group: pretended or over gloo."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bench.backends.base import registry
from bench.launch.launcher import Launcher
from bench.measure.trial import RankTrial
from bench.plan.cell import Cell, Status
from bench.plan.task import Spec, Task
from tests.factories import make_cell


@dataclass(kw_only=True)
class Cells(Task):
    """Cells of one world, all virtual or none."""

    work: ClassVar[str] = "tests.virtual_worlds:work"
    backend: str = "lightning-deepspeed-zero2"
    """Whose packages are imported before: all there are."""

    cells: tuple[Cell, ...]
    passes: tuple[str, ...]


def work(task: Cells, rank: int, device: Any) -> dict[str, Any]:
    """One rank's part."""
    trials = {}
    for cell in task.cells:
        spec = Spec(cell=cell, passes=task.passes, folder=task.folder, reference="")
        started = time.process_time()
        trial = RankTrial(spec, rank, device, registry()[cell.backend]).run()
        trials[cell.backend] = {**trial, "cpu_s": time.process_time() - started, "peak_rss": peak_rss()}
    return {"status": Status.OK, "trials": trials}


def peak_rss() -> int:
    """Bytes of memory that this process had at most."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def world_cell(backend: str, world_size: int, **changes: Any) -> Cell:
    """One sample per micro-batch and two micro-batches per window, of a small model that nothing divides."""
    values = {"accumulate": 2, "sequence_length": 8, "warmup_windows": 1, "timed_windows": 2}
    values |= {"workload": "tests.own_workload:Uneven", "model": "2"}
    values |= {"backend": backend, "world_size": world_size} | changes
    return make_cell(global_batch_size=values["accumulate"] * world_size, **values)


def measure(
    launcher: Launcher, folder: Path, cells: Sequence[Cell], passes: tuple[str, ...] = ("collectives", "memory")
) -> dict[str, Any]:
    """What rank 0 of the cells' common world found out, by backend."""
    first = cells[0]
    task = Cells(
        cells=tuple(cells),
        world_size=first.world_size,
        world=first.world,
        device=first.device,
        folder=str(folder),
        passes=passes,
    )
    outcome = launcher.run(task, 300)
    assert outcome.status is Status.OK, f"{outcome.reason}\n{outcome.traceback}"
    trials: dict[str, Any] = outcome.ranks[0]["trials"]
    return trials
