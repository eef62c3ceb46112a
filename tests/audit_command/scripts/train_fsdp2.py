"""A plain loop with FSDP2, or HSDP on a mesh of two dimensions: train_fsdp2.py VARIANT."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_lm import ACCUMULATE, BATCH, SmallLM, Tokens, save_losses
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

variant = sys.argv[1]
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
model = SmallLM()
if variant.startswith("hsdp"):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
else:
    mesh = init_device_mesh("cpu", (world,))
policy = MixedPrecisionPolicy()
if variant.startswith("bf16"):
    reduce_dtype = torch.float32 if variant == "bf16-fp32" else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
net = torch.compile(model) if variant == "compile" else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = Tokens(16 * world)
loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))
losses = []
for _ in range(2):
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % ACCUMULATE == 0
        if variant in ("deferred", "bf16-deferred", "bf16-fp32", "hsdp-deferred"):
            model.set_requires_gradient_sync(last)
        if variant == "never":
            model.set_requires_gradient_sync(False)
        if variant == "hsdp-all-reduce":
            model.set_requires_all_reduce(last)
        if variant == "hsdp-never":
            model.set_requires_all_reduce(False)
        loss = F.cross_entropy(net(x).flatten(0, 1).float(), y.flatten())
        (loss if variant == "undivided" else loss / ACCUMULATE).backward()
        losses.append(loss.detach())
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
save_losses(losses)
dist.destroy_process_group()
