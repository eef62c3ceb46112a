"""What the recorder of states takes of an update of a model of 135 million parameters."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.audit.command import audited_command
from bench.audit.invariance.split_runs import read

COST = "cost at 135m"
ROOT = Path(__file__).resolve().parents[2]
ACCUMULATE, UPDATES = 4, 1
MICRO_BATCHES = ((8, 256), (2, 128))
"""Rows and tokens per row: those of the matrix ``gpu`` at N = 4, and a short one."""


def measure() -> list[dict[str, float]]:
    """What the recorder costs an update with micro-batches of each size."""
    return [_measure(rows, length) for rows, length in MICRO_BATCHES]


def _measure(rows: int, length: int) -> dict[str, float]:
    """Train with the recorder, and return its share of the time of a sampled update, in seconds and as a ratio."""
    with tempfile.TemporaryDirectory() as name:
        ours = audited_command.environment(Path(name), UPDATES) | {"BENCH_AUDIT_FOR": "invariance"}
        paths = f"{ours['PYTHONPATH']}{os.pathsep}{ROOT}"
        command = [sys.executable, "-m", "tests.invariance.cost", str(rows), str(length)]
        output = subprocess.run(
            command,
            env=ours | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        (rank,) = read(Path(name)).values()
    assert rank.finish is not None
    seconds, parameters = map(float, output.split()[-2:])
    return {
        "parameters": parameters,
        "tokens": ACCUMULATE * rows * length,
        "accumulate": ACCUMULATE,
        "recorder_s": rank.finish.seconds / UPDATES,
        "window_s": seconds / UPDATES,
        "share": rank.finish.seconds / (seconds - rank.finish.seconds),
    }


def train(rows: int, length: int) -> None:
    """Train, and print the seconds of all updates, and the number of parameters."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    net = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    begin = time.perf_counter()
    for _ in range(UPDATES):
        for _ in range(ACCUMULATE):
            batch = torch.randint(49152, (rows, length + 1))
            scores = net(batch[:, :-1]).logits.flatten(0, 1)
            (cross_entropy(scores, batch[:, 1:].flatten()) / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(time.perf_counter() - begin, sum(parameter.numel() for parameter in net.parameters()))


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]))
