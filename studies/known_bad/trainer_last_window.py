"""The weight of each micro-batch in transformers' Trainer, where N = 4 and an epoch has six micro-batches."""

import json

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(6))

    def forward(self, i):
        return {"loss": self.weights[i].sum()}


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train(model, data, n):
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    constant = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)
    arguments = TrainingArguments(
        output_dir=".",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=n,
        num_train_epochs=1,
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=data, optimizers=(sgd, constant))
    trainer.train()
    return [round(weight, 4) for weight in (0 - model.weights).tolist()], trainer.state.global_step


measured, steps = train(Model(), [{"i": i} for i in range(6)], n=4)
print(
    json.dumps(
        {
            "case": "weights of a window of 4 and of one of 2",
            "measured": measured,
            "right": [0.25] * 4 + [0.5] * 2,
        }
    )
)
print(json.dumps({"case": "updates of 6 micro-batches", "measured": steps, "right": 2}))
