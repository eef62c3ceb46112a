"""``python -m tests.cuda.plain_zero3 STUB``: where plain DeepSpeed gathers weights before they are updated.

Trains with ZeRO-3 on two GPUs that are not there, whose streams are threads, and writes docs/zero3.json: for each
configuration, how far losses are from those without threads, by seed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    "nothing kept, timer off, no overlap": {"zero_optimization": {**NONE_KEPT, "overlap_comm": False}, **TIMER_OFF},
}
"""What DeepSpeed is told besides stage and batch size."""
SEEDS = (2, 3, 5, 6, 7)
RANKS, STEPS, SAMPLES, SIZE = 2, 6, 16, 512


def train(config: dict[str, Any]) -> list[float]:
    """The mean loss of each step over the ranks. Nothing makes the host wait that DeepSpeed does not."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from bench.backends.deepspeed import prepare

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    prepare()
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(SIZE, SIZE), nn.GELU())))
    inputs, outputs = torch.randn(2, STEPS, RANKS, SAMPLES, SIZE).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    told = {"train_micro_batch_size_per_gpu": SAMPLES, "zero_allow_untested_optimizer": True, **config}
    told["zero_optimization"] = {"stage": 3, **config["zero_optimization"]}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=told, dist_init_required=False)[0]
    losses = []
    for x, y in zip(inputs[:, rank], outputs[:, rank], strict=True):
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    summed = torch.stack(losses)
    dist.all_reduce(summed)
    return [loss / RANKS for loss in summed.tolist()]


def losses_of(stub: Path, name: str, seed: int | None) -> list[float]:
    """Those of a training on two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    streams = {} if seed is None else {"FAKE_STREAMS": str(seed)}
    about = build.environment(stub, values=True, FAKE_GPUS=str(RANKS), OMP_NUM_THREADS="1", **streams)
    about |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    command = [sys.executable, "-m", "tests.cuda.plain_zero3", "--rank", name]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **about, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    outputs = [process.communicate()[0] for process in ranks]
    found: list[float] = json.loads(outputs[0].splitlines()[-1])
    return found


def main(stub: Path) -> None:
    """Train in every configuration and order, and write the file."""
    found: dict[str, dict[str, float]] = {}
    for name in CONFIGS:
        expected = losses_of(stub, name, None)
        found[name] = {}
        for seed in SEEDS:
            losses = losses_of(stub, name, seed)
            found[name][str(seed)] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            print(name, seed, [f"{abs(a - b):.1g}" for a, b in zip(losses, expected, strict=True)], flush=True)
    RESULTS.write_text(json.dumps({"steps": STEPS, "deviation": found}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        print(json.dumps(train(CONFIGS[sys.argv[2]])), flush=True)
        os._exit(0)  # DeepSpeed's threads and NCCL's may not end by themselves
    main(Path(sys.argv[1]).resolve())
