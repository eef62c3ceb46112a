"""The weight of each micro-batch in two updates of ZeRO-2 whose optimizer is offloaded to the CPU."""

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

N = 4
weights = torch.nn.Linear(2 * N, 1, bias=False)
torch.nn.init.zeros_(weights.weight)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": N,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
sgd = torch.optim.SGD(weights.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=weights, optimizer=sgd, config=config)
for one_hot in torch.eye(2 * N):  # micro-batch i has a gradient of 1 in weight i alone
    engine.backward(engine(one_hot))
    engine.step()
measured = (0 - safe_get_full_fp32_param(weights.weight)).flatten().tolist()
print(
    json.dumps({"case": "weights of two windows", "measured": measured, "right": [1 / N] * 2 * N})
)
