"""The step time of a trial of the bench beside that of a bare loop: both train the same windows in turn.

Two process groups are alive at once. The ranks of one are a trial's, forked by the launcher as in any run; those of the
other are forked by torch elastic alone. While one trains a window the other sleeps, so both meet the same machine
within the same second. Each group trains both, one after the other, and never the same as the other group. So the
product of the two ratios is free of what the processes differ in, and their quotient is free of what the loops do.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed import TCPStore

from bench.backends.base import Backend, registry
from bench.launch.job_nodes import LOOPBACK, interface_of
from bench.launch.launcher import Launcher
from bench.launch.process import environment_of
from bench.measure.trial import AS_THE_TRIAL, PassOptions, RankTrial
from bench.plan.cell import Cell, Device, Status
from bench.plan.task import Spec
from studies import ROOT
from studies.overhead import bare
from studies.overhead.bare import Turns

TIMEOUT_S = 600.0
PROCESSES = ("trial", "torchrun")
"""Whose processes the two groups are."""
LOOPS = ("bench", "bare")
"""What each trains."""
TOLERANCE = 1e-3
"""Nats: how far losses on a GPU may be apart, whose kernels may add in another order each time."""


@dataclass(kw_only=True)
class InTurn(Spec):
    """One of two groups that train in turn: a trial, and a bare loop or another cell."""

    work: ClassVar[str] = "studies.overhead.in_turn:work"
    loop: str
    """The bare loop; a key of ``bare.LOOPS``."""
    beside: Cell | None = None
    """The cell that is trained instead of it."""
    port: int
    """Of the store that says whose turn it is."""
    side: int = 0
    is_bench_first: bool


class RankInTurn(RankTrial):
    """A rank of such a trial. Nothing but the loader differs from any other trial."""

    def __init__(self, *arguments: Any, turns: Callable[[Any], Turns]) -> None:
        super().__init__(*arguments)
        self._in_turn = turns

    def train(self, taps: Any, windows: int, how: PassOptions = AS_THE_TRIAL) -> Backend:
        tapped = taps.loader

        def loader(batches: Any) -> Any:
            self.turns = self._in_turn(batches)
            return tapped(self.turns)

        taps.loader = loader
        backend = super().train(taps, windows, how)
        self.turns.end()
        return backend

    def time(self) -> dict[str, Any]:
        """The result of the time pass with the ``seconds`` of its windows, and of its ``steps`` without the waits."""
        result = super().time()
        steps = result["warmup_seconds"] + result["step_seconds"]
        waits = [
            began - ended
            for began, ended in zip(self.turns.began[1:], self.turns.ended[:-1], strict=True)
        ]
        without_waits = [step - wait for step, wait in zip(steps, waits, strict=True)]
        return result | {"seconds": self.turns.seconds(), "steps": without_waits}


def work(task: InTurn, rank: int, device: torch.device) -> dict[str, Any]:
    """Train both; the result has the seconds and losses of their windows, and the bench's own steps."""
    found: dict[str, Any] = {}
    for phase, loop in enumerate(LOOPS if task.is_bench_first else reversed(LOOPS)):
        gc.collect()
        cell = task.cell if loop == "bench" else task.beside
        turns = partial(Turns, cell=task.cell, port=task.port, side=task.side, phase=phase)
        if cell:
            backend = registry([cell.backend])[cell.backend]
            found[loop] = RankInTurn(
                replace(task, cell=cell), rank, device, backend, turns=turns
            ).run()["time"]
        else:
            found[loop] = bare.train(task.loop, rank, task.cell, device, turns)
    return {"status": Status.OK, **found}


def on_cpu(backend: str, timed: int) -> Cell:
    """The cell that is trained on the CPU, with so many timed windows."""
    return Cell(
        backend=backend,
        accumulate=bare.N,
        world_size=bare.RANKS,
        global_batch_size=bare.N * bare.MICRO_BATCH * bare.RANKS,
        sequence_length=bare.LENGTH,
        learning_rate=bare.LEARNING_RATE,
        seed=bare.SEED,
        warmup_windows=bare.WARM_UP,
        timed_windows=timed,
    )


def steps(
    launcher: Launcher, cell: Cell, loop: str, folder: Path, *, is_bench_first: bool = True
) -> dict[tuple[str, str], list[float]]:
    """Train a cell in turn with its backend and with a bare loop, in a trial's processes and in torch elastic's.

    By processes and loop, the seconds of the timed windows, maxima over ranks; and by processes and ``step`` those of
    the steps from update to update that the bench reports. Both are without waits, and a rank's sums agree but for the
    ends. Ranks that leave an update at different times and meet after it (Lightning) have larger maxima of
    steps than of windows.

    A trial's processes begin with the bench, and the others with the bare loop, or the other way round. The losses of
    all four must be equal in every bit, and on a GPU within TOLERANCE.
    """
    timed = cell.timed_windows
    sides = train(launcher, cell, folder, loop, is_bench_first=is_bench_first)
    losses = [[rank["losses"] for rank in side] for side in sides.values()]
    tolerance = TOLERANCE if cell.device is Device.CUDA else 0.0
    same = all(_within(tolerance, others, losses[0]) for others in losses)
    assert same, f"{cell.backend} and {loop} did not train the same"
    found = {name: seconds(side, timed) for name, side in sides.items()}
    for processes in PROCESSES:
        found[processes, "step"] = seconds(sides[processes, "bench"], timed, "steps")
    return found


def _within(
    tolerance: float, some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]
) -> bool:
    """Whether the losses of all ranks and windows are that close to each other."""
    pairs = [pair for ranks in zip(some, others, strict=True) for pair in zip(*ranks, strict=True)]
    return all(abs(ours - theirs) <= tolerance for ours, theirs in pairs)


def seconds(
    side: Sequence[Mapping[str, list[float]]], timed: int, key: str = "seconds"
) -> list[float]:
    """Of the timed windows of a side, maxima over its ranks."""
    return [max(ones) for ones in zip(*(rank[key][-timed:] for rank in side), strict=True)]


def train(
    launcher: Launcher,
    cell: Cell,
    folder: Path,
    loop: str,
    beside: Cell | None = None,
    *,
    is_bench_first: bool,
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What each rank returned, by processes and loop; a cell ``beside`` takes the place of the bare loop."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for phase in range(len(LOOPS)):
        store.set(bare.key(phase, 0), "")
    task = partial(
        InTurn,
        cell=cell,
        beside=beside,
        passes=("time",),
        folder=str(folder),
        reference=f"{folder}/none",
        loop=loop,
        port=store.port,
    )
    others = task(side=1, is_bench_first=not is_bench_first).to_json()
    command = (sys.executable, "-m", "studies.overhead.torchrun", others)
    packages = registry([cell.backend])[cell.backend].preloaded()
    environment = environment_of(cell.device, interface_of(LOOPBACK)) | {
        "BENCH_PRELOAD": ",".join(packages)
    }
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=sys.stderr, start_new_session=True
    ) as other:
        try:
            outcome = launcher.run(task(is_bench_first=is_bench_first), TIMEOUT_S)
            if outcome.status is Status.OK:
                other.wait(TIMEOUT_S)
        finally:
            other.terminate()
    assert outcome.status is Status.OK and other.returncode == 0, (outcome.reason, other.returncode)
    theirs = [
        json.loads((folder / f"torchrun{rank}.json").read_text()) for rank in range(cell.world_size)
    ]
    ranks = {"trial": outcome.ranks, "torchrun": theirs}
    return {
        (processes, loop): [rank[loop] for rank in ranks[processes]]
        for processes in PROCESSES
        for loop in LOOPS
    }
