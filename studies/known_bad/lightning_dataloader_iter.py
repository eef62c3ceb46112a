"""Which micro-batches reach an update where training_step takes a dataloader_iter; N = 4, eight micro-batches."""

import json

import torch
from lightning.pytorch import LightningModule, Trainer

N = 4


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(8))

    def training_step(self, dataloader_iter):
        i, _, _ = next(dataloader_iter)
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
trainer.fit(module, torch.utils.data.DataLoader(range(8), batch_size=1))
measured = (0 - module.weights).tolist()
print(json.dumps({"case": "weights of two windows", "measured": measured, "right": [1 / N] * 8}))
