"""What a loss's graph shows before its backward: leaves, data, joined rows, injected losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .autograd_nodes import has_scalar_output, is_at_hand, shape_of

MOST_NODES = 50_000
"""Most nodes looked at."""
MOST_INPUTS = 4
"""Of these the data are sampled."""
MOST_VALUES = 8
"""Sampled values of an input."""
INDICES = "indices"
CONVOLVED = "input"
INPUTS = (INDICES, "mat1", "self", CONVOLVED)
"""What nodes call their saved input: of embeddings, of linear layers with and without a bias, of
convolutions."""
JOINS = (
    "CatBackward",
    "CopySlices",
    "IndexPutBackward",
    "SliceScatterBackward",
    "SelectScatterBackward",
)
VIEWS = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward")
"""A linear layer flattens the dimensions of its input, and such a node gives them back."""


class NodeKind(NamedTuple):
    """What all nodes of a class have in common."""

    is_leaf: bool
    inputs: tuple[str, ...]
    """Names of saved inputs that may be data."""
    is_join: bool
    is_function: bool
    """Whether it is a function that was written in Python."""
    is_view: bool
    is_of_interest: bool
    """Whether it is any of these, or has such inputs."""


@dataclass
class GraphSurvey:
    """Found in one walk, breadth first."""

    leaves: list[Tensor] = field(default_factory=list)
    data: list[Tensor] = field(default_factory=list)
    """Values of inputs that need no gradient: the data."""
    sequences: int | None = None
    """How many the input with the most of them has; None if none is arranged by sequence and
    place."""
    first_axis: int | None = None
    """Length of that of the first other input."""
    covered: float = 1.0
    """The smallest share of rows with a gradient, where rows with and without are joined; 0 if
    it is not visible."""
    injected: list[Node] = field(default_factory=list)
    """Nodes of scalars to which a function that was written in Python hands a gradient."""

    @property
    def rows(self) -> int | None:
        """How many sequences or other rows the micro-batch has, as far as that is visible."""
        if self.sequences is None:
            return self.first_axis
        return self.sequences

    views: dict[Node | None, Node] = field(default_factory=dict)
    """By what they are views of."""

    def visit(self, node: Node, kind: NodeKind) -> None:
        """Look at a node that may hold data, leads to a view, or is a function of its own."""
        if kind.is_view:
            self.views[node.next_functions[0][0]] = node
        if kind.inputs and len(self.data) < MOST_INPUTS:
            self._add_data(node, kind)
        if kind.is_join:
            self.covered = min(self.covered, _covered(node))
        if kind.is_function:
            self.injected += _injected(node)

    def _add_data(self, node: Node, kind: NodeKind) -> None:
        for name in kind.inputs:
            values = _saved_input(node, name)
            if values is not None:
                self.data.append(_some_values(values))
                self._count_rows(values, name, self.views.get(node))
                return

    def _count_rows(self, values: Tensor, name: str, view: Node | None) -> None:
        shape = tuple(values.shape)
        if view is not None and name != INDICES:
            viewed = shape_of(view)
            if viewed is None:  # one row or more
                self._see_sequences(1)
                return
            shape = viewed
        if name == CONVOLVED and shape:
            self._see_sequences(shape[0])
        elif len(shape) == 3 or (name == INDICES and len(shape) == 2):
            # Some put the place first.
            self._see_sequences(min(shape[:2]))
        elif self.first_axis is None:
            self.first_axis = (*shape, 1)[0]

    def _see_sequences(self, count: int) -> None:
        """Keep the largest number of sequences that an input shows."""
        if self.sequences is None or count > self.sequences:
            self.sequences = count


_KINDS: dict[type, NodeKind] = {}


def survey(roots: Sequence[Tensor]) -> GraphSurvey:
    """Walk the graph once; nothing is unpacked that a hook would have to compute."""
    found = GraphSurvey()
    queue = [root.grad_fn for root in roots]
    seen: set[Node | None] = {None}
    for node in queue:
        if node is None or node in seen:
            continue
        seen.add(node)
        if len(seen) > MOST_NODES:
            break
        kind = _KINDS.get(type(node))
        if kind is None:
            kind = _learn_kind(node)
        if kind.is_leaf:
            found.leaves.append(node.variable)  # type: ignore[attr-defined]
            continue
        if kind.is_of_interest:
            found.visit(node, kind)
        queue += [inner for inner, _ in node.next_functions]
    return found


def plain(tensor: Tensor) -> Tensor:
    """The part of a distributed tensor that is on this rank; any other tensor as it is."""
    if type(tensor) is Tensor:
        return tensor
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def input_of(node: Node) -> Tensor | None:
    """The input of a layer that needs no gradient, which is data.

    None if there is none, or a hook would make it.
    """
    for name in INPUTS:
        if hasattr(node, f"_raw_saved_{name}") and (values := _saved_input(node, name)) is not None:
            return values
    return None


def _learn_kind(node: Node) -> NodeKind:
    name = node.name()
    inputs = tuple(each for each in INPUTS if hasattr(type(node), f"_raw_saved_{each}"))
    is_join = name.startswith(JOINS)
    is_function = isinstance(node, torch.autograd.function.BackwardCFunction)
    is_view = name.startswith(VIEWS)
    is_of_interest = bool(inputs) or is_join or is_function or is_view
    is_leaf = hasattr(type(node), "variable")
    kind = NodeKind(is_leaf, inputs, is_join, is_function, is_view, is_of_interest)
    _KINDS[type(node)] = kind
    return kind


def _saved_input(node: Node, name: str) -> Tensor | None:
    """An input for which no gradient is wanted.

    None if one is, or if a hook would have to compute it.
    """
    if not is_at_hand(getattr(node, f"_raw_saved_{name}")):
        return None
    if name != INDICES and _needs_gradient(node, name):
        return None
    saved: Tensor | None = getattr(node, f"_saved_{name}")
    if saved is None:
        return None
    values = plain(saved)
    if values.is_sparse or not values.numel():
        return None
    return values


def _needs_gradient(node: Node, name: str) -> bool:
    """Whether the saved input does; addmm has the bias before it."""
    place = int(name == "mat1" and len(node.next_functions) > 1)
    return place < len(node.next_functions) and node.next_functions[place][0] is not None


def _some_values(values: Tensor) -> Tensor:
    count = values.numel()
    places = torch.arange(0, count, max(1, count // MOST_VALUES), device=values.device)
    return values.detach().take(places[:MOST_VALUES])


def _covered(node: Node) -> float:
    """The share of rows that have a gradient; 1 if all have."""
    if not node.name().startswith("CatBackward"):
        has_gradient = not node.next_functions or node.next_functions[0][0] is not None
        return float(has_gradient)
    have_gradients = [inner is not None for inner, _ in node.next_functions]
    if node._saved_dim != 0 or all(have_gradients):  # type: ignore[attr-defined]
        return 1.0
    joined = shape_of(node)
    if joined is None:
        return 0.0
    covered: int = 0
    for inner, place in node.next_functions:
        shape = None
        if inner is not None:
            shape = shape_of(inner, place)
        if shape is not None:
            covered += shape[0]
    if not joined[0]:
        return 1.0
    return covered / joined[0]


def _injected(node: Node) -> Iterator[Node]:
    """Scalars among the inputs of a function that has none among its outputs.

    The one of DDP, which passes a loss on, has such an output.
    """
    if has_scalar_output(node):
        return
    for inner, place in node.next_functions:
        if inner is not None and not hasattr(inner, "variable") and shape_of(inner, place) == ():
            yield inner
