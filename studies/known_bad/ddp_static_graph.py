"""Whether DDP with static_graph=True accumulates under no_sync(); two ranks, N = 4."""

import json
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

N = 4
dist.init_process_group("gloo")
weights = torch.nn.Linear(N, 1, bias=False)
torch.nn.init.zeros_(weights.weight)
model = DistributedDataParallel(weights, static_graph=True)
sgd = torch.optim.SGD(model.parameters(), lr=1.0)
try:
    for i, one_hot in enumerate(torch.eye(N)):
        with model.no_sync() if i < N - 1 else nullcontext():
            (
                model(one_hot) * (1 + 2 * dist.get_rank()) / N
            ).sum().backward()  # the mean over the ranks is 2 / N
    sgd.step()
    measured = (0 - weights.weight).flatten().tolist()
except RuntimeError as error:
    measured = f"RuntimeError: {str(error).partition(' at ')[0]}"
if dist.get_rank() == 0:
    print(
        json.dumps({"case": "weights of the window", "measured": measured, "right": [0.5] * N}),
        flush=True,
    )
