"""Counts what is copied between host and device while a mode is active and a window is open.

Copies of single elements are left out: frameworks read norms and flags so, whether they offload or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.plan.categories import COPIED_TO_DEVICE, COPIED_TO_HOST

ATEN = torch.ops.aten
HOST = "cpu"


class HostCopies(TorchDispatchMode):
    """Bytes that operators copied between the host and any device, from ``start`` until ``stop``."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = False
        self.bytes = {COPIED_TO_DEVICE: 0, COPIED_TO_HOST: 0}
        """By direction, as the destination has them."""

    def start(self) -> None:
        self.counting = True

    def stop(self) -> None:
        self.counting = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # dispatched again on the local tensors
        result = func(*args, **(kwargs or {}))
        if self.counting:
            for source, destination in _copied(func, args, result):
                self._count(source, destination)
        return result

    def _count(self, source: Tensor, destination: Tensor) -> None:
        places = source.device.type, destination.device.type
        if source.numel() == 1 or places[0] == places[1] or HOST not in places:
            return
        direction = COPIED_TO_DEVICE
        if places[1] == HOST:
            direction = COPIED_TO_HOST
        # A cast is made before the copy (aten/src/ATen/native/cuda/Copy.cu).
        self.bytes[direction] += destination.nbytes


def _copied(func: Any, args: tuple[Any, ...], result: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Sources and destinations of an operator that copies."""
    if func is ATEN._to_copy.default:
        yield args[0], result
    elif func is ATEN.copy_.default:
        yield args[1], args[0]
    elif func is ATEN._foreach_copy_.default:
        yield from zip(args[1], args[0], strict=True)
