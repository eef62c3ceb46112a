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


NEAR = 64
"""Nodes from the loss on among which rows are looked for that meet each other."""
PRODUCTS = ("MmBackward", "AddmmBackward", "BmmBackward", "CdistBackward", "EuclideanDistBackward")
LONG = 50
"""Nodes of a path to which a parameter belongs at most, where it is shaped or multiplied before it is used."""


class GraphFacts:
    """Found in one walk, breadth first."""

    def __init__(self, roots: list[Any]) -> None:
        self.data: list[Any] = []
        """Per input the number of rows, elements of a row, and two sums over rows, which are tensors."""
        self.dtypes: set[str] = set()
        self.dropout = False
        self.contrasts = False
        """Whether the loss has a product of two tensors that both depend on data."""
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
            if len(seen) < NEAR and not self.contrasts and not hasattr(node, "variable"):
                self.contrasts = _contrasts(node)
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
            if values is None or isinstance(values, torch.nn.Parameter):
                return
            if values.numel() <= MOST_ELEMENTS and is_readable(values):
                self.data.append(_fingerprint(values))


def _contrasts(node: Any) -> bool:
    """Whether it multiplies rows of a micro-batch with each other."""
    name = node.name()
    if not name.startswith(PRODUCTS):
        return False
    metadata = getattr(node, "_input_metadata", ())
    if name.startswith("BmmBackward") and (not metadata or metadata[0].shape[0] != 1):
        return False  # a product for each row of the batch, as attention's
    operands = [inner for inner, _ in node.next_functions[-2:]]
    return len(operands) == 2 and all(map(_depends_on_data, reversed(operands)))


def _depends_on_data(node: Any) -> bool:
    """Whether a node is made of data, and not of parameters alone."""
    if node is None:
        return False
    queue, seen = [node], {None}
    for inner in queue:
        if inner in seen:
            continue
        seen.add(inner)
        if len(seen) > LONG:
            return True
        if not hasattr(inner, "variable") and input_of(inner) is not None:
            return True
        queue += [following for following, _ in inner.next_functions]
    return False


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
