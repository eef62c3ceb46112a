"""The weight of each micro-batch under Accelerate's accumulate(), where N = 4 and an epoch has six micro-batches."""

import json

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = torch.nn.Linear(6, 1, bias=False)
torch.nn.init.zeros_(model.weight)
sgd = torch.optim.SGD(model.parameters(), lr=1.0)
loader = torch.utils.data.DataLoader(
    torch.eye(6), batch_size=1
)  # a gradient of 1 in weight i alone
model, sgd, loader = accelerator.prepare(model, sgd, loader)
for one_hot in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(one_hot).sum())
        sgd.step()
        sgd.zero_grad()
measured = (0 - next(model.parameters())).flatten().tolist()
print(
    json.dumps(
        {
            "case": "weights of a window of 4 and of one of 2",
            "measured": measured,
            "right": [0.25] * 4 + [0.5] * 2,
        }
    )
)
