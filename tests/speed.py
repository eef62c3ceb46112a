"""What the bench costs, as ratios measured side by side in one run: ``python -m tests.speed``.

Not a test: machines are shared and noisy. It prints, for each claim, the ratio with its 95 % interval (bootstrap over
interleaved pairs), the bound, and whether the interval lies inside it, and exits with 1 if one lies outside.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path

import numpy as np
from scipy.stats import bootstrap

from bench.cell import Cell, Device
from bench.launch import Launcher
from bench.trial import Spec

ROOT = Path(__file__).resolve().parent.parent
WARMUP, TIMED, ACCUMULATE, BATCH, LENGTH, RANKS = 3, 15, 4, 16, 64, 2
FREE = {"GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def median_step(per_rank: Sequence[Sequence[float]]) -> float:
    """Median over steps of the maximum over ranks."""
    return statistics.median(max(step) for step in zip(*per_rank, strict=True))


def bare(kind: str) -> float:
    """Seconds per step of the bare loop."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += [str(ROOT / "tests" / "bare.py"), kind, str(WARMUP + TIMED), str(ACCUMULATE)]
        command += [str(BATCH // ACCUMULATE // RANKS), str(LENGTH), folder]
        environment = os.environ | FREE | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text())[WARMUP - 1 :] for rank in range(RANKS)]
    return median_step(ranks)


def benched(launcher: Launcher, backend: str, overheads: list[float]) -> float:
    """Seconds per step as the bench measures them; the trial's fixed cost is added to ``overheads``."""
    cell = Cell(
        backend=backend,
        accumulate=ACCUMULATE,
        world_size=RANKS,
        global_batch_size=BATCH,
        sequence_length=LENGTH,
        warmup_windows=WARMUP,
        timed_windows=TIMED,
    )
    with tempfile.TemporaryDirectory() as folder:
        outcome = launcher.run(Spec(cell=cell, passes=("time",), folder=folder, reference=f"{folder}/none"), 300)
    assert outcome.ranks, outcome.reason
    overheads.append(outcome.wall_s - max(rank["training_s"] for rank in outcome.ranks))
    return median_step([rank["time"]["step_seconds"] for rank in outcome.ranks])


def ratio(title: str, bound: float, pairs: int, ours: Callable[[], float], theirs: Callable[[], float]) -> bool:
    """Measure interleaved pairs in random order and print the ratio; True if it may lie within 1 +- bound."""
    logs = []
    for _ in range(pairs):
        order = [(0, ours), (1, theirs)]
        random.shuffle(order)
        times = {which: measure() for which, measure in order}
        logs.append(np.log(times[0] / times[1]))
    interval = bootstrap((logs,), np.median, confidence_level=0.95, random_state=0).confidence_interval
    low, middle, high = np.exp([interval.low, np.median(logs), interval.high])
    good = low <= 1 + bound and high >= 1 - bound
    sure = 1 - bound <= low and high <= 1 + bound
    word = "inside" if sure else "not excluded, but the interval is wider than the bound" if good else "OUTSIDE"
    print(f"{title}: {middle:.3f} (95 % {low:.3f} - {high:.3f}, {pairs} pairs); bound 1 +- {bound}: {word}", flush=True)
    return bool(good)


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12, help="interleaved pairs per ratio")
    pairs = parser.parse_args().pairs
    os.environ.update(FREE)
    overheads: list[float] = []
    unused: list[float] = []
    good = []
    with Launcher(Device.CPU) as warm, Launcher(Device.CPU, cold=True) as cold:
        benched(warm, "ddp-deferred", unused)  # the fork server's first children fault their pages in
        for backend, kind in (("ddp-deferred", "ddp"), ("fsdp2-deferred", "fsdp2")):
            ours = functools.partial(benched, warm, backend, overheads)
            theirs = functools.partial(bare, kind)
            good.append(ratio(f"step time of {backend}, bench / bare loop", 0.02, pairs, ours, theirs))
        good.append(
            ratio(
                "step time of ddp-deferred, warm / cold trials",
                0.02,
                pairs,
                lambda: benched(warm, "ddp-deferred", overheads),
                lambda: benched(cold, "ddp-deferred", unused),
            )
        )
    fixed = statistics.median(overheads)
    good.append(fixed < 1.5)
    print(f"fixed cost of a warm trial: median {fixed:.2f} s of {len(overheads)}; bound 1.5 s")
    planned = statistics.median(plan_seconds() for _ in range(3))
    good.append(planned < 2.0)
    print(f"plan of 10,000 cells: median {planned:.2f} s of 3; bound 2 s")
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
