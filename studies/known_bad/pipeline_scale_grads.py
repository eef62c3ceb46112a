"""The weight of each of three schedules that accumulate into one update, under torch's pipelining; two ranks."""

import json

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank = dist.get_rank()


class Scale(torch.nn.Module):
    """Multiplies its input by weights that start at 1."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weights


part = Scale()
stage = PipelineStage(part, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda y, _: y.sum(1).mean())
for one_hot in torch.eye(3):  # a gradient of 1 in weight i alone
    batch = one_hot.expand(4, 3)
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch)
if rank == 1:
    measured = part.weights.grad.tolist()
dist.barrier()
mine = part.weights.grad
every = [torch.zeros(3) for _ in range(2)]
dist.all_gather(every, mine)
measured = [each.tolist() for each in every]
if rank == 0:
    print(
        json.dumps(
            {
                "case": "gradient of each schedule, by stage",
                "measured": measured,
                "right": [[1.0] * 3] * 2,
            }
        ),
        flush=True,
    )
