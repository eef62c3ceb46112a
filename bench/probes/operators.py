"""Operators counted where torch dispatches them to a backend."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

MARKS = "profiler"
"""Namespace of operators that only mark ranges for a profiler; torch wraps every optimizer step in them."""


class OperatorCounter(TorchDispatchMode):
    """Counts operators below autograd while the mode is on; one on DTensors as those on its local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back as operations on the local tensors
        self.count += func.namespace != MARKS
        return func(*args, **(kwargs or {}))
