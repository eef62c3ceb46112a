"""How far a gradient of norm 5 moves the weights if the config says nothing of clipping."""

import json
import logging

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.logging import logger

logger.setLevel(logging.ERROR)
vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = (
    False  # compile nothing
)

weights = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(weights.weight)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
sgd = torch.optim.SGD(weights.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=weights, optimizer=sgd, config=config)
engine.backward(engine(torch.tensor([5.0, 0, 0, 0])))
engine.step()
measured = safe_get_full_fp32_param(weights.weight).norm().item()
print(json.dumps({"case": "norm of the update", "measured": round(measured, 3), "right": 5.0}))
