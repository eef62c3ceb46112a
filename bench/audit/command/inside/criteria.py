"""Finds the criteria of a loss in its autograd graph, and reads the gradient that each receives."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from .graph_survey import plain
from .records import Criterion

MOST_NODES = 200
"""Most nodes looked at between a loss and its criteria, and below one for its terms."""
REDUCTIONS = {1: "mean", 2: "sum", "Mean": "mean", "Sum": "sum"}
"""By ``at::Reduction``, of which 0 is none, or by what stands before Backward in the name of a node."""
NO_REDUCTION = 0
EVEN = 1.001
"""Factors of terms differ by less where they are the same."""


def watch(roots: Any, handles: list[Any]) -> list[Criterion]:
    """The criteria of a loss; ``handles`` gets their hooks.

    Everything between the loss and a criterion multiplies and adds scalars, so the gradient that arrives at its node
    (``seed``, filled in by a hook during the backward) is the factor of its value in the loss. Where a criterion
    reduces nothing itself, the gradient that arrives at it has the factor of each of its terms.
    """
    found: list[Criterion] = []
    stack = [root.grad_fn for root in roots]
    seen: set[Any] = {None}
    while stack and len(seen) < MOST_NODES:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        scalars = _inner_scalars(node)
        if scalars:
            stack += scalars
        else:
            found.append(_watched(node, handles))
    return found


def watch_scalar(node: Any, handles: list[Any]) -> Criterion:
    """A loss whose gradient a function makes; its factor is what arrives at its node."""
    entry = Criterion(node.name(), None)
    handles.append(node.register_prehook(functools.partial(_read_seed, entry)))
    return entry


def _inner_scalars(node: Any) -> list[Any]:
    """The nodes before one that only multiplies and adds scalars; empty for any other."""
    if hasattr(node, "_saved_reduction"):
        return []
    inner = [
        (following, math.prod(following._input_metadata[place].shape))
        for following, place in node.next_functions
        if following is not None and place < len(getattr(following, "_input_metadata", ()))
    ]
    if len(node._input_metadata) > 1:  # DDP passes all outputs of its model through one node
        inner = [(following, size) for following, size in inner if size == 1]
    if any(size != 1 for _, size in inner):
        return []
    return [following for following, _ in inner]


def _watched(node: Any, handles: list[Any]) -> Criterion:
    entry = _entry(node)
    read = functools.partial(_read_seed, entry)
    if not entry.is_named:
        inner = _criterion_of_terms(node)
        if inner is not None:
            entry = _entry(inner)
            entry.reduction = "terms"
            node, read = inner, functools.partial(_read_terms, entry)
    handles.append(node.register_prehook(read))
    return entry


def _criterion_of_terms(node: Any) -> Any:
    """The only loss function below a node, if it reduces nothing."""
    queue, seen, found = [node], {None}, []
    while queue and len(seen) < MOST_NODES:
        outer = queue.pop(0)
        if outer in seen:
            continue
        seen.add(outer)
        if getattr(outer, "_saved_reduction", None) == NO_REDUCTION:
            found.append(outer)
        elif hasattr(outer, "_saved_reduction"):
            return None
        else:
            queue += [following for following, _ in outer.next_functions]
    return found[0] if len(found) == 1 else None


def _read_seed(entry: Criterion, seeds: Any) -> None:
    if seeds[0] is not None:
        entry.seed = plain(seeds[0]).detach().double().sum()


def _read_terms(entry: Criterion, seeds: Any) -> None:
    if seeds[0] is None:
        return
    factors = plain(seeds[0]).detach().double()
    sizes = factors.abs()
    counted = sizes > 0
    entry.seed, entry.terms = factors.sum(), counted.sum()
    least = torch.where(counted, sizes, sizes.max()).min()
    entry.is_even = (sizes.max() <= EVEN * least) & (factors.sum().abs() >= sizes.sum() / EVEN)


def _entry(node: Any) -> Criterion:
    """The node's name, how it reduces, and of how many terms it is a sum or mean."""
    name = node.name()
    is_named = hasattr(node, "_saved_reduction")
    reduction = REDUCTIONS.get(getattr(node, "_saved_reduction", name.partition("Backward")[0]))
    entry = Criterion(name, reduction, is_named)
    if not name.startswith("NllLoss"):
        return entry
    target = getattr(node, "_raw_saved_target", None)
    # A hook would recompute (checkpointing) or fetch (offloading) the tensor.
    if getattr(target, "unpack_hook", "unknown") is None:
        entry.is_weighted = node._saved_weight is not None
        labels = plain(node._saved_target)
        if not entry.is_weighted:
            entry.terms = (labels != node._saved_ignore_index).sum()
        elif reduction == "mean":
            entry.terms = plain(node._saved_total_weight)
        scores = node.next_functions[0][0]
        shape = getattr(scores, "_input_metadata", [None])[0]
        if (
            labels.dim() == 1
            and len(labels) > 1
            and shape is not None
            and shape.shape[-1] >= len(labels)
        ):
            rows = torch.arange(len(labels), device=labels.device)
            entry.in_batch = (labels - labels[0] == rows).all()
    return entry
