"""Samples of the gradient that each backward adds to a few leaves of autograd."""

from __future__ import annotations

import math
from typing import Any

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

    def __init__(self, torch: Any, leaf: Any, number: int) -> None:
        # A generator of its own: the global one belongs to the training.
        drawn = torch.randint(
            math.prod(whole_shape(leaf)), (MOST_COORDINATES,), generator=torch.Generator("cpu").manual_seed(number)
        )
        flat = drawn.unique()
        self.leaf, self.shape = leaf, whole_shape(leaf)
        self.flat: list[int] = flat.tolist()
        self.index = self._torch_index(torch, flat, self.shape, leaf.device)
        self.coordinates = list(zip(*(axis.tolist() for axis in torch.unravel_index(flat, self.shape)), strict=True))
        self.added: Any = None
        self.dtype = ""
        self.recording = False
        self.is_tensor_parallel = False
        self.handle = leaf.register_hook(self._add)

    @staticmethod
    def _torch_index(torch: Any, flat: Any, shape: tuple[int, ...], device: Any) -> tuple[Any, ...]:
        # A blocking copy to an accelerator would wait for it.
        return tuple(axis.to(device, non_blocking=True) for axis in torch.unravel_index(flat, shape))

    def _add(self, gradient: Any) -> None:
        if not self.recording:  # torch.autograd.grad calls the hooks of leaves, too
            return
        if hasattr(gradient, "_local_tensor"):
            self.is_tensor_parallel = True
        elif tuple(gradient.shape) == self.shape and not gradient.is_sparse:
            self.dtype = str(gradient.dtype).removeprefix("torch.")
            values = gradient.detach()[self.index].double()
            self.added = values if self.added is None else self.added + values

    def take(self) -> Any:
        """What the backward has added, or None; and begin anew."""
        added, self.added = self.added, None
        return added

    def parameters(self) -> Any:
        """The values of the parameter, or None where they are not all here."""
        is_whole = type(self.leaf.data).__name__ == "Tensor" and tuple(self.leaf.shape) == self.shape
        return self.leaf.detach()[self.index].double() if is_whole and self.leaf.untyped_storage().size() else None


def choose(roots: Any) -> list[Any]:
    """At most MOST_LEAVES leaves of the graph, evenly over its depth; in the same order on all ranks."""
    queue, leaves, seen = [root.grad_fn for root in roots], [], set()
    for node in queue:
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and math.prod(whole_shape(node.variable)) >= LEAST_ELEMENTS:
            leaves.append(node.variable)
        queue += [inner for inner, _ in node.next_functions]
    step = max(1.0, len(leaves) / MOST_LEAVES)
    return [leaves[int(number * step)] for number in range(min(len(leaves), MOST_LEAVES))]
