"""The decoder workload: a model whose weights show which samples reached an update, and how.

It has one weight per *use* of a sample (a slot): each sample that a rank fetches gets the next
slot. The loss of a micro-batch is the mean of its slots' weights, and the optimizer is SGD with
learning rate 1, so an update lowers each weight by exactly the coefficient of that use of the
sample. A sample that is used twice, as padding or in another epoch, has two slots, so that no two
coefficients are confused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bench.audit.scenario import Reduction


class _Weights(nn.Module):
    """A vector of weights, sharded as a unit."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_slots))

    def forward(self, slots: Tensor, origin: Tensor) -> Tensor:
        return self.weight[slots] + origin


class _Decoder(nn.Module):
    """The root around the weights, like a transformer around its blocks."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.weights = _Weights(num_slots)

    def forward(self, slots: Tensor) -> Tensor:
        """Weights of the given slots, same shape."""
        # A block's input needs a gradient, as in a transformer: when ZeRO-3 has that gradient, it
        # reduces those of the block.
        origin = torch.zeros((), device=slots.device, requires_grad=True)
        return self.weights(slots, origin)  # type: ignore[no-any-return]


PARAMETER = "weights.weight"
"""Name of the decoder's one parameter, of shape [num_slots]."""


class DecoderWorkload:
    """A model and its loss.

    A micro-batch is int64 of shape [batch_size, 3]: slot, tokens, tokens of its window.
    """

    def __init__(self, num_slots: int, reduction: Reduction, num_shares: int) -> None:
        """``num_shares`` is N x W: a window's micro-batches, by which every framework divides."""
        self._num_slots = num_slots
        self._reduction = reduction
        self._num_shares = num_shares

    def model(self) -> nn.Module:
        """A new model on the CPU in fp32; all weights are 0."""
        return _Decoder(self._num_slots)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The one submodule that is sharded as a unit of its own."""
        return [model.weights]  # type: ignore[list-item]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """A scalar; its derivative by a slot's weight is the slot's coefficient in this loss."""
        slots, tokens, window_tokens = batch.unbind(dim=1)
        summed: Tensor = (model(slots) * tokens).sum()
        if self._reduction is Reduction.WINDOW:
            return self._num_shares * summed / window_tokens[0]
        return summed / tokens.sum()
