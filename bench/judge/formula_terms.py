"""What the formulas of all frameworks are made of: types, and bytes of an optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from bench.backends.base import Backend, Call
from bench.plan.cell import SGD, Cell, Device, Precision, Sync
from bench.workload.layout import Layout

ELEMENT_BYTES = {Precision.FP32: 4, Precision.BF16: 2}
"""Bytes of one element of forward and backward, by precision."""
Settings = Mapping[str, object]
"""What a trial has stored of ``Backend.settings``; empty before there is one, where those of today
apply."""
NO_SETTINGS: Settings = {}
CallsAndHeld = tuple[Iterable[Call], dict[str, int]]
"""The collectives of a window, and the bytes held by category."""
Formula = Callable[[type[Backend], Cell, Layout, int, Settings], CallsAndHeld | None]
"""From backend, cell, layout, rank and settings; None for a cell that it does not cover.

Each raises TypeError for a backend of a class that is not its own.
"""


def moments(cell: Cell, numel: int, num_tensors: int) -> int:
    """Bytes of the optimizer's state for a rank's fp32 parameters: two moments and step counters.

    torch/optim/adam.py:_init_group: the counter is an fp32 scalar, on the host unless the optimizer
    is fused, and so not counted on CUDA unless fused. SGD without momentum has no state.
    """
    if cell.optimizer == SGD:
        return 0
    counted = 0
    if cell.device is Device.CPU or cell.optimizer == "adamw-fused":
        counted = num_tensors
    return 8 * numel + 4 * counted


def compute_dtype(cell: Cell) -> str:
    """The dtype of forward and backward."""
    return "bfloat16" if cell.precision is Precision.BF16 else "float32"


def num_reductions(sync: Sync, cell: Cell) -> int:
    """How often a gradient is reduced in a window: N times under eager sync, else once."""
    return cell.accumulate if sync is Sync.EAGER else 1


def ceil_to(numel: int, multiple: int) -> int:
    """``numel`` rounded up to a multiple."""
    return -(-numel // multiple) * multiple
