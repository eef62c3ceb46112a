"""What the bench costs, as ratios measured side by side in one run: ``python -m tests.speed``.

Not a test: machines are shared and noisy. It prints each ratio with its 95 % interval, the bound, and whether the
interval lies inside it, and exits with 1 if one lies outside. On all GPUs if there are any, else on two ranks of the
CPU. Two kinds of ratio are taken:

- *in turn*: one process group trains a window with the bench's backend and taps, then one with a bare loop, and so on
  (paired.py). Nothing but the bench is between them.
- *apart*: whole trials, warm and cold, in random order. This compares process groups, whose times differ from one to
  the next on a shared machine, so it needs many pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import bootstrap

from bench.launch import gpus as launch_gpus
from bench.launch.launcher import Launcher
from bench.plan.cell import Cell, Device
from bench.plan.task import Spec

ROOT = Path(__file__).resolve().parent.parent
ACCUMULATE, MICRO_BATCH, LENGTH = 4, 2, 64
CPU_RANKS = 2
IN_TURN, APART = 0.01, 0.02
"""Bounds: how far from 1 a ratio may be."""
FREE = {"GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Place:
    """Where ratios are taken."""

    device: Device
    ranks: int


def make_cell(place: Place, backend: str, timed_windows: int) -> Cell:
    """The cell that all ratios are taken on."""
    return Cell(
        backend=backend,
        accumulate=ACCUMULATE,
        world_size=place.ranks,
        global_batch_size=MICRO_BATCH * ACCUMULATE * place.ranks,
        sequence_length=LENGTH,
        warmup_windows=3,
        timed_windows=timed_windows,
        device=place.device,
    )


def in_turn(place: Place, backend: str, kind: str, windows: int) -> list[float]:
    """Log ratios bench / bare of neighbouring windows, each the maximum over ranks, of one process group."""
    with tempfile.TemporaryDirectory() as folder:
        cell = make_cell(place, backend, windows)
        spec = Spec(cell=cell, passes=("time",), folder=folder, reference=f"{folder}/none")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={place.ranks}"]
        command += ["-m", "tests.paired", spec.to_json(), kind]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(place.ranks)]
    bench, bare = ([max(step) for step in zip(*(r[k] for r in ranks), strict=True)] for k in ("bench", "bare"))
    return [float(np.log(a / b)) for a, b in zip(bench, bare, strict=True)]


def step_seconds(place: Place, launcher: Launcher, backend: str, overheads: list[float]) -> float:
    """Median seconds per step of one trial; its fixed cost is added to ``overheads``."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Spec(cell=make_cell(place, backend, 15), passes=("time",), folder=folder, reference=f"{folder}/none")
        outcome = launcher.run(spec, 300)
    assert outcome.ranks, outcome.reason
    overheads.append(outcome.wall_s - max(rank["training_s"] for rank in outcome.ranks))
    steps = [rank["time"]["step_seconds"] for rank in outcome.ranks]
    return statistics.median(max(step) for step in zip(*steps, strict=True))


def apart(pairs: int, ours: Callable[[], float], theirs: Callable[[], float]) -> list[float]:
    """Log ratios of whole trials, each pair in random order."""
    logs = []
    for _ in range(pairs):
        order = [(0, ours), (1, theirs)]
        random.shuffle(order)
        times = {which: measure() for which, measure in order}
        logs.append(float(np.log(times[0] / times[1])))
    return logs


def verdict(title: str, logs: Sequence[float], bound: float) -> bool:
    """Print a ratio; False only if its whole interval lies outside the bound."""
    interval = bootstrap((logs,), np.median, confidence_level=0.95, random_state=0).confidence_interval
    low, middle, high = np.exp([interval.low, np.median(logs), interval.high])
    word = "undecided: the interval is wider than the bound"
    if 1 - bound <= low and high <= 1 + bound:
        word = "inside"
    elif low > 1 + bound or high < 1 - bound:
        word = "OUTSIDE"
    print(
        f"{title}: {middle:.4f} (95 % {low:.4f} - {high:.4f}, {len(logs)} pairs); bound 1 +- {bound}: {word}",
        flush=True,
    )
    return word != "OUTSIDE"


def plan_seconds() -> float:
    """Seconds of ``bench plan`` of 10,000 cells, the interpreter's start included."""
    with tempfile.TemporaryDirectory() as folder:
        text = (ROOT / "bench/matrices/smoke.toml").read_text()
        factors = [2**n for n in range(25)]
        text = text.replace("accumulate = [2]", f"accumulate = {factors}")
        text = text.replace("world_size = [2]", f"world_size = {factors[:24]}")
        text = text.replace("global_batch_size = 4", f"global_batch_size = {2**50}")
        (Path(folder) / "big.toml").write_text(text)
        started = time.perf_counter()
        command = [sys.executable, "-m", "bench", "plan", "--matrix", f"{folder}/big.toml"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
        seconds = time.perf_counter() - started
    assert len(lines) > 10_000
    return seconds


def main() -> int:
    """Measure all claims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4, help="process groups per ratio taken in turn")
    parser.add_argument("--windows", type=int, default=40, help="timed windows per such group")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of trials per ratio taken apart")
    parser.add_argument("--device", choices=list(Device), help="default: cuda if there is a GPU, else cpu")
    options = parser.parse_args()
    os.environ.update(FREE)
    gpus = len(launch_gpus.gpus())
    device = Device(options.device or (Device.CUDA if gpus else Device.CPU))
    place = Place(device, gpus if device is Device.CUDA else CPU_RANKS)
    if not place.ranks:
        parser.error("--device cuda: no GPU is visible here")
    good = []
    for backend, kind in (("ddp-deferred", "ddp"), ("fsdp2-deferred", "fsdp2")):
        logs = [log for _ in range(options.groups) for log in in_turn(place, backend, kind, options.windows)]
        good.append(verdict(f"step time of {backend}, bench / bare loop, in turn", logs, IN_TURN))
    overheads: list[float] = []
    # One of them at a time may have the GPUs for itself, and neither runs while the other does.
    with Launcher(place.device) as warm, contextlib.closing(Launcher(place.device, cold=True)) as cold:
        step_seconds(place, warm, "ddp-deferred", [])  # the fork server's first children fault their pages in
        ours = functools.partial(step_seconds, place, warm, "ddp-deferred", overheads)
        theirs = functools.partial(step_seconds, place, cold, "ddp-deferred", [])
        good.append(verdict("step time of ddp-deferred, warm / cold, apart", apart(options.pairs, ours, theirs), APART))
    fixed = statistics.median(overheads)
    good.append(fixed < 1.5)
    print(f"fixed cost of a warm trial: median {fixed:.2f} s of {len(overheads)}; bound 1.5 s")
    planned = statistics.median(plan_seconds() for _ in range(3))
    good.append(planned < 2.0)
    print(f"plan of 10,000 cells: median {planned:.2f} s of 3; bound 2 s")
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
