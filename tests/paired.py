"""One rank that trains a backend of the bench and a bare loop in turn, window by window. Run by speed.py.

Both run in the same process on the same machine within the same second, so what is left between them is the bench.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.backends.base import registry
from bench.spec import Spec
from bench.taps import Kind, Taps, updates
from bench.trial import Trial
from tests.bare import BareLoop


class InTurn(Taps):
    """Taps whose loader runs a bare window before each of the backend's, and whose clock stands still meanwhile."""

    def __init__(self, bare: BareLoop, accumulate: int) -> None:
        super().__init__(mark=lambda: time.perf_counter() - self.paused)
        self.bare, self.accumulate, self.paused = bare, accumulate, 0.0
        self.bare_seconds: list[float] = []

    def loader(self, loader: Any) -> Any:
        tapped = super().loader(loader)
        batches = list(loader)

        class Loader:
            def __len__(_) -> int:  # noqa: N805
                return len(tapped)

            def __iter__(_) -> Iterator[Any]:  # noqa: N805
                for index, batch in enumerate(tapped):
                    if index % self.accumulate == 0:
                        started = time.perf_counter()
                        self.bare.window(batches[index : index + self.accumulate])
                        self.bare_seconds.append(time.perf_counter() - started)
                        self.paused += self.bare_seconds[-1]
                    yield batch

        return Loader()


def main() -> None:
    """Write the seconds of each window of both, in order, to ``<folder>/<rank>.json``."""
    spec, kind = Spec.from_json(sys.argv[1]), sys.argv[2]
    rank, cell = int(os.environ["RANK"]), spec.cell
    torch.set_num_threads(spec.threads)
    dist.init_process_group("gloo")
    trial = Trial(spec, rank, torch.device("cpu"), registry()[cell.backend])
    taps = InTurn(BareLoop(kind), cell.accumulate)
    trial.train(taps, cell.windows)
    marks = [update.mark for update in updates(taps.events)]
    ours = [after - before for before, after in itertools.pairwise(marks)]
    assert taps.count(Kind.STEP) == cell.windows == len(ours) + 1
    result = {"bench": ours[cell.warmup_windows - 1 :], "bare": taps.bare_seconds[cell.warmup_windows :]}
    Path(spec.folder, f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
