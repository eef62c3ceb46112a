"""The dtype in which each backend sums gradients, and the error of the sum, as measured.

Each backend is measured in a process group of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from bench.backends.base import Backend, only
from bench.errors import UnsupportedError
from bench.launch.launcher import Launcher
from bench.measure.accumulation_dtype import accumulator, error
from bench.plan.cell import Cell, Device, Precision, Status
from bench.plan.task import Task

if TYPE_CHECKING:
    import torch

Row: TypeAlias = dict[str, Any]
"""A row of the table, or what a rank returns, as plain JSON."""
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Values of N for ``error``."""
TIMEOUT_S = 300.0
"""Of all probes of one backend."""


@dataclass(kw_only=True)
class AccumulationTask(Task):
    """The probes of dtype and error for one backend, in each precision."""

    work: ClassVar[str] = "bench.audit.dtypes:work"

    precisions: tuple[Precision, ...]
    windows: tuple[int, ...]
    """Values of N for ``error``."""


def work(task: AccumulationTask, rank: int, device: torch.device) -> Row:
    """One rank's part; see ``bench.plan.task.Task``."""
    backend = only(task.backend, task.plugin)
    rows = [_row(task, precision, backend, rank, device) for precision in task.precisions]
    return {"status": Status.OK, "rows": rows}


def _row(
    task: AccumulationTask,
    precision: Precision,
    backend: type[Backend],
    number: int,
    device: torch.device,
) -> Row:
    """Both probes in one precision; ``errors`` has the error for each N."""
    cell = Cell(
        backend=task.backend,
        accumulate=4,
        world_size=task.world_size,
        global_batch_size=4 * task.world_size,
        sequence_length=1,
        precision=precision,
        device=task.device,
        replicate=backend.replicate,
    )
    gc.collect()  # frees the previous row, whose frameworks leave reference cycles
    row: Row = {
        "backend": task.backend,
        "precision": precision,
        "world_size": task.world_size,
    }
    try:
        row |= accumulator(backend, cell, number, device)
        row["errors"] = [error(backend, cell, number, device, n) for n in task.windows]
    except UnsupportedError as refusal:  # on all ranks
        row |= {"dtype": Status.UNSUPPORTED, "reason": str(refusal)}
    return row


def table(
    backends: Sequence[str],
    precisions: Sequence[Precision],
    windows: Sequence[int],
    *,
    world_size: int = 2,
    device: Device = Device.CPU,
) -> Iterator[Row]:
    """A row per backend and precision, as measured by rank 0.

    ``dtype`` is the status of one that failed.
    """
    with Launcher(device) as launcher:
        for name in backends:
            task = AccumulationTask(
                backend=name,
                world_size=world_size,
                precisions=tuple(precisions),
                windows=tuple(windows),
                device=device,
            )
            outcome = launcher.run(task, TIMEOUT_S)
            if outcome.ranks:
                yield from outcome.ranks[0]["rows"]
                continue
            for precision in precisions:
                yield {
                    "backend": name,
                    "precision": precision,
                    "dtype": outcome.status,
                    "reason": outcome.reason,
                }


def row_text(row: Row) -> str:
    """One line of the table for people."""
    text = f"{row['backend']:36} {row['precision']:5} {row['dtype']:12}"
    if "significand_bits" not in row:
        return f"{text} {row.get('reason', '')}".rstrip()
    text += f"{row['significand_bits']:3} bits  sum {row['sum']:g}  scale {row['scale']:g}"
    for found in row.get("errors", ()):
        if found:
            text += f"  N={found['accumulate']}: {found['error']:.2g}"
    return text
