"""What is trained: the same model, weights and tokens for every backend."""

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
    """What a workload factory is told."""

    model: str
    """Size of the model, as the factory understands it."""
    sequence_length: int
    """Tokens per sample that are predicted."""
    seed: int
    """Of the weights and of the data."""
    corpus: Path | None
    """A text file to draw tokens from; None for the workload's own source."""


class Workload(Protocol):
    """A model, its data and its loss. All methods are deterministic: the same spec gives the same bytes everywhere.

    But weights that a GPU draws, those of ``llama``, are the same on GPUs of one kind alone.
    """

    tokens_per_sample: int
    """Predicted tokens per sample, for tokens/s."""
    entropy_floor: float | None
    """Nats per token that no model can beat; None if unknown."""
    flops_per_sample: float | None
    """Model FLOPs of forward and backward per sample, for MFU; None if unknown."""

    def model(self) -> nn.Module:
        """A new model on the CPU in fp32, with the seeded initial weights."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The submodules that are sharded as units of their own; the rest is the root's unit."""

    def data(self, num_samples: int) -> Tensor:
        """Samples 0 to ``num_samples`` - 1 along the first dimension; a micro-batch is a slice of it."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The mean loss of a micro-batch, a scalar, by calling ``model`` once."""


def load(cell: Cell, corpus: Path | None) -> Workload:
    """The cell's workload. Raises InputError if the factory cannot be found."""
    spec = WorkloadSpec(model=cell.model, sequence_length=cell.sequence_length, seed=cell.seed, corpus=corpus)
    workload: Workload = find_factory(cell.workload)(spec)
    return workload
