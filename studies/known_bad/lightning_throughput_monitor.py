"""Whether ThroughputMonitor accepts that N is no multiple of log_every_n_steps, and batches of different sizes."""

import json

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(8))

    def training_step(self, i, _):
        return self.weights[i].sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def trained(every, batches):
    monitor = ThroughputMonitor(batch_size_fn=len, window_size=5)
    trainer = Trainer(
        accumulate_grad_batches=4,
        callbacks=[monitor],
        log_every_n_steps=every,
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger("."),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(range(8), batch_sampler=batches)
    try:
        trainer.fit(Module(), loader)
    except ValueError as error:
        return f"ValueError: {str(error)[:60]}"
    return "trained"


for case, every, batches in (
    ("log_every_n_steps=3", 3, [[i] for i in range(8)]),
    ("batches of 5, 1, 1 and 1", 1, [[0, 1, 2, 3, 4], [5], [6], [7]] * 2),
):
    print(
        json.dumps({"case": case, "measured": trained(every, batches), "right": "trained"}),
        flush=True,
    )
