"""A workload of one's own: a small perceptron that predicts the next token of a cycle from the one before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.workload import WorkloadSpec

TOKENS = 16


class Cycle:
    """Sample i counts up from i, modulo 16; nothing is known of its floor or its FLOPs."""

    entropy_floor: float | None = None
    flops_per_sample: float | None = None

    def __init__(self, spec: WorkloadSpec) -> None:
        self._spec = spec
        self.tokens_per_sample = spec.sequence_length

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._spec.seed)
            return nn.Sequential(nn.Embedding(TOKENS, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, TOKENS))

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return []

    def data(self, num_samples: int) -> Tensor:
        return (torch.arange(num_samples)[:, None] + torch.arange(self._spec.sequence_length + 1)) % TOKENS

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
