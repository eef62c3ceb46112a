"""How far the weights of one batch and of the same batch in four micro-batches differ after three Muon steps."""

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


def train(stage, n):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16, bias=False)
    )
    for parameter in model.parameters():
        parameter.use_muon = True
    config = {
        "train_micro_batch_size_per_gpu": 8 // n,
        "gradient_accumulation_steps": n,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95}},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        inputs, targets = torch.randn(2, 8, 16, generator=random)
        for x, y in zip(inputs.chunk(n), targets.chunk(n), strict=True):
            engine.backward((engine(x) - y).pow(2).mean())
            engine.step()
    return torch.cat(
        [safe_get_full_fp32_param(parameter).flatten() for parameter in model.parameters()]
    )


for stage in (2, 3):
    one, four = train(stage, 1), train(stage, 4)
    difference = ((one - four).norm() / one.norm()).item()
    measured = f"{difference:.2f}"
    print(json.dumps({"case": f"ZeRO-{stage}", "measured": measured, "right": "0.00"}), flush=True)
