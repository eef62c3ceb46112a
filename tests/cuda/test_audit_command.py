"""The recorder of ``audit`` on a GPU that is not there: it never makes the host wait for the device."""

from __future__ import annotations

import json

from tests.cuda.conftest import Machine

LOOP = """
import torch, torch.nn.functional as F
from torch import nn
from tests.cuda_stub.counters import WAITING, Counters

model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
rows = torch.randint(32, (8, 4, 9)).cuda()
counters = Counters()
waits = []
for _ in range(4):
    before = counters.now()
    for x in rows:
        (F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()) / 8).backward()
    optimizer.step()
    optimizer.zero_grad()
    after = counters.now()
    waits.append(sum(after[kind] - before[kind] for kind in WAITING))
print("WAITS", waits)
"""


def test_sampling_never_waits_for_the_device(machine: Machine) -> None:
    script = machine.folder / "train.py"
    script.write_text(LOOP)
    bare = machine.python(LOOP)
    process = machine.bench("audit", "--", "python", str(script))
    line = next(line for line in process.stdout.splitlines() if line.startswith("WAITS"))
    # It may wait while it chooses what to sample, in the first window.
    assert json.loads(line.removeprefix("WAITS "))[1:] == json.loads(bare.removeprefix("WAITS "))[1:]
    # Its kernels calculate nothing, so that gradients have no values, but every backward is seen.
    assert "8 8 8 8 micro-batches; events BBBBBBBBS" in process.stdout
