"""Measures points of the grid over ThroughputMonitor's settings, in process groups if needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.audit.monitor import measure
from bench.audit.monitor_grid import Point, Strategy
from bench.launch.launcher import Launcher, LauncherError
from bench.plan.cell import Device, Status
from bench.plan.task import Task

if TYPE_CHECKING:
    import torch

BACKENDS = {Strategy.DDP: "lightning-ddp", Strategy.DEEPSPEED: "lightning-deepspeed-zero2"}
"""The backend whose packages a process group has to load."""
TIMEOUT_S = 60.0
"""Of one point in a process group, which takes a second."""


@dataclass(kw_only=True)
class MonitorTask(Task):
    """Points of the grid for one process group."""

    work: ClassVar[str] = "bench.audit.monitor_ranks:work"

    points: tuple[Point, ...]


def work(task: MonitorTask, rank: int, device: torch.device) -> dict[str, object]:
    """One rank's part; see ``bench.plan.task.Task``. Rank 0 logs."""
    rows = [measure(point, number=rank).to_row() for point in task.points]
    return {"status": Status.OK, "rows": rows}


def measure_all(points: Sequence[Point]) -> Iterator[dict[str, object]]:
    """The row of each point, on the CPU.

    Those of several ranks, or of DeepSpeed, are measured in one process group.
    Raises LauncherError if that fails.
    """
    if points[0].is_alone:
        for point in points:
            yield measure(point).to_row()
        return
    with Launcher(Device.CPU) as launcher:
        task = MonitorTask(
            backend=BACKENDS[points[0].strategy],
            world_size=points[0].world_size,
            points=tuple(points),
        )
        outcome = launcher.run(task, TIMEOUT_S * len(points))
        if outcome.status is not Status.OK:
            raise LauncherError(f"the process group failed: {outcome.reason}")
        yield from outcome.ranks[0]["rows"]
