"""``python -m tests.studies.pairing``: how steady the ratio of two cells is, timed apart and in turns.

Blocks are made in both designs: apart, each cell in processes of its own, as ``bench run`` does it; in turns, each cell
window by window with the baseline's, in two process groups that swap (tests/overhead/in_turn.py). Once on the machine
as it is, once beside two programs that never wait. Then the baseline's cell is timed in turn with itself, many times,
and alone, with its memory in pages of the usual size and of 2 MiB. Writes docs/pairing.json: the ratio of each cell's
step to the baseline's in each block, and what the block took in seconds; docs/statistics.md reads it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from scipy.stats import levene

from bench.judge.statistics import MIN_TRIALS, Interval, Sample, ratio
from bench.launch.launcher import Launcher
from bench.plan.cell import Cell, Device, Status
from bench.plan.task import Spec
from bench.run.trial_record import merge_ranks, warmup
from bench.tabular import markdown_table
from tests.conftest import ROOT
from tests.overhead import in_turn

RESULTS = ROOT / "docs" / "pairing.json"
BASELINE, TWIN = "ddp-deferred", "A/A twin"
OTHERS = ("fsdp2-eager", "fsdp2-deferred", "deepspeed-zero2-eager", "deepspeed-zero3-eager", "lightning-ddp")
TIMED = {"apart": 12, "turns": 6}
"""Timed windows of a training, by design."""
MACHINES = {"idle": 0, "beside two busy programs": 2}
TIMEOUT_S = 300.0
PAGES = {
    "as it is": {},
    "`THP_MEM_ALLOC_ENABLE=1` (torch)": {"THP_MEM_ALLOC_ENABLE": "1"},
    "`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
}
"""Environments that ask for memory in pages of 2 MiB."""


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


def trial(launcher: Launcher, cell: Cell, folder: Path, beside: Cell | None = None) -> tuple[float, float]:
    """The median step of a cell and of the one beside it in seconds; the first relative to the second, if there is one.

    Alone both are the cell's. In turns the ratio is the geometric mean of both process groups' ratios.
    """
    if not beside:
        outcome = launcher.run(Spec(cell=cell, passes=("time",), folder=str(folder / "trial"), reference=""), TIMEOUT_S)
        assert outcome.status is Status.OK, outcome.reason
        seconds = statistics.median(settled(merge_ranks(outcome.ranks)["time"]["step_seconds"]))
        return seconds, seconds
    shutil.rmtree(folder / "turns", ignore_errors=True)
    (folder / "turns").mkdir()
    sides = in_turn.train(launcher, cell, folder / "turns", "", beside, is_bench_first=True)
    medians = {
        name: statistics.median(settled(in_turn.seconds(side, cell.timed_windows))) for name, side in sides.items()
    }
    ours, theirs = ([medians[processes, loop] for processes in in_turn.PROCESSES] for loop in in_turn.LOOPS)
    return statistics.geometric_mean(ours) / statistics.geometric_mean(theirs), statistics.geometric_mean(theirs)


def settled(seconds: Sequence[float]) -> Sequence[float]:
    return seconds[warmup(seconds) :]


def block(launcher: Launcher, design: str, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """The ratio of each cell to the baseline's, and in seconds what the block took and the baseline's median step."""
    begin, base = time.monotonic(), cell_of(BASELINE, TIMED[design])
    in_turns = design == "turns"
    found = {
        name: trial(launcher, cell_of(name, TIMED[design]), folder, base if in_turns else None)
        for name in names
        if name != BASELINE or not in_turns
    }
    seconds = statistics.geometric_mean(of_base for _, of_base in found.values()) if in_turns else found[BASELINE][0]
    divisor = 1.0 if in_turns else seconds
    ratios = {name: value / divisor for name, (value, _) in found.items() if name != BASELINE}
    return {"design": design, "seconds": time.monotonic() - begin, "baseline_s": seconds, "ratios": ratios}


def interval(ratios: Sequence[float]) -> Interval:
    """As reports have it: of ratios by block to a baseline that is 1."""
    blocks = range(len(ratios))
    return ratio(Sample(ratios, blocks), Sample([1.0] * len(ratios), blocks))


def _ends(of: Interval) -> str:
    return "no interval" if of.low is None else f"{of.low:.3f} to {of.high:.3f}"


def section() -> list[str]:
    """What was found, in Markdown."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = []
    for machine, design in itertools.product(MACHINES, TIMED):
        of_design = _of(design, found[machine])
        for name, deviation in _spreads(of_design).items():
            times = interval([each["ratios"][name] for each in of_design])
            ends = f"{times.ratio:.3f} ({_ends(times)})"
            rows.append((machine, name, design, ends, str(len(of_design)), f"{deviation:.2f}"))
    gains = [_gain("turns", found[machine]) for machine in MACHINES]
    together = statistics.geometric_mean(_gain("together", blocks) for blocks in found["same processes"].values())
    idle, busy = (
        interval([each["ratios"]["fsdp2-deferred"] for each in _of("turns", found[machine])]) for machine in MACHINES
    )
    slowed = ratio(
        *(Sample([each["baseline_s"] for each in _of(design, found["idle"])]) for design in ("turns", "apart"))
    )
    groups = [found["twins"][i : i + MIN_TRIALS] for i in range(0, len(found["twins"]), MIN_TRIALS)]
    twins = [interval(group) for group in groups if len(group) == MIN_TRIALS]
    hold = sum(each.low <= 1 <= each.high for each in twins if each.low and each.high)
    width = statistics.median(each.width for each in twins)
    return [
        "## Cells in turn",
        "",
        f"In turns, a cell and the baseline's (`{BASELINE}`) train window by window in two process groups that swap "
        "after half of the windows; apart, each trains in processes of its own. Both were measured on two cores at "
        "N = 2. The spread is the standard deviation of a block's log ratio times the root of the block's seconds, "
        "which tells the width that an hour buys. A block has all of these cells.",
        "",
        *markdown_table(("machine", "cell", "timed", "ratio (95 % interval)", "blocks", "spread"), sorted(rows)),
        f"In turns, the spread is {gains[0]:.2f} times as large as apart on the idle machine, and {gains[1]:.2f} times "
        "beside two programs that never wait (geometric means). Load changes the ratio itself, however cells are "
        f"timed: in turns, `fsdp2-deferred` takes {busy.ratio:.2f} ({_ends(busy)}) times as long as `{BASELINE}` "
        f"beside these programs, and {idle.ratio:.2f} ({_ends(idle)}) times without them. So the bench times cells "
        "apart, and compares no times from a busy machine.",
        "",
        f"Beside a cell that waits, the step of `{BASELINE}` is {slowed.ratio:.3f} times as long as alone "
        f"({_ends(slowed)}), idle.",
        "",
        "Cells that train one after the other in the same processes, forwards and backwards, were measured earlier: "
        f"the spread is {together:.2f} times as large as apart (both machines, geometric mean).",
        "",
        f"The baseline's cell in turn with itself, {len(twins)} intervals of {MIN_TRIALS} trials each on the idle "
        f"machine: {hold} hold 1; the median width is {100 * width:.1f} %.",
        "",
        f"Two starts of the same cell differ. Here `{BASELINE}` started alone on the idle machine, with its memory as "
        "it is and in pages of 2 MiB, in turn:",
        "",
        *markdown_table(
            ("memory", "starts", "median step", "standard deviation", "p of no difference"), _starts(found)
        ),
    ]


def _of(design: str, blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in blocks if each["design"] == design]


def _spreads(blocks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By cell, the standard deviation of its log ratio times the root of a block's seconds."""
    root = statistics.mean(each["seconds"] for each in blocks) ** 0.5
    names = sorted(blocks[0]["ratios"])
    return {name: root * statistics.stdev(math.log(each["ratios"][name]) for each in blocks) for name in names}


def _gain(design: str, blocks: Sequence[dict[str, Any]]) -> float:
    """The spread of a design relative to that of cells apart, over all cells."""
    ours, apart = (_spreads(_of(name, blocks)) for name in (design, "apart"))
    return statistics.geometric_mean(ours[name] / apart[name] for name in ours)


def _starts(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """How much starts differ, against those with memory as it is: Brown and Forsythe, JASA 69, 1974."""
    logs = {name: [math.log(seconds) for seconds in of] for name, of in found["starts"].items()}
    plain = logs["as it is"]
    for name, of in logs.items():
        p_value = "-" if of is plain else f"{levene(plain, of, center='median').pvalue:.2g}"
        median = f"{statistics.median(found['starts'][name]):.4f} s"
        yield name, str(len(of)), median, f"{100 * statistics.stdev(of):.1f} %", p_value


def starts(seconds: float, folder: Path) -> dict[str, list[float]]:
    """The median step of the baseline's cell in each start, by kind of memory."""
    with contextlib.ExitStack() as stack:
        launchers = {}
        for name, environment in PAGES.items():
            launchers[name] = stack.enter_context(Launcher(Device.CPU))
            with mock.patch.dict(os.environ, environment):
                trial(launchers[name], cell_of(BASELINE, 1), folder)
        found: dict[str, list[float]] = {name: [] for name in PAGES}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name, launcher in launchers.items():
                found[name].append(trial(launcher, cell_of(BASELINE, TIMED["apart"]), folder)[0])
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
        prog="python -m tests.studies.pairing", description=str(__doc__).partition(": ")[2]
    )
    words = "of each machine (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=900, metavar="S", help=words)
    parser.add_argument("--twins", type=int, default=100, metavar="N", help="trials of the cell with itself")
    arguments = parser.parse_args()
    found = {"same processes": json.loads(RESULTS.read_text(encoding="utf-8"))["same processes"]}
    with Launcher(Device.CPU) as launcher, tempfile.TemporaryDirectory() as scratch:
        for machine, busy in MACHINES.items():
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
            try:
                found[machine] = list(blocks(launcher, arguments.seconds, Path(scratch)))
            finally:
                for other in others:
                    other.kill()
                    other.wait()
        twin, base = (cell_of(name, TIMED["turns"]) for name in (TWIN, BASELINE))
        found["twins"] = [trial(launcher, twin, Path(scratch), base)[0] for _ in range(arguments.twins)]
        found |= {"starts": starts(arguments.seconds, Path(scratch))}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
