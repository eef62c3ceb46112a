"""What torch shows of nodes of autograd: the shapes that they put out, and tensors that they save.

Where it shows no shapes, some follow from what a node saves and from what it calculates. Where it
does not show whether a hook makes a saved tensor, it is seen whether any such hook was ever set.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Optional, Tuple  # noqa: UP035 - older Pythons

import torch
from torch.autograd.graph import Node

Shape = Optional[Tuple[int, ...]]  # noqa: UP006, UP045 - older Pythons
"""None where it is not visible."""
ELEMENTWISE = (
    "AddBackward",
    "SubBackward",
    "RsubBackward",
    "MulBackward",
    "DivBackward",
    "NegBackward",
    "ToCopyBackward",
    "CloneBackward",
    "AliasBackward",
    "UnsqueezeBackward",
)
"""What puts out one element is given nothing larger by these."""
SUMS = ("SumBackward0", "MeanBackward0")
"""Over all elements."""
SINK = "_DDPSinkBackward"
"""DDP passes all outputs of its model through one node."""
_AUTOGRAD: Any = torch._C._autograd
_SET_HOOKS = "_push_saved_tensors_default_hooks"
_UNKNOWN = "unknown"


class SavedTensorHooks:
    """Hooks of saved tensors, where torch does not show those of each.

    Of ``register_hooks`` of a single tensor nothing is seen.
    """

    were_set = False

    @classmethod
    def watch(cls) -> None:
        """Take notice of hooks from now on."""
        if hasattr(_AUTOGRAD.SavedTensor, "unpack_hook"):
            return
        original: Callable[..., object] = getattr(_AUTOGRAD, _SET_HOOKS)

        @functools.wraps(original)
        def set_hooks(*hooks: object) -> object:
            cls.were_set = True
            return original(*hooks)

        setattr(_AUTOGRAD, _SET_HOOKS, set_hooks)


def is_at_hand(saved: object) -> bool:
    """Whether a saved tensor is there.

    Otherwise a hook would recompute (checkpointing) or fetch (offloading) it.
    """
    if saved is None:
        return False
    hook = getattr(saved, "unpack_hook", _UNKNOWN)
    if hook is _UNKNOWN:
        return not SavedTensorHooks.were_set
    return hook is None


def shape_of(node: Node, place: int = 0) -> Shape:
    """Of the output at that place."""
    outputs = _outputs(node)
    if outputs is None or place >= len(outputs):
        return None
    return tuple(outputs[place].shape)


def are_shapes_shown() -> bool:
    """Whether this version of torch shows them."""
    node = torch.ones(1, requires_grad=True).sum().grad_fn
    return node is not None and _outputs(node) is not None


def has_scalar_output(node: Node) -> bool:
    """Whether one is seen among its outputs."""
    outputs = _outputs(node)
    if outputs is None:
        return False
    return any(math.prod(output.shape) == 1 for output in outputs)


def inner_scalars(node: Node) -> list[Node]:
    """The nodes before one that puts out a scalar, if it only multiplies and adds scalars.

    Empty for any other.
    """
    if hasattr(node, "_saved_reduction"):
        return []
    outputs = _outputs(node)
    if outputs is None:
        return _followed(node)
    scalars = []
    has_others = False
    for following, place in node.next_functions:
        if following is None:
            continue
        shape = shape_of(following, place)
        if shape is None:
            continue
        if math.prod(shape) == 1:
            scalars.append(following)
        else:
            has_others = True
    if has_others and len(outputs) <= 1:
        return []
    return scalars


def _outputs(node: Node) -> Any:
    """Metadata of each; None where torch does not show them."""
    return getattr(node, "_input_metadata", None)


def _followed(node: Node) -> list[Node]:
    """The same where torch shows no shapes."""
    inner = [following for following, _ in node.next_functions if following is not None]
    if node.name().startswith(ELEMENTWISE):
        return inner
    if node.name() == SINK:
        return [following for following in inner if _is_reduced(following)]
    size = getattr(node, "_saved_self_sym_sizes", None)
    if size is not None and math.prod(size) == 1:
        return inner
    return []


def _is_reduced(node: Node) -> bool:
    """Whether it puts out the sum or mean of all terms."""
    return bool(getattr(node, "_saved_reduction", 0)) or node.name() in SUMS
