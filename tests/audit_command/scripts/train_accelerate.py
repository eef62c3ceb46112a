"""Accelerate: train_accelerate.py VARIANT."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from small_lm import ACCUMULATE, BATCH, SmallLM, Tokens, save_losses
from torch.utils.data import DataLoader

variant = sys.argv[1]
torch.manual_seed(0)
options = {}
if variant == "fsdp2":
    options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=True, **options)
model = SmallLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = {"partial": 40, "short": 20, "short-scaled": 20}.get(variant, 32)
loader = DataLoader(Tokens(rows), BATCH)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(2):
    for i, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            factor = 1.0
            if variant == "twice":
                factor = 1 / ACCUMULATE
            if variant == "short-scaled":  # Accelerate divides by N also what is left of an epoch
                factor = ACCUMULATE / min(ACCUMULATE, len(loader) - i // ACCUMULATE * ACCUMULATE)
            accelerator.backward(loss * factor)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
save_losses(losses)
accelerator.end_training()
