"""Steps that Lightning estimates and makes under GradientAccumulationScheduler; 10 micro-batches, N = 1, 4, 2."""

import json

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(10))

    def training_step(self, i, _):
        return self.weights[i].sum()

    def configure_optimizers(self):
        self.estimated = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=1.0)


module = Module()
trainer = Trainer(
    callbacks=[GradientAccumulationScheduler({0: 1, 1: 4, 2: 2})],
    max_epochs=3,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(range(10), batch_size=1))
print(
    json.dumps(
        {"case": "estimated steps", "measured": module.estimated, "right": trainer.global_step}
    )
)
