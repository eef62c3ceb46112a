"""What the formulas of all frameworks are made of: their types, and the bytes of an optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.backends.base import Call
from bench.plan.cell import SGD, Cell, Device
from bench.workload.layout import Layout

Settings = Mapping[str, object]
"""What a trial has stored of ``Backend.settings``; empty before there is one, where those of today apply."""
NO_SETTINGS: Settings = {}
CallsAndHeld = tuple[Iterable[Call], dict[str, int]]
"""The collectives of a window, and the bytes held by category."""
Formula = Callable[[type[Any], Cell, Layout, int, Settings], CallsAndHeld | None]
"""From backend, cell, layout, rank and settings; None for a cell that it does not cover."""


def moments(cell: Cell, numel: int, num_tensors: int) -> int:
    """Bytes of the optimizer's state for a rank's fp32 parameters: two moments and one step counter per tensor.

    torch/optim/adam.py:_init_group: the counter is an fp32 scalar, on the host unless the optimizer is fused, and so
    not counted on CUDA unless fused. SGD without momentum has no state.
    """
    if cell.optimizer == SGD:
        return 0
    counts = cell.device is Device.CPU or cell.optimizer == "adamw-fused"
    counters = 4 * num_tensors if counts else 0
    return 8 * numel + counters


def ceil_to(numel: int, multiple: int) -> int:
    """``numel`` rounded up to a multiple."""
    return -(-numel // multiple) * multiple
