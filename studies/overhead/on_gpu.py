"""The step of the bench beside a bare loop's on one GPU: ``python -m studies.overhead.on_gpu``, in about a minute.

Two processes train the same windows in turn on the same GPU, as ``in_turn`` describes. The model is so small that the
host is what a window waits for, so what the bench adds on the host is not hidden. Prints a line of JSON per backend.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from itertools import permutations
from pathlib import Path

from bench.launch.launcher import Launcher
from bench.plan.cell import Cell, Device
from studies.overhead import bare, in_turn

BACKENDS = ("ddp-deferred", "fsdp2-deferred")
MICRO_BATCH = 1
"""Samples."""


def cell_of(backend: str, model: str, length: int, timed: int) -> Cell:
    """What is trained on the GPU, in fp32, by one rank."""
    return Cell(
        backend=backend,
        accumulate=bare.N,
        world_size=1,
        global_batch_size=bare.N * MICRO_BATCH,
        sequence_length=length,
        model=model,
        learning_rate=bare.LEARNING_RATE,
        seed=bare.SEED,
        warmup_windows=bare.WARM_UP,
        timed_windows=timed,
        device=Device.CUDA,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.overhead.on_gpu", description=__doc__)
    option = parser.add_argument
    option("--model", default="135m", metavar="NAME", help="(default: %(default)s)")
    option(
        "--length",
        type=int,
        default=512,
        metavar="TOKENS",
        help="tokens per sample (default: %(default)s)",
    )
    option(
        "--windows",
        type=int,
        default=10,
        metavar="N",
        help="timed windows of each side (default: %(default)s)",
    )
    options = parser.parse_args()
    with Launcher(Device.CUDA) as launcher:
        for backend in BACKENDS:
            cell = cell_of(backend, options.model, options.length, options.windows)
            with tempfile.TemporaryDirectory() as folder:
                found = in_turn.steps(launcher, cell, backend, Path(folder))
            medians = {sides: statistics.median(seconds) for sides, seconds in found.items()}
            ratios = [
                medians[a, "bench"] / medians[b, "bare"] for a, b in permutations(in_turn.PROCESSES)
            ]
            told = {
                "backend": backend,
                "model": options.model,
                "tokens": options.length,
                "windows": options.windows,
                "bench_over_bare": statistics.geometric_mean(ratios),
                "ratios": ratios,
                "median_s": {
                    f"{loop}, {processes}": value for (processes, loop), value in medians.items()
                },
            }
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
