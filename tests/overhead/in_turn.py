"""The step time of a trial of the bench beside that of a bare loop: both train the same windows in turn.

Two process groups are alive at once: the trial's, forked by the launcher as in any run, and that of ``bare.py``. While
one trains a window the other sleeps, so both meet the same machine within the same second.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed import TCPStore

from bench.backends.base import Backend, registry
from bench.launch.launcher import Launcher
from bench.launch.places import LOOPBACK, interface_of
from bench.launch.process import environment_of
from bench.measure.trial import RankTrial
from bench.plan.cell import Cell, Device, Status
from bench.plan.task import Spec
from tests.conftest import ROOT
from tests.overhead import bare
from tests.overhead.bare import Turns

TIMEOUT_S = 600.0


@dataclass(kw_only=True)
class InTurn(Spec):
    """A trial whose windows wait for their turns."""

    work: ClassVar[str] = "tests.overhead.in_turn:work"
    port: int
    is_bare: bool
    """Whether the bare loop is trained here too, in place of the trial."""


class RankInTurn(RankTrial):
    """A rank of such a trial. Nothing but the loader differs from any other trial."""

    spec: InTurn

    def train(self, taps: Any, windows: int, **others: Any) -> Backend:
        tapped = taps.loader

        def loader(batches: Any) -> Any:
            self.turns = Turns(batches, self.spec.port, bare.OURS)
            return tapped(self.turns)

        taps.loader = loader
        backend = super().train(taps, windows, **others)
        self.turns.end()
        return backend

    def time(self) -> dict[str, Any]:
        """The result of the time pass, and ``seconds``: its steps without the time that they waited for their turn."""
        result = super().time()
        steps = result["warmup_seconds"] + result["step_seconds"]
        waits = [began - ended for began, ended in zip(self.turns.began[1:], self.turns.ended[:-1], strict=True)]
        return result | {"seconds": [step - wait for step, wait in zip(steps, waits, strict=True)]}


def work(task: InTurn, rank: int, device: torch.device) -> dict[str, Any]:
    if task.is_bare:
        found = bare.train(task.backend, rank, task.port, task.cell.warmup_windows + task.cell.timed_windows, bare.OURS)
        return {"status": Status.OK, "time": found}
    return RankInTurn(task, rank, device, registry([task.backend])[task.backend]).run()


def steps(
    launcher: Launcher, backend: str, loop: str, timed: int, folder: Path, *, is_bare: bool = False
) -> dict[str, list[float]]:
    """Train in turn with a backend and with a bare loop; by side, the seconds of the timed steps, maxima over ranks.

    The losses of both must be equal in every bit. With ``is_bare``, the ranks of a trial train the bare loop too.
    """
    windows = bare.WARM_UP + timed
    cell = Cell(
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
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("turn 0", "")
    task = InTurn(
        cell=cell, passes=("time",), folder=str(folder), reference=f"{folder}/none", port=store.port, is_bare=is_bare
    )
    command = (sys.executable, "-m", "tests.overhead.bare", loop, str(folder), str(store.port), str(windows))
    environment = environment_of(Device.CPU, (), interface_of(LOOPBACK))
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sys.stderr, start_new_session=True) as other:
        try:
            outcome = launcher.run(task, TIMEOUT_S)
            if outcome.status is Status.OK:
                other.wait(TIMEOUT_S)
        finally:
            other.terminate()
    assert outcome.status is Status.OK and other.returncode == 0, (outcome.reason, other.returncode)
    sides = {
        "bench": [rank["time"] for rank in outcome.ranks],
        "bare": [json.loads((folder / f"bare{rank}.json").read_text()) for rank in range(bare.RANKS)],
    }
    losses, others = ([rank["losses"] for rank in side] for side in sides.values())
    assert losses == others, f"{backend} and {loop} did not train the same"
    return {
        name: [max(ranks) for ranks in zip(*(rank["seconds"][-timed:] for rank in side), strict=True)]
        for name, side in sides.items()
    }
