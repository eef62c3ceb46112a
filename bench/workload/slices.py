"""The loss of a batch that is too large to be seen at once, as one loss: the reference sees the whole batch so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

SLICE_TOKENS = 2048
"""Tokens of a slice; a single sample may have more."""


def slice_size(num_samples: int, tokens_per_sample: int) -> int:
    """Samples of a slice: all of them, if they have no more than SLICE_TOKENS."""
    return min(num_samples, max(1, SLICE_TOKENS // tokens_per_sample))


def sliced(
    loss: Callable[[nn.Module, Tensor], Tensor], num_samples: int, tokens_per_sample: int
) -> Callable[[nn.Module, Tensor], Tensor]:
    """The same mean loss of ``num_samples`` samples; itself, if a slice holds them all.

    Else it is the mean over slices, weighted by their samples, and what a slice needs for the backward is computed once
    more there, slice by slice. It stays one loss with one backward: nothing is accumulated by hand.
    """
    size = slice_size(num_samples, tokens_per_sample)
    if size == num_samples:
        return loss

    def of_slices(model: nn.Module, batch: Tensor) -> Tensor:
        import torch
        from torch.utils.checkpoint import checkpoint

        means = [
            checkpoint(loss, model, part, use_reentrant=False, preserve_rng_state=False) * (len(part) / len(batch))
            for part in batch.split(size)
        ]
        return torch.stack(means).sum()

    return of_slices
