"""What the bench costs: its step time over a bare loop's, measured in turn: ``python -m tests.speed``.

Not a test: machines are shared and noisy. One process group trains a window with the bench's backend and taps, then one
with a bare loop, and so on (paired.py), so nothing but the bench is between them. It prints each ratio with its 95 %
interval, the bound, and whether the interval lies inside it, and exits with 1 if one lies outside. It runs on all GPUs
if there are any, else on two ranks of the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import bootstrap

from bench.launch import gpus as launch_gpus
from bench.plan.cell import Device
from bench.plan.task import Spec
from tests.conftest import ROOT
from tests.factories import make_cell

BOUND = 0.01
"""How far from 1 a ratio may be."""
FREE = {"GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def in_turn(device: Device, ranks: int, backend: str, kind: str, windows: int) -> list[float]:
    """Log ratios bench / bare of neighbouring windows, each the maximum over ranks, of one process group."""
    sizes = {"world_size": ranks, "global_batch_size": 8 * ranks, "sequence_length": 64}
    cell = make_cell(backend=backend, device=device, warmup_windows=3, timed_windows=windows, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        spec = Spec(cell=cell, passes=("time",), folder=folder, reference=f"{folder}/none")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "tests.paired", spec.to_json(), kind]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    bench, bare = ([max(step) for step in zip(*(one[k] for one in found), strict=True)] for k in ("bench", "bare"))
    return [float(np.log(a / b)) for a, b in zip(bench, bare, strict=True)]


def verdict(title: str, logs: Sequence[float]) -> bool:
    """Print a ratio; False only if its whole interval lies outside the bound."""
    interval = bootstrap((logs,), np.median, confidence_level=0.95, random_state=0).confidence_interval
    low, middle, high = np.exp([interval.low, np.median(logs), interval.high])
    word = "undecided: the interval is wider than the bound"
    if low >= 1 - BOUND and high <= 1 + BOUND:
        word = "inside"
    elif low > 1 + BOUND or high < 1 - BOUND:
        word = "OUTSIDE"
    print(f"{title}: {middle:.4f} (95 % {low:.4f} - {high:.4f}, {len(logs)} pairs); bound 1 +- {BOUND}: {word}")
    return word != "OUTSIDE"


def main() -> int:
    """Measure DDP and FSDP2, both with deferred sync."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4, help="process groups per ratio")
    parser.add_argument("--windows", type=int, default=40, help="timed windows per group")
    options = parser.parse_args()
    os.environ.update(FREE)
    gpus = len(launch_gpus.gpus())
    place = (Device.CUDA, gpus) if gpus else (Device.CPU, 2)
    good = []
    for backend, kind in (("ddp-deferred", "ddp"), ("fsdp2-deferred", "fsdp2")):
        logs = [log for _ in range(options.groups) for log in in_turn(*place, backend, kind, options.windows)]
        good.append(verdict(f"step time of {backend}, bench / bare loop", logs))
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
