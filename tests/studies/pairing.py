"""``python -m tests.studies.pairing``: whether cells that train in the same processes compare better than apart.

Blocks are made in both designs in turn: apart, each cell in processes of its own, as the bench does; together, all
cells of a block in the same processes, forwards and backwards (A B B A), each a fresh build with half the windows. Once
on the machine as it is, once beside two programs that never wait. Writes docs/pairing.json, the median step of each
cell in each block; docs/statistics.md reads it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from bench.launch.launcher import Launcher
from bench.plan.cell import Cell, Device
from bench.run.trial_record import warmup
from tests.conftest import ROOT
from tests.studies.markdown import table
from tests.worlds import by_rank

RESULTS = ROOT / "docs" / "pairing.json"
BASELINE, TWIN = "ddp-deferred", "A/A twin"
OTHERS = ("fsdp2-eager", "fsdp2-deferred", "deepspeed-zero2-eager", "deepspeed-zero3-eager", "lightning-ddp")
DESIGNS = {"apart": 12, "together": 6}
"""Timed windows of a training."""
MACHINES = {"idle": 0, "beside two busy programs": 2}


def block(launcher: Launcher, design: str, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """The median step of each cell, whose slower rank counts, and what the block took; in seconds."""
    cells = [
        Cell(
            backend=BASELINE if name == TWIN else name,
            twin="aa" if name == TWIN else "",
            accumulate=2,
            world_size=2,
            global_batch_size=16,
            sequence_length=64,
            warmup_windows=3,
            timed_windows=DESIGNS[design],
            seed=0,
        )
        for name in names
    ]
    groups = [[cell] for cell in cells] if design == "apart" else [[*cells, *reversed(cells)]]
    medians: dict[str, list[float]] = {name: [] for name in names}
    begin = time.monotonic()
    for number, group in enumerate(groups):
        for cell, ranks in zip(group, by_rank(launcher, folder / str(number), group, ("time",)), strict=True):
            steps = [max(step) for step in zip(*(rank["time"]["step_seconds"] for rank in ranks if rank), strict=True)]
            medians[names[cells.index(cell)]].append(statistics.median(steps[warmup(steps) :]))
    seconds = time.monotonic() - begin
    return {"design": design, "seconds": seconds, "steps": {n: statistics.mean(m) for n, m in medians.items()}}


def section() -> list[str]:
    """What was found, in Markdown."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    ratios: dict[tuple[str, str, str], tuple[float, float, float]] = {}
    costs: dict[tuple[str, str, str], float] = {}
    counts = []
    for machine, design in itertools.product(MACHINES, DESIGNS):
        blocks = [block for block in found[machine] if block["design"] == design]
        counts.append(len(blocks))
        for name in blocks[0]["steps"].keys() - {BASELINE}:
            logs = [math.log(block["steps"][name] / block["steps"][BASELINE]) for block in blocks]
            spread = statistics.stdev(logs)
            half = student(len(logs) - 1).ppf(0.975) * spread / len(logs) ** 0.5
            low, ratio, high = (math.exp(statistics.mean(logs) + side * half) for side in (-1, 0, 1))
            ratios[machine, name, design] = (ratio, low, high)
            costs[machine, name, design] = spread * statistics.mean(block["seconds"] for block in blocks) ** 0.5
    cells = sorted({(machine, name) for machine, name, _ in ratios})
    rows = [
        (
            machine,
            name,
            *itertools.chain.from_iterable(
                (
                    "{:.2f} ({:.2f} to {:.2f})".format(*ratios[machine, name, design]),
                    f"{costs[machine, name, design]:.2f}",
                )
                for design in DESIGNS
            ),
        )
        for machine, name in cells
    ]
    gain = statistics.geometric_mean(costs[*cell, "together"] / costs[*cell, "apart"] for cell in cells)
    idle, busy = (ratios[machine, "fsdp2-deferred", "apart"] for machine in MACHINES)
    header = itertools.chain.from_iterable((f"{design}: ratio", "spread") for design in DESIGNS)
    return [
        "## Cells in the same processes",
        "",
        "A block could train its cells one after the other in the same processes, forwards and backwards, instead of "
        "each in processes of its own. Both designs were measured in turn on two cores at N = 2: the ratio of each "
        f"cell's step to that of `{BASELINE}` with its 95 % interval, and its spread, the standard deviation of a "
        "block's log ratio times the root of the block's seconds, which tells the width that an hour buys. Each design "
        f"has at least {min(counts)} blocks on each machine.",
        "",
        *table(("machine", "cell", *header), rows),
        f"Together, the spread is {gain:.2f} times as large as apart (geometric mean). The bench trains them apart. "
        f"Beside two programs that never wait, `fsdp2-deferred` takes {busy[0]:.2f} ({busy[1]:.2f} to {busy[2]:.2f}) "
        f"times as long as `{BASELINE}`, and {idle[0]:.2f} ({idle[1]:.2f} to {idle[2]:.2f}) times on the idle machine: "
        "load changes the ratio itself, however the cells are paired. So times from a busy machine are not compared.",
        "",
    ]


def main() -> int:
    """Measure both designs on both machines, and write what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.studies.pairing", description=str(__doc__).partition(": ")[2]
    )
    words = "of each machine (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=1200, metavar="S", help=words)
    seconds = parser.parse_args().seconds
    cells = [BASELINE, TWIN, *OTHERS]
    found: dict[str, list[dict[str, Any]]] = {}
    with Launcher(Device.CPU) as launcher, tempfile.TemporaryDirectory() as scratch:
        for machine, busy in MACHINES.items():
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
            try:
                found[machine] = []
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    names = random.sample(cells, len(cells))
                    for design in random.sample(list(DESIGNS), len(DESIGNS)):
                        folder = Path(scratch) / f"{machine}-{len(found[machine])}"
                        found[machine].append(block(launcher, design, names, folder))
            finally:
                for other in others:
                    other.kill()
                    other.wait()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
