"""``invariance`` over the stub of CUDA: the verdicts of training on the CPU, and no waiting after sampled updates."""

from __future__ import annotations

import json

import pytest

from tests.cuda.conftest import Machine

LOOP = """
import sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from tests.cuda_stub.counters import WAITING, Counters

variant, N = sys.argv[1], int(sys.argv[2])
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32)).cuda()
net = nn.parallel.DistributedDataParallel(model, [rank])
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
rows = torch.randint(32, (5, 8, 9), generator=torch.Generator().manual_seed(rank)).cuda()
counters, waits = Counters(), []
for window in rows:
    before = counters.now()
    for i, x in enumerate(window.split(8 // N)):
        net.require_backward_grad_sync = i == N - 1
        loss = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        (loss if variant == "undivided" else loss / N).backward()
    optimizer.step()
    optimizer.zero_grad()
    after = counters.now()
    waits.append(sum(after[kind] - before[kind] for kind in WAITING))
print("WAITS", waits) if rank == 0 else None
dist.destroy_process_group()
"""
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")


def waits(text: str) -> list[list[int]]:
    """By run, in its windows."""
    lines = [line for line in text.splitlines() if line.startswith("WAITS ")]
    return [json.loads(line.removeprefix("WAITS ")) for line in lines]


@pytest.mark.parametrize(
    ("variant", "words"),
    [("right", "verdict   equal to rounding"), ("undivided", "differs by the factor 4 (N)")],
)
def test_verdicts_without_waiting_for_the_device(
    machine: Machine, variant: str, words: str
) -> None:
    (machine.folder / "train.py").write_text(LOOP)
    vary = ("--vary", "{N}", "--accumulate", "1,4", "--updates", "2")
    compared = machine.bench("invariance", *vary, "--", "python", *LAUNCH, variant, gpus=2)
    assert words in compared.stdout, compared.stdout + compared.stderr[-3000:]
    start = f"import subprocess; subprocess.run(['python', *{LAUNCH}, {variant!r}, '1'], cwd={str(machine.folder)!r})"
    (bare,) = waits(machine.python(start, gpus=2, values=True))
    first = waits(compared.stdout)[0]
    # The state after the second update is read in the third window.
    assert first[3:] == bare[3:]
