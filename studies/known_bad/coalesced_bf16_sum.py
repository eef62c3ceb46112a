"""The sum of 1024 bf16 gradients in coalesce_grad_reduction with grad_accum_dtype fp32."""

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

N = 1024  # gradients of 1/N sum to 1, but to 0.25 in bf16
weights = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.zeros_(weights.weight)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    "zero_allow_untested_optimizer": True,
}
sgd = torch.optim.SGD(weights.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=weights, optimizer=sgd, config=config)
one = torch.ones(1, 2, dtype=torch.bfloat16)
with engine.coalesce_grad_reduction():
    for _ in range(N):
        engine.backward(engine(one).sum() / N)
engine.step()
measured = -safe_get_full_fp32_param(weights.weight).flatten()[0].item()
print(
    json.dumps(
        {"case": "sum of 1024 gradients of 1/1024", "measured": round(measured, 3), "right": 1.0}
    )
)
