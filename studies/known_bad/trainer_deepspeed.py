"""The weight of each of four micro-batches in transformers' Trainer with a ZeRO-2 config."""

import json
import logging

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.logging import logger
from transformers import Trainer, TrainerCallback, TrainingArguments

logger.setLevel(logging.ERROR)
vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = (
    False  # compile nothing
)
N = 4


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(N))

    def forward(self, i):
        return {"loss": self.weights[i].sum()}


class WithSGD(Trainer):
    def create_optimizer(self, *_):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        return self.optimizer


class Weights(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print(
            json.dumps(
                {"case": "weights of the window", "measured": weights(), "right": [1 / N] * N}
            ),
            flush=True,
        )


def weights():
    return (0 - safe_get_full_fp32_param(model.weights)).tolist()


config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": N,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
arguments = TrainingArguments(
    output_dir=".",
    deepspeed=config,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=N,
    num_train_epochs=1,
    max_grad_norm=0.0,
    learning_rate=1.0,
    lr_scheduler_type="constant",
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
    remove_unused_columns=False,
)
model = Model()
WithSGD(
    model=model, args=arguments, train_dataset=[{"i": i} for i in range(N)], callbacks=[Weights()]
).train()
