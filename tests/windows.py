"""Settled windows of many cells, counted in one process group: starting one takes longer than most windows."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bench.errors import UnsupportedError
from bench.judge.formulas import layout_of
from bench.launch.launcher import Launcher
from bench.plan.cell import Cell, Device
from bench.plan.task import Spec, Task
from bench.workload import load
from bench.workload.layout import Layout
from tests.factories import make_cell

UNEVEN = "tests.own_workload:Uneven"
PACKAGES_OF = "lightning-deepspeed-zero2"
"""A backend that needs all frameworks; the fork server imports what it needs."""
TIMEOUT_S = 580.0
Amounts = dict[tuple[str, str], tuple[int, int]]
"""Calls and payload bytes by operation and dtype."""


@dataclass(kw_only=True)
class Windows(Task):
    """The collectives pass of each cell, all of one world size."""

    work: ClassVar[str] = "tests.windows:work"
    backend: str = PACKAGES_OF

    cells: tuple[Cell, ...]


def work(task: Windows, rank: int, device: Any) -> dict[str, Any]:
    """One rank's part."""
    from bench.backends.base import registry
    from bench.measure.collectives import CollectiveCounter
    from bench.measure.trial import RankTrial

    CollectiveCounter().self_test(device)
    counted: list[Any] = []
    for cell in task.cells:
        gc.collect()
        spec = Spec(cell=cell, passes=("collectives",), folder=task.folder, reference="")
        try:
            counted.append(RankTrial(spec, rank, device, registry()[cell.backend]).run()["collectives"])
        except UnsupportedError:
            counted.append(None)
    return {"status": "ok", "counted": counted}


def counted(cells: Sequence[Cell], folder: Path) -> list[list[Amounts | None]]:
    """For each cell what each of its ranks counted; None where a backend refused. All cells have one world size."""
    with Launcher(Device.CPU) as launcher:
        outcome = launcher.run(
            Windows(cells=tuple(cells), world_size=cells[0].world_size, folder=str(folder)), TIMEOUT_S
        )
    assert outcome.ranks, f"{outcome.reason}\n{outcome.traceback}"
    return [[_amounts(of_rank["counted"][i]) for of_rank in outcome.ranks] for i in range(len(cells))]


def _amounts(rows: list[dict[str, Any]] | None) -> Amounts | None:
    return None if rows is None else {(r["op"], r["dtype"]): (r["calls"], r["payload_bytes"]) for r in rows}


def layout(cell: Cell) -> Layout:
    """The layout of the cell's model: calculated for a shipped one, else read off the built model."""
    if found := layout_of(cell):
        return found
    from bench.workload.structure import record

    workload = load(cell, None)
    model = workload.model()
    return record(model, workload.blocks(model), workload.loss, workload.data(1))


def cells(backends: Iterable[str], points: Iterable[tuple[int, int]], **changes: Any) -> list[Cell]:
    """Cells of a short sequence for each backend and each N, W."""
    made = []
    for n, w in points:
        batch = changes.get("global_batch_size", n * w)
        values = {"sequence_length": 4, "global_batch_size": batch, "accumulate": n, "world_size": w}
        made += [make_cell(**{**values, **changes, "backend": name}) for name in backends if name != "reference"]
    return made
