"""``create_supervised_trainer`` of pytorch-ignite."""

import ignite.engine
import torch
from small import N, batches, model

net = model()
trainer = ignite.engine.create_supervised_trainer(
    net,
    torch.optim.Adam(net.parameters(), 1e-3),
    torch.nn.functional.cross_entropy,
    gradient_accumulation_steps=N,
)
trainer.run(batches(5 * N), max_epochs=1)
