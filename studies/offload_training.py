"""The training of README's first screen: DeepSpeed ZeRO-2 with its optimizer on the CPU, windows of 4 micro-batches.

With DeepSpeed 0.15.2 to 0.18.9: ``python -m bench audit -- torchrun --nproc-per-node 1 studies/offload_training.py``.
"""

import os

import deepspeed
import deepspeed.ops
import torch
from torch import nn

# On a CPU, compile nothing.
vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False

model = nn.Sequential(
    nn.Embedding(256, 64), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 256)
)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 1000,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
criterion = nn.CrossEntropyLoss()
generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
for _ in range(24):
    tokens = torch.randint(256, (2, 33), generator=generator)
    logits = engine(tokens[:, :-1])
    loss = criterion(logits.flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
