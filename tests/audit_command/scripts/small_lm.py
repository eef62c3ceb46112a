"""Model and data of the scripts, which know nothing of an audit."""

import os
import time
from pathlib import Path

import torch
from torch import nn

ACCUMULATE, BATCH = int(os.environ.get("ACCUMULATE", "4")), int(os.environ.get("BATCH", "2"))
VOCABULARY, WIDTH = 32, 24


class SmallLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = torch.randint(VOCABULARY, (rows, 9), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index, :-1], self.rows[index, 1:]


def save_losses(losses):
    """Every bit of the losses, where a test wants them."""
    time.sleep(
        0.2
    )  # gloo's threads free Python objects of the last backward; where Python ends first, torch aborts
    if (path := os.environ.get("LOSSES")) and os.environ.get("LOCAL_RANK", "0") == "0":
        Path(path).write_text("\n".join(float(loss).hex() for loss in losses))
