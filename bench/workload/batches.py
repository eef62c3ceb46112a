"""Batches of samples: tensors, or nested tuples, lists and dicts of tensors.

Their first dimension counts samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from bench.workload import Batch


def tensors_of(batch: Batch) -> list[Tensor]:
    """All tensors of a batch."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def length(batch: Batch) -> int:
    """Number of samples of a batch."""
    return len(tensors_of(batch)[0])


def device_of(batch: Batch) -> torch.device:
    """The device of a batch."""
    return tensors_of(batch)[0].device


def part(batch: Batch, samples: range) -> Batch:
    """Consecutive samples of a batch, as views."""
    return tree_map_only(Tensor, lambda tensor: tensor[samples.start : samples.stop], batch)


def split(batch: Batch, size: int) -> list[Batch]:
    """The batch in parts of ``size`` samples; the last may have fewer."""
    count = length(batch)
    return [part(batch, range(start, min(start + size, count))) for start in range(0, count, size)]


def to(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


def zeros_like(
    batch: Batch, num_samples: int | None = None, device: torch.device | None = None
) -> Batch:
    """Zeros of the shapes and dtypes of a batch, with ``num_samples`` samples if that is given."""

    def zeros(tensor: Tensor) -> Tensor:
        count = len(tensor)
        if num_samples is not None:
            count = num_samples
        shape = (count, *tensor.shape[1:])
        where = tensor.device
        if device is not None:
            where = device
        return torch.zeros(shape, dtype=tensor.dtype, device=where)

    return tree_map_only(Tensor, zeros, batch)
