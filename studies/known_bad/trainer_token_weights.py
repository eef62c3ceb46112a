"""The weight of each micro-batch in transformers' Trainer, where the four have 1, 2, 3 and 4 tokens; N = 4.

The loss is the mean over the tokens of a micro-batch, or over num_items_in_batch where the Trainer passes it, as in the
models of transformers; or the model takes no such argument; or compute_loss_func has it.
"""

import json

import torch
from transformers import Trainer, TrainingArguments

TOKENS = (1, 2, 3, 4)


class Plain(torch.nn.Module):
    """Its loss sums the weight of micro-batch i over its tokens, and divides by their number."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(4))

    def forward(self, i, labels):
        return {"loss": self.loss(i, labels, (labels != -100).sum())}

    def loss(self, i, labels, num_tokens):
        return self.weights[i].sum() * (labels != -100).sum() / num_tokens


class WithKwargs(Plain):
    def forward(self, i, labels, **loss_kwargs):  # the name that 4.46 looks for
        number = loss_kwargs.get("num_items_in_batch")
        return {"loss": self.loss(i, labels, (labels != -100).sum() if number is None else number)}


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


# The first position of a causal model is no target, so it is masked here, as it is in the count of newer versions.
data = [{"i": i, "labels": torch.tensor([-100] * (6 - n) + [1] * n)} for i, n in enumerate(TOKENS)]
cases = {
    "mean over all tokens of a window": (WithKwargs(), [0.1, 0.2, 0.3, 0.4]),
    "mean of means": (Plain(), [0.25] * 4),
}
for case, (model, right) in cases.items():
    measured, _ = train(model, data, n=4)
    print(json.dumps({"case": case, "measured": measured, "right": right}), flush=True)
