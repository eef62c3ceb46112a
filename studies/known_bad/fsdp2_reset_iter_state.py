"""The weights of a window that FSDP2 starts after reset_iter_state() has thrown the one before away; N = 4."""

import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

N = 4
dist.init_process_group("gloo")
weights = torch.nn.Linear(N + 1, 1, bias=False)
torch.nn.init.zeros_(weights.weight)
model = fully_shard(weights, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
sgd = torch.optim.SGD(model.parameters(), lr=1.0)
one_hot = torch.eye(N + 1)
model.set_requires_gradient_sync(False)
(model(one_hot[N]) / N).sum().backward()  # the first micro-batch of a window
model(one_hot[0])  # an exception comes here, before its backward
model.reset_iter_state()
sgd.zero_grad()
for i in range(N):  # the window is restarted
    model.set_requires_gradient_sync(i == N - 1)
    (model(one_hot[i]) / N).sum().backward()
sgd.step()
measured = (0 - model.weight.full_tensor()).flatten().tolist()
print(
    json.dumps(
        {
            "case": "the window, and what was thrown away",
            "measured": measured,
            "right": [0.25] * N + [0.0],
        }
    )
)
