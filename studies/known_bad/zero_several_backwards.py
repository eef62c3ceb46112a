"""The weight of each of four backwards before one step, by stage; gradient_accumulation_steps is 1."""

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
for stage in (1, 2, 3):
    weights = torch.nn.Linear(N, 1, bias=False)
    torch.nn.init.zeros_(weights.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    sgd = torch.optim.SGD(weights.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=weights, optimizer=sgd, config=config)
    try:
        for one_hot in torch.eye(N):
            engine.backward(engine(one_hot) / N)
        engine.step()
        measured = (0 - safe_get_full_fp32_param(weights.weight)).flatten().tolist()
    except TypeError as error:
        measured = f"TypeError: {error}"
    print(
        json.dumps({"case": f"ZeRO-{stage}", "measured": measured, "right": [1 / N] * N}),
        flush=True,
    )
