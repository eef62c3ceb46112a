"""A dispatch mode that sees each operator once: one on DTensors as those on their local tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch._ops import OpOverload

    Operator = OpOverload[..., Any]
    Arguments = tuple[Any, ...]
    """What an operator is given by position: tensors, numbers, and lists of them."""
    Options = Mapping[str, Any]
    """What it is given by name."""


class LocalMode(TorchDispatchMode):
    """Calls ``run`` for every operator on local tensors."""

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Options | None = None,
    ) -> object:
        for kind in types:
            if issubclass(kind, DTensor):
                return NotImplemented  # dispatched again on the local tensors
        if kwargs is None:
            kwargs = {}
        return self.run(func, args, kwargs)

    def run(self, func: Operator, args: Arguments, kwargs: Options) -> object:
        """Run an operator and return its result."""
        raise NotImplementedError
