"""The weights of a window that FSDP2 starts after zero_grad() has ended the one before; N = 4."""

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
(
    model(one_hot[N]) / N
).sum().backward()  # the only micro-batch of an incomplete window at the end of an epoch
sgd.step()
sgd.zero_grad()
for i in range(N):
    model.set_requires_gradient_sync(i == N - 1)
    (model(one_hot[i]) / N).sum().backward()
sgd.step()
measured = (0 - model.weight.full_tensor()).flatten().tolist()
print(
    json.dumps(
        {
            "case": "the window, and the micro-batch before it",
            "measured": measured,
            "right": [0.25] * N + [0.0],
        }
    )
)
