"""Lazy views of fake tensors.

DeepSpeed's ZeRO-3 splits what it gathers and reduces into W views in Python. Rank 0 uses only the first of them, and of
the others only the length. A view of a fake tensor costs tens of microseconds, so for W = 1024 the views take minutes.
Here DeepSpeed's loops run unchanged, but a view is created only when it is used as a tensor. A view has no memory of
its own, so bytes and collectives stay the same.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

LOOPS = {
    "deepspeed": (
        (
            "deepspeed.runtime.zero.partitioned_param_coordinator",
            "PartitionedParameterCoordinator._PartitionedParameterCoordinator__all_gather_params_",
        ),
        ("deepspeed.runtime.zero.stage3", "reduce_scatter_coalesced"),
    )
}
"""By package, the functions that create one view per rank: module, and name in it. If a version lacks one, it is merely
slow."""


class View:
    """``length`` elements of a one-dimensional fake tensor from ``start`` on; becomes a tensor when one is needed.

    Length, dtype, device and sub-views are known without a tensor; everything else is delegated to it. Torch functions
    get the tensor, except ``torch.cat``, whose result has its own memory and needs only the lengths.
    """

    __slots__ = ("_length", "_made", "_start", "_whole")

    def __init__(self, whole: Tensor, start: int, length: int) -> None:
        self._whole, self._start, self._length = whole, start, length
        self._made: Tensor | None = None

    def tensor(self) -> Tensor:
        if self._made is None:
            with torch._C.DisableTorchFunction():
                self._made = self._whole.narrow(0, self._start, self._length)
        return self._made

    def numel(self) -> int:
        return self._length

    @property
    def dtype(self) -> torch.dtype:
        return self._whole.dtype

    @property
    def device(self) -> torch.device:
        return self._whole.device

    def narrow(self, dim: int, start: int, length: int) -> Any:
        if dim == 0 and start >= 0 and 0 <= length <= self._length - start:
            return View(self._whole, self._start + start, length)
        return self.tensor().narrow(dim, start, length)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor()[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.cat and len(args) == 1 and not kwargs and (joined := _joined(args[0])) is not None:
            return joined
        args, kwargs = tree_map_only(View, View.tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


def _joined(parts: Sequence[View | Tensor]) -> Tensor | None:
    """The result of ``torch.cat`` on fake tensors of one dimension and dtype; None in other cases."""
    wholes = {id(whole): whole for whole in (part._whole if type(part) is View else part for part in parts)}
    first, *others = wholes.values()
    if not all(_is_plain(whole) and whole.dtype is first.dtype and whole.device == first.device for whole in others):
        return None
    return first.new_empty(sum([part.numel() for part in parts])) if _is_plain(first) else None


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor is fake, one-dimensional, and its views are not tracked by autograd."""
    return type(tensor) is FakeTensor and tensor.dim() == 1 and not (tensor.requires_grad and torch.is_grad_enabled())


class OnDemand(TorchFunctionMode):
    """While active, views of plain fake tensors are ``View`` objects, except those starting at element 0.

    The latter belong to rank 0, the only rank of a virtual world, and are created at once.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not kwargs and func in _CUTS and (cut := _CUTS[func](*args)) is not None:
            return cut
        return func(*args, **(kwargs or {}))


def _narrow(whole: Any, dim: Any, start: Any, length: Any) -> View | None:
    if dim == 0 and type(start) is int and _is_plain(whole) and start > 0 and 0 <= length <= whole.numel() - start:
        return View(whole, start, length)
    return None


def _slice(whole: Any, index: Any) -> View | None:
    if type(index) is slice and _is_plain(whole):
        start, stop, step = index.indices(whole.numel())
        if step == 1 and 0 < start <= stop:
            return View(whole, start, stop - start)
    return None


def _chunk(whole: Any, chunks: Any, dim: Any = 0) -> tuple[View | Tensor, ...] | None:
    if not (dim == 0 and type(chunks) is int and chunks > 0 and _is_plain(whole) and whole.numel()):
        return None
    numel = whole.numel()
    size = -(-numel // chunks)
    rest = (View(whole, start, min(size, numel - start)) for start in range(size, numel, size))
    return (whole.narrow(0, 0, min(size, numel)), *rest)


_CUTS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.narrow: _narrow,
    torch.Tensor.__getitem__: _slice,
    torch.chunk: _chunk,
}
"""Functions that split a tensor into views, with lazy versions that return None for unsupported arguments."""


def on_demand(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with lazy views inside; its result contains only tensors."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with OnDemand():
            result = function(*args, **kwargs)
        return tree_map_only(View, View.tensor, result)

    return run


def loops(packages: Sequence[str]) -> list[tuple[Any, str]]:
    """Owners and names of the functions in LOOPS for these packages."""
    found = []
    for package in packages:
        for module, path in LOOPS.get(package, ()):
            *owners, name = path.split(".")
            try:
                owner = functools.reduce(getattr, owners, importlib.import_module(module))
            except (ImportError, AttributeError):
                continue
            if hasattr(owner, name):
                found.append((owner, name))
    return found
