"""The same through transformers' Trainer and its argument deepspeed."""

import torch
from accelerate.state import AcceleratorState, GradientState
from deepspeed.utils import safe_get_full_fp32_param
from one_hot import WINDOWS, N, OneHot, print_weights
from transformers import Trainer, TrainerCallback, TrainingArguments


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
    print_weights(train)
