"""``python -m tests.cuda.counting FOLDER``: trials whose ranks are looked at from within, over the stub or on a GPU.

Reads a JSON list of specs from standard input and prints a line of JSON for each: how it ended, and what rank 0 found.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from bench.backends.base import Backend
from bench.launch.launcher import Launcher
from bench.measure import trial
from bench.measure.taps import EventKind as Event
from bench.measure.taps import Taps
from bench.plan.cell import Cell, Device, Status
from bench.plan.task import Spec
from tests.cuda_stub.counters import WAITING, Counters, Wait, demangled

TIMEOUT_S = 600.0


class Counted(Spec):
    """A trial whose time pass is counted, window by window; besides it may have a memory pass."""

    work = "tests.cuda.counting:count"


def count(task: Counted, rank: int, device: Any) -> dict[str, Any]:
    """One rank's part."""
    trial.RankTrial = CountedTrial  # type: ignore[misc]
    return trial.work(task, rank, device)


class CountedTrial(trial.RankTrial):
    """The time pass as it is, between two readings of the stub's counters."""

    def run(self) -> dict[str, Any]:
        timed = self.time()
        first = self.cell.warmup_windows - 1
        readings = self._windows.readings[first:]
        pairs = list(itertools.pairwise(readings))
        waits = self._windows.counters.waits
        gc.collect()  # frees the time pass
        return {
            "status": Status.OK,
            "windows": [
                {
                    "counts": {kind.name: after[0][kind] - before[0][kind] for kind in before[0]},
                    "waits": [_plain(wait) for wait in waits[before[1] : after[1]]],
                }
                for before, after in pairs
            ],
            "num_updates": timed["num_updates"],
            "memory": self.memory() if "memory" in self.spec.passes else None,
        }

    def train(
        self, taps: Taps, windows: int, how: trial.PassOptions = trial.AS_THE_TRIAL
    ) -> Backend:
        self._windows, then = Windows(), taps.on_event

        def see(kind: Event) -> None:
            if then is not None:
                then(kind)
            self._windows.see(kind)

        taps.on_event = see
        return super().train(taps, windows, how)


class Windows:
    """Reads the counters at every update: after its last inner step, as windows are timed."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.counters.watch()
        self.readings: list[tuple[dict[Any, int], int]] = []
        self._last: Event | None = None

    def see(self, kind: Event) -> None:
        if kind is Event.STEP:
            reading = (self.counters.now(), len(self.counters.waits))
            self.readings[-1 if self._last is Event.STEP else len(self.readings) :] = [reading]
        self._last = kind


def _plain(wait: Wait) -> dict[str, Any]:
    assert wait.kind in WAITING
    return {"kind": wait.kind.name, "python": wait.python, "native": demangled(wait.native)}


def main() -> None:
    """Run what standard input asks for."""
    with Launcher(Device.CUDA) as launcher:
        for index, values in enumerate(json.load(sys.stdin)):
            folder = Path(sys.argv[1]) / str(index)
            counted = values["counted"]
            kind = Counted if counted else Spec
            cell = Cell.from_dict(values["cell"])
            spec = kind(cell=cell, passes=tuple(values["passes"]), folder=str(folder), reference="")
            outcome = launcher.run(spec, TIMEOUT_S)
            found = outcome.ranks[0] if outcome.ranks else {}
            line = {
                "status": outcome.status,
                "reason": outcome.reason,
                "found": found,
                "wall_s": outcome.wall_s,
            }
            print(json.dumps(line | {"traceback": outcome.traceback}), flush=True)


if __name__ == "__main__":
    from tests.cuda.counting import main as run  # its classes are found by the name of their module

    run()
