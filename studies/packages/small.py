"""Model and data of these loops."""

from __future__ import annotations

import torch
from torch import nn

N, BATCH, FEATURES, CLASSES = 4, 8, 12, 5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, CLASSES))


def rows(batches: int) -> torch.utils.data.TensorDataset:
    """As many rows as these batches have."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(batches * BATCH, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (batches * BATCH,), generator=generator)
    return torch.utils.data.TensorDataset(features, labels)


def batches(count: int) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(rows(count), BATCH)
