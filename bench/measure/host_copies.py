"""Counts what is copied between host and device while a mode is active and a window is open.

Copies of single elements are left out: frameworks read norms and flags so, whether they offload or
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.measure.local_mode import LocalMode
from bench.plan.categories import COPIED_TO_DEVICE, COPIED_TO_HOST

if TYPE_CHECKING:
    from bench.measure.local_mode import Arguments, Operator, Options

ATEN = torch.ops.aten
HOST = "cpu"


class HostCopies(LocalMode):
    """Bytes that operators copied between host and devices, from ``start`` until ``stop``."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = False
        self.bytes = {COPIED_TO_DEVICE: 0, COPIED_TO_HOST: 0}
        """By direction, as the destination has them."""

    def start(self) -> None:
        self.counting = True

    def stop(self) -> None:
        self.counting = False

    def run(self, func: Operator, args: Arguments, kwargs: Options) -> object:
        result: object = func(*args, **kwargs)
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


def _copied(func: Operator, args: Arguments, result: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Sources and destinations of an operator that copies."""
    if func is ATEN._to_copy.default:
        yield args[0], result
    elif func is ATEN.copy_.default:
        yield args[1], args[0]
    elif func is ATEN._foreach_copy_.default:
        yield from zip(args[1], args[0], strict=True)
