"""Times windows under an audit, in turns: without it, counting, and sampling.

train_cost.py ddp | fsdp2 WIDTH BLOCKS prints a JSON list per mode: seconds per window, one for each block.
"""

import gc
import json
import random
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

kind, width, blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
torch.manual_seed(0)
ACCUMULATE = 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


net = Model()
if kind == "fsdp2":
    from torch.distributed.fsdp import fully_shard

    for module in (*net.layers, net):
        fully_shard(module)
else:
    net = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
rows = torch.randint(256, (ACCUMULATE, 4, 65))


def window():
    for i, x in enumerate(rows):
        last = i == ACCUMULATE - 1
        if kind == "fsdp2":
            net.set_requires_gradient_sync(last)
        else:
            net.require_backward_grad_sync = last
        (F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()) / ACCUMULATE).backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(8):
    window()
recorder = next(found for found in gc.get_objects() if type(found).__name__ == "TrainingRecorder")
modes = ["without", "counting", "sampling"]
probes = recorder._probes
times = {mode: [] for mode in modes}
order = random.Random(0)
for _ in range(blocks):
    order.shuffle(modes)
    for mode in modes:
        recorder.active, recorder.sampling = mode != "without", mode == "sampling"
        recorder._probes = probes if recorder.sampling else []
        recorder.kernels.remove()
        if recorder.sampling:
            recorder.kernels.install()
        dist.barrier()
        start = time.perf_counter()
        window()
        times[mode].append(time.perf_counter() - start)
if dist.get_rank() == 0:
    print("COST", json.dumps(times))
dist.destroy_process_group()
