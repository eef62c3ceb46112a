"""Ranks that share a model, or parts of one, and split the same windows of 8 rows each: train_ranks.py VARIANT."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

variant = sys.argv[1]
N, B = int(os.environ.get("ACCUMULATE", "1")), int(os.environ.get("BATCH", "8"))
WIDTH, ROWS, UPDATES = 16, 8, 3
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
head = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 8))
net = nn.Sequential(body, head)
replica = rank
if variant.startswith("tensor"):
    replica = rank // 2
generator = torch.Generator().manual_seed(0 if variant.startswith("pipeline") else 1 + replica)
inputs = torch.randn(ROWS * UPDATES, WIDTH, generator=generator)
targets = torch.randint(8, (ROWS * UPDATES,), generator=generator)
windows = list(zip(inputs.split(ROWS), targets.split(ROWS), strict=True))


def pipelines():
    """1F1B in one schedule per update, or in N of them, each of which divides all that was accumulated."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    part = net[rank]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    several = variant != "pipeline"
    chunks = 2 if several else N * 2
    schedule = Schedule1F1B(
        stage, chunks, loss_fn=F.cross_entropy, scale_grads=variant != "pipeline-divided-later"
    )
    optimizer = torch.optim.AdamW(part.parameters(), 1e-2)
    for x, y in windows:
        for xs, ys in zip(*((x.split(B), y.split(B)) if several else ((x,), (y,))), strict=True):
            if rank == 0:
                schedule.step(xs)
            else:
                schedule.step(target=ys)
        if variant == "pipeline-divided-later":
            for parameter in part.parameters():
                parameter.grad /= chunks * N
        optimizer.step()
        optimizer.zero_grad()


def replicas():
    if variant.startswith("head"):
        parts = [DistributedDataParallel(body), DistributedDataParallel(head)]
    else:
        parts = [DistributedDataParallel(net)]
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for x, y in windows:
        for i, (xs, ys) in enumerate(zip(x.split(B), y.split(B), strict=True)):
            with contextlib.ExitStack() as stack:
                for part in parts if i < N - 1 else ():
                    stack.enter_context(part.no_sync())
                hidden = parts[0](xs)
                if variant == "head-bypassed":  # the module within, as a method of its own would be
                    scores = parts[1].module(hidden)
                elif variant == "head":
                    scores = parts[1](hidden)
                else:
                    scores = hidden
                (F.cross_entropy(scores, ys) / N).backward()
        optimizer.step()
        optimizer.zero_grad()


def shards():
    """Tensor parallel layers within FSDP2, or FSDP2 that sums, as torchtitan's."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    if variant.startswith("tensor"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"0.0": ColwiseParallel(), "0.2": RowwiseParallel()}
        parallelize_module(net, mesh["tensor"], plan)
        fully_shard(net, mesh=mesh["data"])
    else:
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
        net.set_gradient_divide_factor(1.0)
        net.set_force_sum_reduction_for_comms(True)  # gloo has no other
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for x, y in windows:
        tokens = ROWS * world
        if variant == "titan-micro-batch":
            tokens = B * world
        for i, (xs, ys) in enumerate(zip(x.split(B), y.split(B), strict=True)):
            net.set_requires_gradient_sync(i == N - 1)
            if variant.startswith("titan"):
                loss = F.cross_entropy(net(xs), ys, reduction="sum") / tokens
            else:
                loss = F.cross_entropy(net(xs), ys) / N
            loss.backward()
        if variant == "tensor-undivided":
            for parameter in head.parameters():
                parameter.grad *= N
        if variant.startswith("titan"):  # norms of two meshes do not add up in torch
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if variant.startswith("pipeline"):
    pipelines()
elif variant.startswith(("tensor", "titan")):
    shards()
else:
    replicas()
dist.barrier()
dist.destroy_process_group()
