"""``SupervisedTrainer`` of MONAI, with an epoch that N does not divide."""

import torch
from monai.engines import SupervisedTrainer
from small import BATCH, N, model, rows

net = model()
items = [{"image": features, "label": label} for features, label in rows(3 * N + 2)]
trainer = SupervisedTrainer(
    device=torch.device("cpu"),
    max_epochs=2,
    train_data_loader=torch.utils.data.DataLoader(items, BATCH),
    network=net,
    optimizer=torch.optim.AdamW(net.parameters(), 1e-3),
    loss_function=torch.nn.CrossEntropyLoss(),
    accumulation_steps=N,
)
trainer.run()
