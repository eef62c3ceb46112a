"""The weight of each micro-batch in bf16 without ZeRO, and under ZeRO-1 with grad_accum_dtype fp32."""

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
for case, more in (
    ("without ZeRO", {}),
    ("ZeRO-1", {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}),
):
    weights = torch.nn.Linear(N, 1, bias=False)
    torch.nn.init.zeros_(weights.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": N,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    sgd = torch.optim.SGD(weights.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=weights, optimizer=sgd, config=config | more)
    for one_hot in torch.eye(
        N, dtype=torch.bfloat16
    ):  # micro-batch i has a gradient of 1 in weight i alone
        engine.backward(engine(one_hot).sum())
        engine.step()
    measured = (0 - weights.weight).flatten().tolist()
    print(json.dumps({"case": case, "measured": measured, "right": [1 / N] * N}), flush=True)
