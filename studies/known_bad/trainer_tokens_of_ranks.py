"""The weight of each micro-batch in transformers' Trainer on two ranks with 1 and 3 tokens each; N = 1."""

import json

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(2))

    def forward(self, i, labels, num_items_in_batch=None, **loss_kwargs):
        number = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": self.weights[i].sum() * (labels != -100).sum() / number}


class InOrder(Trainer):
    def get_train_dataloader(self):
        rank = torch.distributed.get_rank()
        return torch.utils.data.DataLoader(
            self.train_dataset[rank : rank + 1], collate_fn=self.data_collator
        )


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
        ddp_backend="gloo",
        remove_unused_columns=False,
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=data, optimizers=(sgd, constant))
    trainer.train()
    return [round(weight, 4) for weight in (0 - model.weights).tolist()], trainer.state.global_step


data = [{"i": i, "labels": torch.tensor([-100] * (6 - n) + [1] * n)} for i, n in enumerate((1, 3))]
measured, _ = train(Model(), data, n=1)
if torch.distributed.get_rank() == 0:
    print(
        json.dumps(
            {
                "case": "mean over the tokens of both ranks",
                "measured": measured,
                "right": [0.25, 0.75],
            }
        ),
        flush=True,
    )
