"""The weight of each micro-batch of two windows in bf16 without ZeRO."""

import json
import logging

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils.logging import logger

logger.setLevel(logging.ERROR)
vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = (
    False  # compile nothing
)

N = 4
weights = torch.nn.Linear(2 * N, 1, bias=False)
torch.nn.init.zeros_(weights.weight)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": N,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
}
sgd = torch.optim.SGD(weights.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=weights, optimizer=sgd, config=config)
for one_hot in torch.eye(
    2 * N, dtype=torch.bfloat16
):  # micro-batch i has a gradient of 1 in weight i alone
    engine.backward(engine(one_hot).sum())
    engine.step()
changes = weights.weight.flatten().float()
measured = round((changes[0] / changes[-1]).item(), 3)
print(
    json.dumps(
        {"case": "weight in the first window / in the second", "measured": measured, "right": 1.0}
    )
)
