"""Random projections of tensors: they estimate the distance of two that are never in one place.

A projection is the sum of a tensor's elements with random signs. The mean square of the differences
between the projections of two tensors is an unbiased estimate of their squared distance (Alon,
Matias and Szegedy, "The space complexity of approximating the frequency moments", STOC 1996). The
sign of an element follows from its place in the whole tensor, so projections of shards add up to
those of the whole.

Only ``project`` needs torch: the process that compares projections has not loaded it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NUM_PROJECTIONS = 8
"""The estimated distance is within a factor of 2 of the true one in some 98 of 100 cases."""
ROW = 2**14
"""Elements whose signs are stored; each further row has the same, all changed or none."""
ROWS_AT_ONCE = {"cpu": 4, "cuda": 2**8}
"""By device type: on a CPU what fits into a core's cache, on a GPU 2**22 elements."""
PARAMETERS, TRAINED = "parameters", "trained parameters"
"""Kinds of tensors beside those of the optimizer's state, which have its keys; the second without
elements whose gradient is noise (``bench.measure.final_state``)."""
UNCLIPPED, IN_FP32 = "without clipping", "in fp32"
"""Kinds of the parameters after other windows of the update pass than the first."""
MASKS, EXPECTED = ".masks", ".state"
"""Endings of the reference's files: which elements are trained, and the projections of all its
tensors (``Truths``)."""
SEED = 0x5EED


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A tensor that a rank holds, or its shard of one."""

    kind: str
    """PARAMETERS, TRAINED, or a key of the optimizer's state."""
    name: str
    """Of the parameter; empty if the optimizer steps something else."""
    start: int
    """First element in the whole tensor."""
    count: int
    """Number of elements."""
    projections: list[float]
    is_rounded: bool = False
    """Whether its numbers have no more digits than bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """A tensor of the reference at the end of its training."""

    count: int
    projections: list[float]
    scale: float
    """L2 norm of what training has made of it: of a parameter its change, of state itself."""
    size: float
    """L2 norm."""
    is_rounded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Truths:
    """What the reference holds at the end of its training."""

    windows: int
    """Windows that it has trained."""
    steps: int | None
    """The most steps that its optimizer counts."""
    tensors: dict[str, dict[str, Truth]]
    """By kind and name."""


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The estimated L2 distance of two tensors; infinite if a projection is not finite."""
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    if not all(map(math.isfinite, apart)):
        return math.inf
    return math.sqrt(math.fsum(number * number for number in apart) / len(apart))


def norm(projections: Sequence[float]) -> float:
    """The estimated L2 norm of a tensor."""
    return distance(projections, [0.0] * len(projections))


def added(parts: Sequence[Sequence[float]]) -> list[float]:
    """The projections of a tensor, from those of its shards."""
    return [sum(numbers) for numbers in zip(*parts, strict=True)]


@cache
def _signs(device: torch.device) -> Tensor:
    """The signs of a row, fp64, shape [ROW, NUM_PROJECTIONS]."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(2, (ROW, NUM_PROJECTIONS), generator=generator)
    return (2.0 * drawn.double() - 1.0).to(device)


def _row_signs(first: int, count: int, device: torch.device) -> Tensor:
    """The signs of whole rows, fp64, shape [count, NUM_PROJECTIONS].

    They are bits of a hash (SplitMix64) of a row's number.
    """
    import numpy as np
    import torch

    mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    bits = (mixed[:, None] >> np.arange(NUM_PROJECTIONS, dtype=np.uint64)) & np.uint64(1)
    return torch.from_numpy(2.0 * bits.astype(np.float64) - 1.0).to(device)


def project(
    values: Tensor,
    start: int = 0,
    *,
    mask: Tensor | None = None,
    device: torch.device | None = None,
) -> list[float]:
    """The projections of a tensor's elements, or of those where ``mask`` is true.

    The elements are those from ``start`` on, in the order of the whole tensor; ``mask`` has as
    many. Calculated on the device, in fp64.
    """
    import torch

    flat = values.detach().flatten()
    where = flat.device
    if device is not None:
        where = device
    signs = _signs(where)
    at_once = ROWS_AT_ONCE[where.type] * ROW
    total = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64, device=where)
    done = 0
    while done < len(flat):
        row, within = divmod(start + done, ROW)
        left = len(flat) - done
        is_whole = within == 0 and left >= ROW
        if is_whole:
            count = min(left - left % ROW, at_once)
        else:
            count = min(ROW - within, left)
        part = flat[done : done + count].to(where).double()
        if mask is not None:
            part = part * mask[done : done + count].to(where)
        if is_whole:
            rows = count // ROW
            total += ((part.view(rows, ROW) @ signs) * _row_signs(row, rows, where)).sum(dim=0)
        else:
            total += (part @ signs[within : within + count]) * _row_signs(row, 1, where)[0]
        done += count
    return [float(number) for number in total.tolist()]
