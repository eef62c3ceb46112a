"""A bare training loop without the bench, to hold the bench's own times against. Run by speed.py under torchrun."""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

kind, steps, accumulate, micro_batch, length, folder = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=704, vocab_size=256, use_cache=False)).float()
if kind == "fsdp2":
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
data = torch.randint(32, (steps * accumulate * micro_batch, length + 1))
marks = []
for step in range(steps):
    for micro in range(accumulate):
        last, at = micro == accumulate - 1, (step * accumulate + micro) * micro_batch
        if kind == "fsdp2":
            model.set_requires_gradient_sync(last)
        else:
            model.require_backward_grad_sync = last
        tokens = data[at : at + micro_batch]
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        (cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / accumulate).backward()
    optimizer.step()
    marks.append(time.perf_counter())
    optimizer.zero_grad()
with open(f"{folder}/{dist.get_rank()}.json", "w") as file:  # noqa: PTH123
    json.dump([after - before for before, after in zip(marks, marks[1:])], file)  # noqa: B905, RUF007
dist.barrier()
dist.destroy_process_group()
