"""``python -m studies.pairing``: how steady the ratio of two cells is, timed apart and in turns.

Blocks are made in both designs: apart, each cell by itself, as ``bench run`` does it; in turns, each cell window by
window with the baseline's, in two process groups that swap (studies/overhead/in_turn.py). Once on an idle machine, once
beside two programs that never wait. Then the baseline's cell is timed in turn with itself, and in one start after
another, between which two processes that never end multiply matrices. Writes docs/pairing.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
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
from scipy import stats

from bench.judge.statistics import MIN_TRIALS, Interval, Sample, ratio
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


def interval(ratios: Sequence[float]) -> Interval:
    """As reports have it: of ratios by block to a baseline that is 1."""
    blocks = range(len(ratios))
    return ratio(Sample(ratios, blocks), Sample([1.0] * len(ratios), blocks))


def _ends(of: Interval) -> str:
    if of.low is None:
        return "no interval"
    return f"{of.low:.3f} to {of.high:.3f}"


def section() -> list[str]:
    """What was found, in Markdown."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    blocks = ", ".join(f"{len(_of('apart', found[machine]))} {machine}" for machine in MACHINES)
    gains = [_gains("turns", found[machine]) for machine in MACHINES]
    idle_blocks = len(_of("turns", found["idle"]))
    idle, busy = (
        interval([each["ratios"]["fsdp2-deferred"] for each in _of("turns", found[machine])])
        for machine in MACHINES
    )
    apart, turns = (
        statistics.mean(each["seconds"] for each in _of(design, found["idle"])) for design in TIMED
    )
    noise = statistics.geometric_mean(gains[0]) * math.sqrt(apart / turns)
    slowed = ratio(
        *(
            Sample([each["baseline_s"] for each in _of(design, found["idle"])])
            for design in ("turns", "apart")
        )
    )
    groups = [found["twins"][i : i + MIN_TRIALS] for i in range(0, len(found["twins"]), MIN_TRIALS)]
    twins = [interval(group) for group in groups if len(group) == MIN_TRIALS]
    hold = sum(each.low <= 1 <= each.high for each in twins if each.low and each.high)
    return [
        "## Cells in turn",
        "",
        f"Apart, each cell trains by itself, as in a run. In turns, it and the baseline's (`{BASELINE}`) train window "
        f"by window in two process groups that swap halfway. {found['cpu']}, {found['cores']} cores, N = 2; blocks in "
        f"either design: {blocks} "
        "([pairing.json](pairing.json)). The spread is the standard deviation of a block's log ratio times the root "
        "of its seconds, so it counts what a block costs.",
        "",
        f"By cell, the spread in turns is {_range(gains[0])} times that apart on the idle machine, and "
        f"{_range(gains[1])} beside two programs that never wait. Were ratios normal, the interval of one cell's would "
        f"span a factor of {_factor(idle_blocks):.1f} either way. Idle, the standard deviation is {noise:.2f} times as "
        f"large (geometric mean), but a block takes {turns:.0f} s instead of {apart:.0f} s, in part to start second "
        "process groups.",
        "",
        f"Load changes the ratio itself: in turns, `fsdp2-deferred` takes {busy.ratio:.2f} ({_ends(busy)}) times the "
        f"step of `{BASELINE}` beside these programs, and {idle.ratio:.2f} ({_ends(idle)}) without them. So cells are "
        "timed apart, and no times from a busy machine are compared.",
        "",
        f"Idle, the step of `{BASELINE}` beside a cell that waits is {slowed.ratio:.3f} ({_ends(slowed)}) times that "
        f"alone. In turn with itself, {hold} of {len(twins)} intervals contain 1.",
        "",
        *_starts(**found["starts"]),
    ]


def _of(design: str, blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in blocks if each["design"] == design]


def _spreads(blocks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By cell, the standard deviation of its log ratio times the root of a block's seconds."""
    root = statistics.mean(each["seconds"] for each in blocks) ** 0.5
    names = sorted(blocks[0]["ratios"])
    return {
        name: root * statistics.stdev(math.log(each["ratios"][name]) for each in blocks)
        for name in names
    }


def _gains(design: str, blocks: Sequence[dict[str, Any]]) -> list[float]:
    """The spread of a design relative to that of cells apart, of each cell."""
    ours, apart = (_spreads(_of(name, blocks)) for name in (design, "apart"))
    return [ours[name] / apart[name] for name in ours]


def _range(gains: Sequence[float]) -> str:
    mean = statistics.geometric_mean(gains)
    return f"{min(gains):.2f} to {max(gains):.2f} (geometric mean {mean:.2f})"


def _factor(blocks: int) -> float:
    """By which two standard deviations of so many normal values differ in 95 of 100 cases, at most."""
    return math.sqrt(float(stats.f.ppf(0.975, blocks - 1, blocks - 1)))


def _starts(seconds: Sequence[float], products: Sequence[float]) -> list[str]:
    """Whether two starts of a cell differ by more than the machine does while nothing starts."""
    steps, machine = ([math.log(value) for value in values] for values in (seconds, products))
    around = [statistics.mean(pair) for pair in itertools.pairwise(machine)]
    found = stats.pearsonr(steps, around)
    return [
        f"Two starts of a cell differ: in another run, the step of `{BASELINE}`, started {len(steps)} times alone on "
        f"the idle machine (median {statistics.median(seconds):.4f} s), has a standard deviation of "
        f"{100 * statistics.stdev(steps):.1f} %. The time in which two lasting processes multiply {PRODUCTS} matrices, "
        f"before and after each start, has one of {100 * statistics.stdev(machine):.1f} %. Their correlation is "
        f"{found.statistic:.2f} (p = {found.pvalue:.2g}): the machine's speed explains "
        f"{100 * found.statistic**2:.0f} % of the variance.",
        "",
    ]


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
    """Blocks of both designs in a random order, which has a block of each in every two."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
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
