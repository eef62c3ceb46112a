"""Batches of samples: a tensor, or tuples, lists and dicts of tensors, whose first dimension counts samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of a batch."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def length(batch: Any) -> int:
    """Number of samples of a batch."""
    return len(tensors_of(batch)[0])


def device_of(batch: Any) -> torch.device:
    """The device of a batch."""
    return tensors_of(batch)[0].device


def part(batch: Any, samples: range) -> Any:
    """Consecutive samples of a batch, as views."""
    return tree_map_only(Tensor, lambda tensor: tensor[samples.start : samples.stop], batch)


def split(batch: Any, size: int) -> list[Any]:
    """The batch in parts of ``size`` samples; the last may have fewer."""
    count = length(batch)
    return [part(batch, range(start, min(start + size, count))) for start in range(0, count, size)]


def to(batch: Any, device: torch.device) -> Any:
    """The batch on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


def zeros_like(
    batch: Any, num_samples: int | None = None, device: torch.device | None = None
) -> Any:
    """Zeros of the shapes and dtypes of a batch, with as many samples unless ``num_samples`` is given."""

    def zeros(tensor: Tensor) -> Tensor:
        count = len(tensor) if num_samples is None else num_samples
        return torch.zeros(
            (count, *tensor.shape[1:]), dtype=tensor.dtype, device=device or tensor.device
        )

    return tree_map_only(Tensor, zeros, batch)
