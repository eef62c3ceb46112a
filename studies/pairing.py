"""``python -m studies.pairing``: how steady the ratio of two cells is, timed apart and in turns.

Blocks are made in both designs: apart, each cell by itself, as ``bench run`` does it; in turns, each cell window by
window with the baseline's, in two process groups that swap (studies/overhead/in_turn.py). Once on an idle machine, once
beside two programs that never wait. Then the baseline's cell is timed in turn with itself, and in one start after
another, between which two processes that never end multiply matrices. Writes docs/pairing.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.judge.statistics import MIN_TRIALS
from bench.launch.launcher import Launcher
from bench.plan.cell import Cell, Device, Status
from bench.plan.task import Spec
from bench.run import machine as surroundings
from bench.run.trial_record import merge_ranks
from studies import ROOT
from studies.overhead import in_turn

RESULTS = ROOT / "docs" / "pairing.json"
BASELINE, TWIN = "ddp-deferred", "A/A twin"
OTHERS = (
    "fsdp2-eager",
    "fsdp2-deferred",
    "deepspeed-zero2-eager",
    "deepspeed-zero3-eager",
    "lightning-ddp",
)
TIMED = {"apart": 12, "turns": 6}
"""Timed windows of a training, by design."""
MACHINES = {"idle": 0, "beside two busy programs": 2}
TIMEOUT_S = 300.0
STARTS = 30
PRODUCTS = 400
"""Products of 512 x 512 matrices between two starts: about as long as half of the timed windows."""


def cell_of(name: str, timed: int) -> Cell:
    return Cell(
        backend=BASELINE if name == TWIN else name,
        twin="aa" if name == TWIN else "",
        accumulate=2,
        world_size=2,
        global_batch_size=16,
        sequence_length=64,
        warmup_windows=3,
        timed_windows=timed,
        seed=0,
    )


def trial(
    launcher: Launcher, cell: Cell, folder: Path, beside: Cell | None = None
) -> tuple[float, float]:
    """The median step of a cell and of the one beside it in seconds; the first relative to the second, if there is one.

    Alone both are the cell's. In turns the ratio is the geometric mean of both process groups' ratios.
    """
    if not beside:
        outcome = launcher.run(
            Spec(cell=cell, passes=("time",), folder=str(folder / "trial"), reference=""), TIMEOUT_S
        )
        assert outcome.status is Status.OK, outcome.reason
        seconds = statistics.median(merge_ranks(outcome.ranks)["time"]["step_seconds"])
        return seconds, seconds
    shutil.rmtree(folder / "turns", ignore_errors=True)
    (folder / "turns").mkdir()
    sides = in_turn.train(launcher, cell, folder / "turns", "", beside, is_bench_first=True)
    medians = {
        name: statistics.median(in_turn.seconds(side, cell.timed_windows))
        for name, side in sides.items()
    }
    ours, theirs = (
        [medians[processes, loop] for processes in in_turn.PROCESSES] for loop in in_turn.LOOPS
    )
    return statistics.geometric_mean(ours) / statistics.geometric_mean(
        theirs
    ), statistics.geometric_mean(theirs)


def block(launcher: Launcher, design: str, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """The ratio of each cell to the baseline's, and in seconds what the block took and the baseline's median step."""
    begin, base = time.monotonic(), cell_of(BASELINE, TIMED[design])
    in_turns = design == "turns"
    found = {
        name: trial(launcher, cell_of(name, TIMED[design]), folder, base if in_turns else None)
        for name in names
        if name != BASELINE or not in_turns
    }
    seconds = (
        statistics.geometric_mean(of_base for _, of_base in found.values())
        if in_turns
        else found[BASELINE][0]
    )
    divisor = 1.0 if in_turns else seconds
    ratios = {name: value / divisor for name, (value, _) in found.items() if name != BASELINE}
    return {
        "design": design,
        "seconds": time.monotonic() - begin,
        "baseline_s": seconds,
        "ratios": ratios,
    }


def _multiply(pipe: Connection) -> None:
    torch.set_num_threads(1)
    matrix = torch.randn(512, 512)
    while pipe.recv():
        begin = time.perf_counter()
        for _ in range(PRODUCTS):
            matrix @ matrix
        pipe.send(time.perf_counter() - begin)


def starts(launcher: Launcher, number: int, folder: Path) -> dict[str, list[float]]:
    """In seconds: the median step of the baseline's cell in each start, and the products before, between and after."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for _ in range(2):
        here, there = context.Pipe()
        context.Process(target=_multiply, args=(there,), daemon=True).start()
        pipes.append(here)

    def products() -> float:
        for pipe in pipes:
            pipe.send(True)
        return max(pipe.recv() for pipe in pipes)

    products()
    trial(launcher, cell_of(BASELINE, 1), folder)
    found: dict[str, list[float]] = {"seconds": [], "products": [products()]}
    for _ in range(number):
        found["seconds"].append(trial(launcher, cell_of(BASELINE, TIMED["apart"]), folder)[0])
        found["products"].append(products())
    return found


def blocks(launcher: Launcher, seconds: float, folder: Path) -> Iterator[dict[str, Any]]:
    """Blocks of both designs in a random order, which has a block of each in every two.

    There are as many as fit into ``seconds``, and enough for an interval.
    """
    end = time.monotonic() + seconds
    made = 0
    while made < MIN_TRIALS or time.monotonic() < end:
        made += 1
        names = random.sample([BASELINE, TWIN, *OTHERS], 2 + len(OTHERS))
        for design in random.sample(list(TIMED), len(TIMED)):
            yield block(launcher, design, names, folder)


def main() -> int:
    """Measure both designs on both machines, and write what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.pairing", description=str(__doc__).partition(": ")[2]
    )
    words = "of each machine (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=900, metavar="S", help=words)
    parser.add_argument(
        "--twins", type=int, default=100, metavar="N", help="trials of the cell with itself"
    )
    arguments = parser.parse_args()
    about = surroundings.machine()
    found: dict[str, object] = {"cpu": about["cpu"], "cores": about["cores"]}
    with Launcher(Device.CPU) as launcher, tempfile.TemporaryDirectory() as scratch:
        for machine, busy in MACHINES.items():
            others = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)
            ]
            try:
                found[machine] = list(blocks(launcher, arguments.seconds, Path(scratch)))
            finally:
                for other in others:
                    other.kill()
                    other.wait()
        twin, base = (cell_of(name, TIMED["turns"]) for name in (TWIN, BASELINE))
        found["twins"] = [
            trial(launcher, twin, Path(scratch), base)[0] for _ in range(arguments.twins)
        ]
        found["starts"] = starts(launcher, STARTS, Path(scratch))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
