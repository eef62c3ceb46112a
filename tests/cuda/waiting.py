"""``python -m tests.cuda.waiting BACKEND...``: who makes the host wait in timed windows, by torch's own debug mode.

For a real GPU, where nothing counts below torch; works over the stub too. Of each place that waits, the stack from it
out to the bench. torch tells of streams that are synchronized and of blocking copies, not of events and devices.
Before these, what the profiler saw on the device in one window: its kernels, copies and memsets.
"""

from __future__ import annotations

import collections
import gc
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from bench.backends.base import Backend
from bench.launch.launcher import Launcher
from bench.measure import trial
from bench.measure.exposure import WindowProfiler, category
from bench.measure.taps import EventKind as Event
from bench.measure.taps import Taps
from bench.plan.cell import Device, Status
from tests.cuda.cells import counted_cell
from tests.cuda.counting import TIMEOUT_S, Counted
from tests.cuda_stub.counters import stack

DEPTH = 12
SEEN = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's categories of what a device does."""


class Warned(Counted):
    """A trial whose time pass is watched; it has no other."""

    work = "tests.cuda.waiting:watch"


def watch(task: Warned, rank: int, device: Any) -> dict[str, Any]:
    """One rank's part."""
    trial.RankTrial = WatchedTrial  # type: ignore[misc]
    return trial.work(task, rank, device)


class WatchedTrial(trial.RankTrial):
    """The time pass, whose timed windows run in torch's mode that warns of synchronizations."""

    def run(self) -> dict[str, Any]:
        self._stacks: collections.Counter[str] = collections.Counter()
        self.time()
        gc.collect()  # frees the time pass
        profiler = WindowProfiler()
        self._settled(profiler)
        seen = collections.Counter(category(event) for event in profiler.events)
        return {
            "status": Status.OK,
            "stacks": dict(self._stacks),
            "seen": {kind: seen[kind] for kind in SEEN},
        }

    def train(
        self, taps: Taps, windows: int, how: trial.PassOptions = trial.AS_THE_TRIAL
    ) -> Backend:
        import torch

        then, num_losses, cell = taps.on_event, 0, self.cell
        if windows < cell.windows:  # that of the profiler
            return super().train(taps, windows, how)

        def see(kind: Event) -> None:
            nonlocal num_losses
            if then is not None:
                then(kind)
            num_losses += kind is Event.LOSS
            timed = (
                cell.warmup_windows * cell.accumulate <= num_losses < cell.windows * cell.accumulate
            )
            if kind is Event.STEP:
                torch.cuda.set_sync_debug_mode("warn" if timed else "default")

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            if "synchroniz" in str(message):
                self._stacks["\n    ".join(stack(sys._getframe(2))[:DEPTH])] += 1

        taps.on_event = see
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        return super().train(taps, windows, how)


def main() -> None:
    """Run the backends that are named, on one GPU, and print."""
    with Launcher(Device.CUDA) as launcher, tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:]:
            spec = Warned(
                cell=counted_cell(name, 1),
                passes=("time",),
                folder=str(Path(folder) / name),
                reference="",
            )
            outcome = launcher.run(spec, TIMEOUT_S)
            print(f"{name}: {outcome.status} {outcome.reason}".rstrip())
            found = outcome.ranks[0] if outcome.ranks else {"seen": {}, "stacks": {}}
            print(
                "  on the device in a window:",
                ", ".join(f"{n} {kind}" for kind, n in found["seen"].items()),
            )
            for text, times in found["stacks"].items():
                print(f"  {times} x\n    {text}", flush=True)


if __name__ == "__main__":
    from tests.cuda.waiting import main as run  # its classes are found by the name of their module

    run()
