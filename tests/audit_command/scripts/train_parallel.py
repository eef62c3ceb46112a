"""Ranks that are no replicas: train_parallel.py tensor | pipeline | pipeline-accumulated | fsdp1 | by-hand."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_lm import ACCUMULATE, BATCH, VOCABULARY, WIDTH, SmallLM
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

variant = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank if variant.startswith("pipeline") or variant == "by-hand" else 0)
rows = torch.randint(
    VOCABULARY, (BATCH * ACCUMULATE, 9), generator=torch.Generator().manual_seed(1)
)
if variant.startswith("pipeline"):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    net = nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(net, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, ACCUMULATE, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        # pytorch/torchtitan 1733: each schedule divides the gradient of all before it
        for _ in range(3 if variant == "pipeline-accumulated" else 1):
            if rank == 0:
                schedule.step(torch.randn(8, WIDTH))
            else:
                schedule.step(target=torch.randn(8, WIDTH))
        optimizer.step()
        optimizer.zero_grad()
else:
    net = SmallLM()
    if variant == "tensor":
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        for block in net.blocks:
            parallelize_module(
                block,
                init_device_mesh("cpu", (2,)),
                {"0": ColwiseParallel(), "2": RowwiseParallel()},
            )
    if variant == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        for x in rows.split(BATCH):
            loss = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            (loss / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()
dist.barrier()  # where a rank leaves first, one with FSDP1 may abort: "terminate called without an active exception"
dist.destroy_process_group()
