"""Samples of the gradient that each backward adds to a few leaves of autograd."""

from __future__ import annotations

import math
from typing import Any

import torch

MOST_LEAVES = 8
MOST_COORDINATES = 64
"""Coordinates of a leaf."""
LEAST_ELEMENTS = 8
"""Smaller leaves are not sampled."""


def whole_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of a parameter; ZeRO-3 leaves no elements in it between its uses."""
    return tuple(getattr(leaf, "ds_shape", leaf.shape))


class LeafProbe:
    """Some coordinates of one leaf, and what the running backward has added there."""

    def __init__(self, leaf: Any, seed: int) -> None:
        self.leaf, self.shape = leaf, whole_shape(leaf)
        generator = torch.Generator("cpu").manual_seed(seed)  # the global one belongs to the training
        self.flat = torch.randint(math.prod(self.shape), (MOST_COORDINATES,), generator=generator).unique()
        self.coordinates = torch.stack(torch.unravel_index(self.flat, self.shape))
        self.index = tuple(axis.to(leaf.device, non_blocking=True) for axis in self.coordinates)
        self.added: Any = None
        """What the running backward has added, or None."""
        self.clipped: Any = 1.0
        """By what the gradient was divided to clip it."""
        self.dtype, self.recording, self.is_distributed = "", False, False
        self.handle = leaf.register_hook(self._add)

    def _add(self, gradient: Any) -> None:
        if not self.recording:  # torch.autograd.grad calls the hooks of leaves, too
            return
        self.is_distributed = hasattr(gradient, "_local_tensor")
        if not self.is_distributed and tuple(gradient.shape) == self.shape and not gradient.is_sparse:
            self.dtype = str(gradient.dtype).removeprefix("torch.")
            values = gradient.detach()[self.index].double()
            self.added = values if self.added is None else self.added + values

    def parameter(self) -> Any:
        """The values of the parameter, or None where they are not all here."""
        leaf = self.leaf
        is_whole = tuple(leaf.shape) == self.shape and leaf.untyped_storage().size()
        return leaf.detach()[self.index].double() if is_whole and not hasattr(leaf, "_local_tensor") else None


def choose(roots: Any) -> list[LeafProbe]:
    """Probes of at most MOST_LEAVES leaves, evenly over the depth of the graph; in the same order on all ranks."""
    queue, leaves, seen = [root.grad_fn for root in roots], [], set()
    for node in queue:
        if node is not None and node not in seen:
            seen.add(node)
            leaves += [node.variable] if hasattr(node, "variable") else []
            queue += [inner for inner, _ in node.next_functions]
    leaves = [leaf for leaf in leaves if math.prod(whole_shape(leaf)) >= LEAST_ELEMENTS]
    step = max(1.0, len(leaves) / MOST_LEAVES)
    return [LeafProbe(leaves[int(i * step)], i) for i in range(min(len(leaves), MOST_LEAVES))]
