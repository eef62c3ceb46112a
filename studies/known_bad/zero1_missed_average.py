"""How often the last micro-batch of a window counts under ZeRO-1, bf16 and grad_accum_dtype fp32; two ranks."""

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
weights = torch.nn.Linear(N, 1, bias=False)
torch.nn.init.zeros_(weights.weight)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": N,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
deepspeed.init_distributed("gloo", verbose=False)
sgd = torch.optim.SGD(weights.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=weights, optimizer=sgd, config=config)
for one_hot in torch.eye(N, dtype=torch.bfloat16):
    # Rank 0 has a gradient of 1 in weight i, rank 1 of 3: their mean is 2.
    engine.backward(engine(one_hot * (1 + 2 * engine.global_rank)).sum())
    engine.step()
changes = weights.weight.flatten().float()
if engine.global_rank == 0:
    measured = round((changes[-1] / changes[0]).item(), 3)
    print(
        json.dumps(
            {"case": "weight of the last micro-batch / first", "measured": measured, "right": 1.0}
        ),
        flush=True,
    )
