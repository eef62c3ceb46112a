"""How fast this machine multiplies matrices: what MFU is held against beside the datasheet.

A datasheet's peak assumes clocks that a card under load does not keep, and says nothing of a CPU. The rate of one large
product of two square matrices, in the dtype of a cell, is what its matrix products could reach at best.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from bench.measure.clock import clock_for

SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of both matrices, by device type: large enough that a product keeps the whole device busy."""
WARM_S = {"cuda": 0.5, "cpu": 0.1}
"""For which products run before the first that is timed: clocks settle, libraries choose their kernels."""
PRODUCTS = {"cuda": 25, "cpu": 5}
"""That are timed one by one; their median counts."""


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of this process on the device, with the threads that torch has; 2 n^3 FLOP per product of n x n matrices.

    The numbers are drawn from a normal distribution: on a GPU zeros would take less power, and so be faster.
    """
    kind = device.type
    size, clock = SIZE[kind], clock_for(device)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty(size, size, device=device, dtype=dtype)
    until = time.perf_counter() + WARM_S[kind]
    while time.perf_counter() < until:
        torch.mm(a, b, out=product)
        if kind == "cuda":
            torch.cuda.synchronize()
    marks = [clock.mark()]
    for _ in range(PRODUCTS[kind]):
        torch.mm(a, b, out=product)
        marks.append(clock.mark())
    return 2 * size**3 / median(clock.intervals(marks))
