"""``python -m tests.cuda.plain_zero3 STUB|--gpu``: where plain DeepSpeed gathers weights before they are updated.

Trains with ZeRO-3 on two GPUs that are not there, whose streams are threads, and writes docs/zero3.json: for each
configuration, how far losses are from those without threads, by seed. With ``--gpu`` it trains on the GPUs that are
there, and prints how far losses are from those of a host that waits for each kernel; two ranks share a single GPU.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.launch import shared_nccl
from tests.conftest import ROOT
from tests.cuda_stub import build

RESULTS = ROOT / "docs" / "zero3.json"
NONE_KEPT = {"stage3_param_persistence_threshold": 0}
TIMER_OFF = {"timers": {"throughput": {"enabled": False}}}
CONFIGS: dict[str, dict[str, Any]] = {
    "defaults": {"zero_optimization": {}},
    "timer off": {"zero_optimization": {}, **TIMER_OFF},
    "nothing kept": {"zero_optimization": NONE_KEPT},
    "nothing kept, timer off": {"zero_optimization": NONE_KEPT, **TIMER_OFF},
    "nothing kept, timer off, no overlap": {
        "zero_optimization": {**NONE_KEPT, "overlap_comm": False},
        **TIMER_OFF,
    },
}
"""What DeepSpeed is told besides stage and batch size."""
SEEDS = (2, 3, 5, 6, 7)
RANKS, SAMPLES = 2, 16
STEPS_AND_SIZE, OF_A_GPU = (6, 512), (200, 4096)
"""Updates, and the width of each layer: on a GPU so wide that writing weights takes longer than enqueuing a gather."""
SHARED, STEPS_OF_SHARED = ("nothing kept, timer off", "defaults"), 8
"""Configurations and updates of two ranks on one GPU, whose gathers go through sockets."""
LIMIT_S, POLL_S = 60.0, 0.1
"""How long the ranks may take to connect, and each collective; how often they are looked at."""


def train(config: dict[str, Any], steps: int, size: int) -> list[float]:
    """The mean loss of each step over the ranks. Nothing makes the host wait that DeepSpeed does not."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from bench.backends.deepspeed import prepare

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=LIMIT_S))
    prepare()
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(size, size), nn.GELU())))
    inputs, outputs = torch.randn(2, steps, ranks, SAMPLES, size).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    told = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "zero_allow_untested_optimizer": True,
        **config,
    }
    told["zero_optimization"] = {"stage": 3, **config["zero_optimization"]}
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config=told, dist_init_required=False
    )[0]
    losses = []
    for x, y in zip(inputs[:, rank], outputs[:, rank], strict=True):
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    summed = torch.stack(losses)
    dist.all_reduce(summed)
    return [loss / ranks for loss in summed.tolist()]


def losses_of(
    name: str,
    environment: dict[str, str],
    ranks: int,
    steps: int,
    size: int,
    *,
    shared: bool = False,
) -> list[float]:
    """Those of a training of a configuration, in which all ranks may share one GPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [
        sys.executable,
        "-m",
        "tests.cuda.plain_zero3",
        "--rank",
        name,
        str(steps),
        str(size),
    ]
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": "0" if shared else str(rank)}
        own |= shared_nccl.environment(rank) if shared else {}
        told = {**os.environ, **environment, **own}
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=told, stdout=subprocess.PIPE, text=True)
        )
    while (codes := [process.poll() for process in processes]) != [0] * ranks:
        if failed := list(filter(None, codes)):
            for process in processes:
                process.kill()  # it would wait for the other
            raise SystemExit(f"{name}: a rank ended with exit status {failed[0]}")
        time.sleep(POLL_S)
    output, _ = processes[0].communicate()
    found: list[float] = json.loads(output.splitlines()[-1])
    return found


def over_a_stub(stub: Path) -> None:
    """Train in every configuration and order, and write the file."""
    found: dict[str, dict[str, float]] = {}
    for name in CONFIGS:
        by_seed = {}
        for seed in ("", *map(str, SEEDS)):
            streams = {"FAKE_STREAMS": seed} if seed else {}
            about = build.environment(
                stub, values=True, FAKE_GPUS=str(RANKS), OMP_NUM_THREADS="1", **streams
            )
            by_seed[seed] = losses_of(name, about, RANKS, *STEPS_AND_SIZE)
        expected = by_seed.pop("")
        found[name] = {seed: deviation(name, losses, expected) for seed, losses in by_seed.items()}
    RESULTS.write_text(
        json.dumps({"steps": STEPS_AND_SIZE[0], "deviation": found}, indent=1) + "\n"
    )


def on_gpus() -> None:
    """Train in every configuration, on all GPUs; with two ranks on a single one, in some."""
    import torch

    shared, (steps, size) = torch.cuda.device_count() == 1, OF_A_GPU
    ranks = RANKS if shared else torch.cuda.device_count()
    steps = STEPS_OF_SHARED if shared else steps
    for name in SHARED if shared else CONFIGS:
        waiting, free = (
            losses_of(name, environment, ranks, steps, size, shared=shared)
            for environment in ({"CUDA_LAUNCH_BLOCKING": "1"}, {})
        )
        deviation(name, free, waiting)


def deviation(name: str, losses: list[float], expected: list[float]) -> float:
    """The largest of all steps, printed with all others."""
    found = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    print(f"{name}: {max(found):.2g};", *(f"{each:.1g}" for each in found), flush=True)
    return max(found)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        print(json.dumps(train(CONFIGS[sys.argv[2]], *map(int, sys.argv[3:]))), flush=True)
        os._exit(0)  # DeepSpeed's threads and NCCL's may not end by themselves
    elif sys.argv[1] == "--gpu":
        on_gpus()
    else:
        over_a_stub(Path(sys.argv[1]).resolve())
