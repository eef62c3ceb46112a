"""What a micro-batch was made of, as its autograd graph shows it: fingerprints that add up over a split batch."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...command.inside.graph_survey import MOST_INPUTS, MOST_NODES, input_of
from .tensor_sketches import is_readable

MOST_ELEMENTS = 2**26
"""Larger inputs have no fingerprint."""
AT_ONCE = 2**20
"""Elements that are copied to double precision at once, or a row."""


class GraphFacts:
    """Found in one walk, breadth first."""

    def __init__(self, roots: list[Any]) -> None:
        self.data: list[Any] = []
        """Per input the number of rows, elements of a row, and two sums over rows, which are tensors."""
        self.dtypes: set[str] = set()
        self.dropout = False
        self.leaves: list[Any] = []
        queue: list[Any] = [root.grad_fn for root in roots]
        seen: set[Any] = {None}
        for node in queue:
            if node in seen:
                continue
            seen.add(node)
            if len(seen) > MOST_NODES:
                break
            self._look_at(node)
            queue += [inner for inner, _ in node.next_functions]

    def _look_at(self, node: Any) -> None:
        for metadata in getattr(node, "_input_metadata", ()):
            if metadata.dtype.is_floating_point:
                self.dtypes.add(str(metadata.dtype).removeprefix("torch."))
        if hasattr(node, "variable"):
            self.leaves.append(node.variable)
            return
        name = node.name()
        if "Dropout" in name or _probability(node) > 0:
            self.dropout = True
        if len(self.data) < MOST_INPUTS:
            values = input_of(node)
            if values is not None and values.numel() <= MOST_ELEMENTS and is_readable(values):
                self.data.append(_fingerprint(values))


def _probability(node: Any) -> float:
    """Of a dropout inside of attention."""
    try:
        return float(getattr(node, "_saved_dropout_p", 0.0) or 0.0)
    except (RuntimeError, TypeError):
        return 0.0


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: Any) -> Any:
    generator = torch.Generator("cpu").manual_seed(4)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(device)


def _fingerprint(values: Any) -> list[Any]:
    """Rows, elements of a row, and the sums of a projection of each row and of its square."""
    rows = values.shape[0] if values.dim() else 1
    table = values.detach().reshape(rows, -1)
    width = table.shape[1]
    weights = _weights(width, table.device)
    parts = [part.double() @ weights for part in table.split(max(1, AT_ONCE // width))]
    projected = torch.cat(parts)
    return [rows, width, projected.sum(), (projected**2).sum()]
