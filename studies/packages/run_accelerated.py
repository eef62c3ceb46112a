"""``Trainer.train`` of pytorch-accelerated, with an epoch that N does not divide."""

import torch
from pytorch_accelerated import Trainer
from small import BATCH, N, model, rows

net = model()
trainer = Trainer(net, torch.nn.CrossEntropyLoss(), torch.optim.AdamW(net.parameters(), 1e-3))
trainer.train(
    rows(3 * N + 2), num_epochs=2, per_device_batch_size=BATCH, gradient_accumulation_steps=N
)
