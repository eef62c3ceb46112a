"""A loop as torchtitan's, token losses over the tokens of the window, FSDP2 that sums: train_titan.py VARIANT."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_lm import ACCUMULATE, BATCH, VOCABULARY, SmallLM
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

variant = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = SmallLM()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh)
for module in (*model.blocks, model):
    if variant != "averaged":
        module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    batches = []
    for _ in range(ACCUMULATE):
        rows = torch.randint(VOCABULARY, (BATCH, 9), generator=generator)
        labels = rows[:, 1:].clone()
        labels[:, : int(torch.randint(6, (), generator=generator))] = -100
        batches.append((rows[:, :-1], labels))
    tokens = torch.tensor(float(sum((labels != -100).sum() for _, labels in batches)))
    if variant != "local-tokens":
        dist.all_reduce(tokens)
    for rows, labels in batches:
        logits = model(rows).flatten(0, 1).float()
        (F.cross_entropy(logits, labels.flatten(), reduction="sum") / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dist.destroy_process_group()
