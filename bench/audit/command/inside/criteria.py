"""Finds the criteria of a loss in its autograd graph, and reads the gradient that each receives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Optional, Tuple  # noqa: UP035 - older Pythons

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from .autograd_nodes import inner_scalars, is_at_hand
from .graph_survey import plain
from .leaf_probes import Guard
from .records import Criterion

MOST_NODES = 200
"""Most nodes looked at between a loss and its criteria, and below one for its terms."""
REDUCTIONS = {1: "mean", 2: "sum", "Mean": "mean", "Sum": "sum"}
"""By ``at::Reduction``, of which 0 is none, or by what stands before Backward in the name of a
node."""
NO_REDUCTION = 0
EVEN = 1.001
"""Factors of terms differ by less where they are the same."""
LossPart = Criterion[Tensor]
"""A criterion whose numbers are still on their device."""
Seeds = Tuple[Optional[Tensor], ...]  # noqa: UP006, UP045 - older Pythons
"""The gradients that arrive at a node."""


def watch(roots: Sequence[Tensor], handles: list[RemovableHandle], guard: Guard) -> list[LossPart]:
    """The criteria of a loss; ``handles`` gets their hooks, which ``guard`` calls.

    Everything between the loss and a criterion multiplies and adds scalars, so the gradient that
    arrives at its node (``seed``, filled in by a hook during the backward) is the factor of its
    value in the loss. Where a criterion reduces nothing itself, the gradient that arrives at it has
    the factor of each of its terms.
    """
    found: list[LossPart] = []
    stack = [root.grad_fn for root in roots]
    seen: set[Node | None] = {None}
    while stack and len(seen) < MOST_NODES:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        scalars = inner_scalars(node)
        if scalars:
            stack += scalars
        else:
            found.append(_watched(node, handles, guard))
    return found


def watch_scalar(node: Node, handles: list[RemovableHandle], guard: Guard) -> LossPart:
    """A loss whose gradient a function makes; its factor is what arrives at its node."""
    entry: LossPart = Criterion(node.name(), None)
    handles.append(node.register_prehook(functools.partial(guard, _read_seed, entry)))
    return entry


def _watched(node: Node, handles: list[RemovableHandle], guard: Guard) -> LossPart:
    entry = _entry(node)
    if not entry.is_named:
        inner = _criterion_of_terms(node)
        if inner is not None:
            entry = _entry(inner)
            entry.reduction = "terms"
            handles.append(inner.register_prehook(functools.partial(guard, _read_terms, entry)))
            return entry
    handles.append(node.register_prehook(functools.partial(guard, _read_seed, entry)))
    return entry


def _criterion_of_terms(node: Node) -> Node | None:
    """The only loss function below a node, if it reduces nothing."""
    queue: list[Node | None] = [node]
    seen: set[Node | None] = {None}
    found: list[Node] = []
    for outer in queue:
        if len(seen) >= MOST_NODES:
            break
        if outer is None or outer in seen:
            continue
        seen.add(outer)
        reduction = getattr(outer, "_saved_reduction", None)
        if reduction == NO_REDUCTION:
            found.append(outer)
        elif reduction is not None:
            return None
        else:
            queue += [following for following, _ in outer.next_functions]
    if len(found) != 1:
        return None
    return found[0]


def _read_seed(entry: LossPart, seeds: Seeds) -> None:
    if seeds[0] is not None:
        entry.seed = plain(seeds[0]).detach().double().sum()


def _read_terms(entry: LossPart, seeds: Seeds) -> None:
    if seeds[0] is None:
        return
    factors = plain(seeds[0]).detach().double()
    sizes = factors.abs()
    counted = sizes > 0
    entry.seed, entry.terms = factors.sum(), counted.sum()
    least = torch.where(counted, sizes, sizes.max()).min()
    entry.is_even = (sizes.max() <= EVEN * least) & (factors.sum().abs() >= sizes.sum() / EVEN)


def _entry(node: Node) -> LossPart:
    """The node's name, how it reduces, and of how many terms it is a sum or mean."""
    name = node.name()
    is_named = hasattr(node, "_saved_reduction")
    reduction = REDUCTIONS.get(getattr(node, "_saved_reduction", name.partition("Backward")[0]))
    entry: LossPart = Criterion(name, reduction, is_named)
    target = getattr(node, "_raw_saved_target", None)
    if name.startswith("NllLoss") and is_at_hand(target):
        _count_terms(entry, node)
    return entry


def _count_terms(entry: LossPart, node: Node) -> None:
    """Of a cross-entropy."""
    labels = plain(node._saved_target)  # type: ignore[attr-defined]
    entry.is_weighted = node._saved_weight is not None  # type: ignore[attr-defined]
    if not entry.is_weighted:
        entry.terms = (labels != node._saved_ignore_index).sum()  # type: ignore[attr-defined]
    elif entry.reduction == "mean":
        entry.terms = plain(node._saved_total_weight)  # type: ignore[attr-defined]
    if labels.dim() != 1 or len(labels) < 2:
        return
    scores: Tensor = node._saved_self  # type: ignore[attr-defined]
    if scores.shape[-1] >= len(labels):
        rows = torch.arange(len(labels), device=labels.device)
        entry.in_batch = (labels - labels[0] == rows).all()
