"""What a micro-batch was made of, as its graph shows it: fingerprints that add up over a split."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ...command.inside.graph_survey import MOST_INPUTS, MOST_NODES, input_of
from .state_records import InputRows
from .tensor_sketches import is_readable

MOST_ELEMENTS = 2**26
"""Larger inputs have no fingerprint."""
AT_ONCE = 2**20
"""Elements that are copied to double precision at once, or a row."""


NEAR = 64
"""Nodes from the loss on among which rows are looked for that meet each other."""
PRODUCTS = ("MmBackward", "AddmmBackward", "BmmBackward", "CdistBackward", "EuclideanDistBackward")
QUANTIZING = ("float8", "fp8", "fp4", "mx_mm", "8bit", "quant")
"""What is in the names of functions that quantize."""
CONVOLUTION, COMPILED = "ConvolutionBackward", "CompiledFunctionBackward"
LONG = 50
"""Nodes of a path to which a parameter belongs at most, where it is shaped or multiplied before it
is used."""


class GraphFacts:
    """Found in one walk, breadth first."""

    def __init__(self, roots: Sequence[Tensor]) -> None:
        self.data: list[InputRows[Tensor]] = []
        """By input."""
        self.dtypes: set[str] = set()
        self.dropout = False
        self.quantizes = False
        """Whether it has a function that quantizes."""
        self.contrasts = False
        """Whether the loss has a product of two tensors that both depend on data."""
        self.normalizes = False
        """Whether it has a batch norm that is trained, of a module of torch's or not."""
        self._convolves = self._is_compiled = False
        self.leaves: list[Tensor] = []
        queue = [root.grad_fn for root in roots]
        seen: set[Node | None] = {None}
        for node in queue:
            if node is None or node in seen:
                continue
            seen.add(node)
            if len(seen) > MOST_NODES:
                break
            self._look_at(node)
            if len(seen) < NEAR and not self.contrasts and not hasattr(node, "variable"):
                self.contrasts = _contrasts(node)
            queue += _inner_nodes(node)
        if any(leaf.is_cuda for leaf in self.leaves) and _rounds_to_tf32(self._convolves):
            self.dtypes.add("tfloat32")
        if self._is_compiled:  # which shows no dtypes but those of what goes in and comes out
            self.dtypes.add("bfloat16")

    def _look_at(self, node: Node) -> None:
        for metadata in getattr(node, "_input_metadata", ()):
            if metadata.dtype.is_floating_point:
                self.dtypes.add(str(metadata.dtype).removeprefix("torch."))
        if hasattr(node, "variable"):
            self.leaves.append(node.variable)
            return
        name = node.name()
        if "Dropout" in name or _probability(node) > 0:
            self.dropout = True
        self._convolves = self._convolves or name.startswith(CONVOLUTION)
        self._is_compiled = self._is_compiled or name.startswith(COMPILED)
        if "BatchNorm" in name and getattr(node, "_saved_training", True):
            self.normalizes = True
        if not self.quantizes:
            self.quantizes = any(part in name.lower() for part in QUANTIZING)
        if len(self.data) < MOST_INPUTS:
            values = input_of(node)
            if values is None or isinstance(values, torch.nn.Parameter):
                return
            if values.numel() <= MOST_ELEMENTS and is_readable(values):
                self.data.append(_fingerprint(values))


def _rounds_to_tf32(convolves: bool) -> bool:
    """Whether products of float32 may be rounded to TF32 on a GPU."""
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return True
        return convolves and bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # settings of both kinds, old and new, are mixed
        return True


def _inner_nodes(node: Node) -> list[Node | None]:
    return [inner for inner, _ in node.next_functions]


def _contrasts(node: Node) -> bool:
    """Whether it multiplies rows of a micro-batch with each other."""
    name = node.name()
    if not name.startswith(PRODUCTS):
        return False
    metadata = getattr(node, "_input_metadata", ())
    if name.startswith("BmmBackward") and (not metadata or metadata[0].shape[0] != 1):
        return False  # a product for each row of the batch, as attention's
    operands = _inner_nodes(node)[-2:]
    if len(operands) != 2:
        return False
    first, second = operands
    return _depends_on_data(second) and _depends_on_data(first)


def _depends_on_data(node: Node | None) -> bool:
    """Whether a node is made of data, and not of parameters alone."""
    queue = [node]
    seen: set[Node | None] = {None}
    for inner in queue:
        if inner is None or inner in seen:
            continue
        seen.add(inner)
        if len(seen) > LONG:
            return True
        if not hasattr(inner, "variable") and input_of(inner) is not None:
            return True
        queue += _inner_nodes(inner)
    return False


def _probability(node: Node) -> float:
    """Of a dropout inside of attention."""
    try:
        return float(getattr(node, "_saved_dropout_p", 0.0))
    except (RuntimeError, TypeError):
        return 0.0


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(4)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(device)


def _fingerprint(values: Tensor) -> InputRows[Tensor]:
    """A projection of each row."""
    rows = 1
    if values.dim():
        rows = values.shape[0]
    table = values.detach().reshape(rows, -1)
    width = table.shape[1]
    weights = _weights(width, table.device)
    parts = []
    for part in table.split(max(1, AT_ONCE // width)):
        parts.append(part.double() @ weights)
    projected = torch.cat(parts)
    return InputRows(rows, width, projected.sum(), (projected**2).sum())
