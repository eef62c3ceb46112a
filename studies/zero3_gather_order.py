"""How far losses of ZeRO-3 are from those of a host that waits for each update; two GPUs."""

import json
import os

import deepspeed
import torch
from torch import nn

STEPS, SIZE, SAMPLES = 6, 512, 16
CONFIG = {
    "train_micro_batch_size_per_gpu": SAMPLES,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "timers": {"throughput": {"enabled": False}},
}


def losses(*, waits: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(SIZE, SIZE), nn.GELU())))
    inputs, outputs = torch.randn(2, STEPS, SAMPLES, SIZE).cuda()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=model, optimizer=adamw, config=CONFIG)[0]
    found = []
    for x, y in zip(inputs, outputs, strict=True):
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        if waits:
            torch.cuda.synchronize()
        found.append(loss.detach())
    return torch.stack(found)


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
deepspeed.init_distributed("nccl")
deviation = (losses(waits=False) - losses(waits=True)).abs().max().item()
if torch.distributed.get_rank() == 0:
    print(json.dumps({"deviation": deviation}))
