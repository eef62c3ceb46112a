"""Ranks that the script starts itself: train_spawn.py spawn | fork."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from small_lm import ACCUMULATE, BATCH, VOCABULARY, SmallLM


def train(rank, port, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(SmallLM())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for i in range(8):
        x = torch.randint(VOCABULARY, (BATCH, 9), generator=generator)
        loss = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        (loss / ACCUMULATE).backward()
        if i % ACCUMULATE == ACCUMULATE - 1:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    port = 20000 + os.getpid() % 20000
    mp.start_processes(train, (port, 2), nprocs=2, start_method=sys.argv[1])
