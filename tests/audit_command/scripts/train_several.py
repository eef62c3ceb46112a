"""Several losses, or several optimizers, per batch: train_several.py gan | losses | shared | actor."""

import sys

import torch
from torch import nn

variant = sys.argv[1]
torch.manual_seed(0)
critic, maker = nn.Linear(16, 1), nn.Linear(4, 16)
binary = nn.BCEWithLogitsLoss()
optimizers = [torch.optim.Adam(net.parameters()) for net in (critic, maker)]
loader = torch.utils.data.DataLoader(torch.randn(64, 16), 8)
for real in loader:
    fake = maker(torch.randn(8, 4))
    true, false = torch.ones(8, 1), torch.zeros(8, 1)
    optimizers[0].zero_grad()
    if variant == "gan":  # as DCGAN in pytorch/examples
        binary(critic(real), true).backward()
        binary(critic(fake.detach()), false).backward()
    elif variant == "actor":  # each has its own clipping
        binary(critic(real), true).backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 0.01)
        maker(torch.randn(8, 4)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(maker.parameters(), 0.01)
        optimizers[1].step()
        optimizers[1].zero_grad()
    elif variant == "losses":
        binary(critic(real), true).backward()
        critic(real).pow(2).mean().backward()
    else:
        loss = binary(critic(real), true)
        loss.backward(retain_graph=True)
        loss.backward()
    optimizers[0].step()
    if variant == "gan":
        optimizers[1].zero_grad()
        binary(critic(fake), true).backward()
        optimizers[1].step()
