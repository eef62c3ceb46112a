"""``audit`` over the stub of CUDA: the verdicts of training on the CPU, and the host waits no more than without it."""

from __future__ import annotations

import json

import pytest

from tests.cuda.conftest import Machine

LOOP = """
import sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from tests.cuda_stub.counters import WAITING, Counters

variant = sys.argv[1]
dist.init_process_group("nccl")
rank, N = dist.get_rank(), 4
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32)).cuda()
net = nn.parallel.DistributedDataParallel(model, [rank])
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
rows = torch.randint(32, (4, N, 4, 9), generator=torch.Generator().manual_seed(rank)).cuda()
counters, waits = Counters(), []
for window in rows:
    before = counters.now()
    for i, x in enumerate(window):
        net.require_backward_grad_sync = i == (0 if variant == "late" else N - 1)
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


def waits(text: str) -> list[int]:
    """In all windows but the first, in which what to sample is chosen."""
    line = next(line for line in text.splitlines() if line.startswith("WAITS "))
    return json.loads(line.removeprefix("WAITS "))[1:]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("variant", "verdict"),
    [("right", "weights right"), ("undivided", "not divided"), ("late", "partly reduced")],
)
def test_verdicts_without_waiting_for_the_device(
    machine: Machine, variant: str, verdict: str
) -> None:
    (machine.folder / "train.py").write_text(LOOP)
    audited = machine.bench("audit", "--", "python", *LAUNCH, variant, gpus=2)
    assert f"verdict   {verdict}, in updates" in audited.stdout, (
        audited.stdout + audited.stderr[-3000:]
    )
    assert "all_reduce of float32 over 2 ranks" in audited.stdout
    start = f"import subprocess; subprocess.run(['python', *{LAUNCH}, {variant!r}], cwd={str(machine.folder)!r})"
    assert waits(audited.stdout) == waits(machine.python(start, gpus=2, values=True))
