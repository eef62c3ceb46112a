"""The weight of each micro-batch in Lightning, where N = 4 and an epoch has six micro-batches."""

import json

import torch
from lightning.pytorch import LightningModule, Trainer

N = 4


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(6))

    def training_step(self, i, _):
        return self.weights[i].sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


module = Module()
trainer = Trainer(
    accumulate_grad_batches=N,
    max_epochs=1,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(range(6), batch_size=1))
measured = (0 - module.weights).tolist()
print(
    json.dumps(
        {
            "case": "weights of a window of 4 and of one of 2",
            "measured": measured,
            "right": [0.25] * 4 + [0.5] * 2,
        }
    )
)
