"""What the autograd graph of a loss shows before its backward runs: leaves, data, joined rows, injected losses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

MOST_NODES = 50_000
"""Most nodes looked at."""
MOST_INPUTS = 4
"""Of these the data are sampled."""
MOST_VALUES = 8
"""Sampled values of an input."""
INPUTS = ("indices", "mat1", "self", "input")
"""What nodes call their saved input: of embeddings, of linear layers with and without a bias, of convolutions."""
JOINS = (
    "CatBackward",
    "CopySlices",
    "IndexPutBackward",
    "SliceScatterBackward",
    "SelectScatterBackward",
)


@dataclass
class GraphSurvey:
    """Found in one walk, breadth first."""

    leaves: list[Any] = field(default_factory=list)
    data: list[Any] = field(default_factory=list)
    """Values of inputs that need no gradient: the data."""
    covered: float = 1.0
    """The smallest share of rows with a gradient, where rows with and without are joined; 0 if it is not visible."""
    injected: list[Any] = field(default_factory=list)
    """Nodes of scalars to which a function that was written in Python hands a gradient."""


def survey(roots: Any) -> GraphSurvey:
    """Walk the graph once; nothing is unpacked that a hook would have to compute."""
    found = GraphSurvey()
    queue: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = {None}
    for node in queue:
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > MOST_NODES:
            break
        if hasattr(node, "variable"):
            found.leaves.append(node.variable)
        else:
            name = node.name()
            if len(found.data) < MOST_INPUTS:
                found.data += _data_of(node)
            if name.startswith(JOINS):
                found.covered = min(found.covered, _covered(node, name))
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                found.injected += _injected(node)
        queue += [inner for inner, _ in node.next_functions]
    return found


def plain(tensor: Any) -> Any:
    """The part of a distributed tensor that is on this rank; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def input_of(node: Any) -> Any:
    """The input of a layer that needs no gradient, which is data; None if there is none, or a hook would make it."""
    for name in INPUTS:
        raw = getattr(node, f"_raw_saved_{name}", None)
        if raw is None or getattr(raw, "unpack_hook", "unknown") is not None:
            continue
        if name != "indices" and _needs_gradient(node, name):
            continue
        values = plain(getattr(node, f"_saved_{name}"))
        if values is not None and values.numel() and not values.is_sparse:
            return values
        return None
    return None


def _data_of(node: Any) -> Iterator[Any]:
    """A few values of an input for which no gradient is wanted."""
    values = input_of(node)
    if values is not None:
        count = values.numel()
        places = torch.arange(0, count, max(1, count // MOST_VALUES), device=values.device)
        yield values.detach()[torch.unravel_index(places[:MOST_VALUES], values.shape)].double()


def _needs_gradient(node: Any, name: str) -> bool:
    """Whether the saved input does; addmm has the bias before it."""
    place = int(name == "mat1" and len(node.next_functions) > 1)
    return place < len(node.next_functions) and node.next_functions[place][0] is not None


def _covered(node: Any, name: str) -> float:
    """The share of rows that have a gradient; 1 if all have."""
    if not name.startswith("CatBackward"):
        return 0.0 if any(inner is None for inner, _ in node.next_functions[:1]) else 1.0
    if node._saved_dim != 0 or all(inner is not None for inner, _ in node.next_functions):
        return 1.0
    total = node._input_metadata[0].shape[0]
    known = [
        inner._input_metadata[place].shape[0]
        for inner, place in node.next_functions
        if inner is not None
    ]
    return sum(known) / total if total else 1.0


def _injected(node: Any) -> Iterator[Any]:
    """Scalars among the inputs of a function that has none among its outputs, as DDP's has that passes a loss on."""
    if any(math.prod(output.shape) == 1 for output in node._input_metadata):
        return
    for inner, place in node.next_functions:
        metadata = getattr(inner, "_input_metadata", ())
        is_inner = inner is not None and not hasattr(inner, "variable") and place < len(metadata)
        if is_inner and len(metadata[place].shape) == 0:
            yield inner
