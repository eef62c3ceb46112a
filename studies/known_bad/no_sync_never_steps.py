"""How far DeepSpeed moves the weights when all but the last micro-batch of a window run in engine.no_sync()."""

import json
import logging
from contextlib import nullcontext

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
weights = torch.nn.Linear(N, 1, bias=False)
torch.nn.init.zeros_(weights.weight)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": N,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
sgd = torch.optim.SGD(weights.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=weights, optimizer=sgd, config=config)
for i, one_hot in enumerate(torch.eye(N)):
    with engine.no_sync() if i < N - 1 else nullcontext():
        engine.backward(engine(one_hot))
engine.step()
measured = (0 - safe_get_full_fp32_param(weights.weight)).flatten().tolist()
print(json.dumps({"case": "weights of the window", "measured": measured, "right": [1 / N] * N}))
