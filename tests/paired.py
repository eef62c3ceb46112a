"""One rank that trains a backend of the bench and a bare loop in turn, window by window. Run by speed.py.

Both run in the same process on the same machine within the same second, so what is left between them is the bench. On
GPUs both are timed by events on the one stream that they share, as trials are; nothing waits for the device.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.backends.base import registry
from bench.launch import rank
from bench.measure.taps import EventKind, HostClock, Taps, clock_for, updates
from bench.measure.trial import RankTrial
from bench.plan.task import Spec
from tests.bare import BareLoop


class InTurn(Taps):
    """Taps whose loader runs a bare window before each of the backend's; ``around`` has the clock before and after."""

    def __init__(self, bare: BareLoop, accumulate: int, clock: HostClock) -> None:
        super().__init__(mark=clock.mark)
        self.bare, self.accumulate, self.clock = bare, accumulate, clock
        self.around: list[tuple[Any, Any]] = []

    def loader(self, loader: Any) -> Any:
        tapped = super().loader(loader)
        batches = list(loader)

        class Loader:
            def __len__(_) -> int:  # noqa: N805
                return len(tapped)

            def __iter__(_) -> Iterator[Any]:  # noqa: N805
                for index, batch in enumerate(tapped):
                    if index % self.accumulate == 0:
                        before = self.clock.mark()
                        self.bare.window(batches[index : index + self.accumulate])
                        self.around.append((before, self.clock.mark()))
                    yield batch

        return Loader()


def main() -> None:
    """Write the seconds of each window of both, in order, to ``<folder>/<rank>.json``."""
    spec, kind = Spec.from_json(sys.argv[1]), sys.argv[2]
    number, cell = int(os.environ["RANK"]), spec.cell
    device = rank.join(spec)
    clock = clock_for(device)
    trial = RankTrial(spec, number, device, registry([cell.backend])[cell.backend])
    taps = InTurn(BareLoop(kind, device), cell.accumulate, clock)
    trial.train(taps, cell.windows)
    bare = [clock.intervals(pair)[0] for pair in taps.around]
    steps = clock.intervals([update.mark for update in updates(taps.events)])
    # From one step to the next there is one bare window, whose time is taken off.
    ours = [step - pause for step, pause in zip(steps, bare[1:], strict=True)]
    assert taps.count(EventKind.STEP) == cell.windows == len(ours) + 1
    result = {"bench": ours[cell.warmup_windows - 1 :], "bare": bare[cell.warmup_windows :]}
    Path(spec.folder, f"{number}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
