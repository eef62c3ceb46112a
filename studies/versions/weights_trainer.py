"""The same through transformers' Trainer and its argument deepspeed."""

import json
import logging

import deepspeed
import deepspeed.ops
import torch
from accelerate.state import AcceleratorState, GradientState
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.logging import logger
from transformers import Trainer, TrainerCallback, TrainingArguments

N, WINDOWS = 4, 2


class OneHot(torch.nn.Module):
    """The gradient of micro-batch i is 1 in weight i and 0 elsewhere."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(N * WINDOWS))

    def forward(self, i):
        return (self.weights * torch.nn.functional.one_hot(i, N * WINDOWS)).sum()


def config_of(stage, offload):
    zero = {"stage": stage, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": N,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


class Model(OneHot):
    def forward(self, i):
        return {"loss": super().forward(i)}


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def create_optimizer(self, *_):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate)
        return self.optimizer


class Last(TrainerCallback):
    weights = None

    def on_step_end(self, args, state, control, model, **_):
        self.weights = 0 - safe_get_full_fp32_param(getattr(model, "module", model).weights)


def train(config):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
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
    last = Last()
    data = [{"i": i} for i in range(N * WINDOWS)]
    InOrder(model=Model(), args=arguments, train_dataset=data, callbacks=[last]).train()
    return last.weights


if __name__ == "__main__":
    logger.setLevel(logging.ERROR)
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    for stage in (1, 2, 3):
        for offload in (False, True):
            case = f"ZeRO-{stage}{', offload_optimizer' if offload else ''}"
            try:
                weights = train(config_of(stage, offload)).tolist()
                measured = [[round(w, 4) for w in weights[first : first + N]] for first in range(0, N * WINDOWS, N)]
            except Exception as error:
                measured = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(json.dumps({"case": case, "measured": measured, "right": [[1 / N] * N] * WINDOWS}), flush=True)
