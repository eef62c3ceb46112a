"""Workloads: the same model, weights and tokens for every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench.plan.cell import Cell
from bench.plan.models import find_factory

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """The arguments of a workload factory."""

    model: str
    """Size of the model, interpreted by the factory."""
    sequence_length: int
    """Predicted tokens per sample."""
    seed: int
    """Seed of the weights and of the data."""
    corpus: Path | None
    """Text file to draw tokens from; None for the workload's own source."""


class Workload(Protocol):
    """A model, its data and its loss. All methods are deterministic: equal specs give equal bytes everywhere.

    The exception is weights that are drawn on a GPU (``llama``), which are equal only on GPUs of the same kind.
    """

    tokens_per_sample: int
    """Predicted tokens per sample, for tokens/s."""
    entropy_floor: float | None
    """Lowest reachable loss in nats per token; None if unknown."""
    flops_per_sample: float | None
    """Model FLOPs of forward and backward per sample, for MFU; None if unknown."""

    def model(self) -> nn.Module:
        """A new fp32 model on the CPU, with the seeded initial weights."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The submodules that are sharded as separate units; everything else belongs to the root unit."""

    def data(self, num_samples: int) -> Tensor:
        """Samples 0 to ``num_samples`` - 1 along the first dimension; a micro-batch is a slice of it."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The mean loss of a micro-batch, a scalar, computed by one call of ``model``."""


def load(cell: Cell, corpus: Path | None) -> Workload:
    """Load the cell's workload. Raises InputError if the factory cannot be found."""
    spec = WorkloadSpec(model=cell.model, sequence_length=cell.sequence_length, seed=cell.seed, corpus=corpus)
    workload: Workload = find_factory(cell.workload)(spec)
    return workload
