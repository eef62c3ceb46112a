"""Finds the criteria of a loss in its autograd graph, and reads the gradient that each receives."""

from __future__ import annotations

import functools
import math
from typing import Any

MOST_NODES = 200
"""Most nodes looked at between a loss and its criteria."""
REDUCTIONS = {1: "mean", 2: "sum", "Mean": "mean", "Sum": "sum"}
"""By ``at::Reduction``, of which 0 is none, or by what stands before Backward in the name of a node."""


def watch(roots: Any, handles: list[Any]) -> list[dict[str, Any]]:
    """One entry per criterion: the first nodes, seen from the loss, that are given something other than scalars.

    Everything between the loss and such a node multiplies and adds scalars, so the gradient that arrives at the node
    (``seed``, filled in by a hook during the backward) is the factor of its value in the loss.
    """
    found: list[dict[str, Any]] = []
    stack = [root.grad_fn for root in roots]
    seen: set[Any] = {None}
    while stack and len(seen) < MOST_NODES:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        sizes = [
            (inner, math.prod(inner._input_metadata[place].shape))
            for inner, place in node.next_functions
            if inner is not None and place < len(getattr(inner, "_input_metadata", ()))
        ]
        if len(node._input_metadata) > 1:  # DDP passes all outputs of its model through one node
            sizes = [(inner, size) for inner, size in sizes if size == 1]
        if sizes and all(size == 1 for _, size in sizes) and not hasattr(node, "_saved_reduction"):
            stack += [inner for inner, _ in sizes]
            continue
        found.append(_entry(node))
        handles.append(node.register_prehook(functools.partial(_read_seed, found[-1])))
    return found


def _read_seed(entry: dict[str, Any], seeds: Any) -> None:
    if seeds[0] is not None:
        entry["seed"] = seeds[0].detach().sum()


def _entry(node: Any) -> dict[str, Any]:
    """The node's name, how it reduces, and of how many terms it is a sum or mean; None if that is not visible."""
    name = node.name()
    reduction = REDUCTIONS.get(getattr(node, "_saved_reduction", name.partition("Backward")[0]))
    terms = None
    target = getattr(node, "_raw_saved_target", None) if name.startswith("NllLoss") else None
    # A hook would recompute (checkpointing) or fetch (offloading) the tensor.
    if getattr(target, "unpack_hook", "unknown") is None:
        if node._saved_weight is None:
            terms = (node._saved_target != node._saved_ignore_index).sum()
        elif reduction == "mean":
            terms = node._saved_total_weight
    return {"node": name, "reduction": reduction, "terms": terms, "seed": None}
