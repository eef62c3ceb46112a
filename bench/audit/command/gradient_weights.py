"""What each micro-batch weighs in the gradient of each update, by least squares over sampled coordinates.

The gradient that an optimizer uses is y = sum of c_j g_j, with g_j the micro-gradient that backward j added on some
rank. Both are known at some coordinates, so the c_j are the solution of an overdetermined linear system. Its residual
tells whether y is such a sum at all. The standard error of a coefficient is s sqrt(((A'A)^-1)_jj) with
s^2 = |r|^2 / (m - n) for m coordinates and n micro-batches (Björck, Numerical Methods for Least Squares Problems, 1996,
section 1.1.4); its diagonal has the squared lengths of the rows of A's pseudo-inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.audit.command.inside.records import Rank

LOW = {"bfloat16", "float16"}
SINGULAR = 1e-5
"""Columns with smaller relative singular values cannot be told apart in fp32."""
Vector = NDArray[np.float64]
Use = tuple[int, int, int]
"""A micro-batch: its update, rank and number, from 0."""


@dataclass(frozen=True)
class Weight:
    """What a micro-batch of a rank weighs in the gradient that some ranks use; numbers are from 0."""

    update: int
    gradient_of: tuple[int, ...]
    rank: int
    micro_batch: int
    weight: float
    loss_weight: float | None
    """The same of the mean of its loss; None if the number of terms is not visible."""
    terms: float | None
    is_present: bool
    """Whether the weight is not 0."""

    @property
    def use(self) -> Use:
        """The micro-batch."""
        return self.update, self.rank, self.micro_batch


@dataclass
class PartWeights:
    """The weights in the gradient of one update, on ranks that have shards of one replica together."""

    update: int
    ranks: tuple[int, ...]
    weights: list[Weight]
    """Of the micro-batches that can be told apart."""
    residual: float
    is_resolved: bool
    """Whether all micro-batches of the update can."""
    previous: float
    """The coefficient of the gradient that the update before used, where it is needed to explain this one."""


def fit(columns: Vector, right: Vector) -> tuple[Vector, Vector, float]:
    """Coefficients, their standard errors, and the relative residual. Raises ValueError if there is no fit.

    Columns are scaled to length 1 first: micro-gradients differ in length, and singular values are to show directions.
    A column of zeros, or one that cannot be told apart from others, has an infinite error.
    """
    if not (np.isfinite(right).all() and np.isfinite(columns).all()):
        raise ValueError("gradients are not finite")
    if not (right.any() and columns.any()):
        raise ValueError("gradients are 0")
    rows, count = columns.shape
    if rows < count + 2:
        raise ValueError(f"{count} micro-batches are too many for {rows} sampled coordinates")
    lengths = np.linalg.norm(columns, axis=0)
    lengths[lengths == 0] = 1.0
    scaled = columns / lengths
    inverse = np.linalg.pinv(scaled, rcond=SINGULAR)
    solution = inverse @ right
    rest = np.linalg.norm(scaled @ solution - right)
    errors = np.linalg.norm(inverse, axis=1) * rest / (rows - count) ** 0.5
    errors[np.diag(inverse @ scaled) < 1 - 1e-6] = np.inf
    return solution / lengths, errors / lengths, float(rest / np.linalg.norm(right))


class GradientWeights:
    """The weights in every sampled update that all ranks made."""

    def __init__(self, ranks: Mapping[int, Rank], usual: int) -> None:
        self.ranks, self.usual = ranks, usual
        dtypes = {dtype for rank in ranks.values() for update in rank.sampled for dtype in update.dtypes + update.held}
        self.is_low = bool(LOW & dtypes)
        """Whether micro-gradients or their sums have 16 bits."""
        self.tolerance = 0.15 if self.is_low else 0.02
        """Weights are told apart if they differ by more, relative to the largest."""
        self.explained = 0.2 if self.is_low else 0.01
        """The largest relative residual of a sum of micro-gradients; in fp32 rounding is far below, near 1e-7."""
        self.reason = "no gradient that the optimizer used was found"
        """Why there are no weights."""

    @cached_property
    def parts(self) -> list[PartWeights]:
        """The weights by update and by the ranks that have the gradient."""
        parts = []
        for number in range(min(len(rank.sampled) for rank in self.ranks.values())):
            for ranks, used in self._gradients(number).items():
                try:
                    parts.append(self._part(number, ranks, used))
                except ValueError as error:
                    self.reason = str(error)
        return parts

    @property
    def uses_nothing(self) -> bool:
        """Whether optimizers are given gradients that are 0 or None, although micro-gradients are not."""
        updates = [update for rank in self.ranks.values() for update in rank.sampled]
        used = np.concatenate([_flat(update.used) for update in updates])
        adds = any(_flat(found.sample).any() for update in updates for found in update.micro_batches)
        return adds and (used == 0).any() and not np.nan_to_num(used).any()

    def _gradients(self, number: int) -> dict[tuple[int, ...], Vector]:
        """The gradient of an update: of ranks with shards together, of replicas apart."""
        found: dict[tuple[int, ...], Vector] = {}
        for rank, record in self.ranks.items():
            here = _flat(record.sampled[number].used)
            is_here = ~np.isnan(here)
            shards = (ranks for ranks, known in found.items() if (np.isnan(known) | ~is_here).all())
            if is_here.any():
                others = next(shards, ())
                found[*others, rank] = np.where(is_here, here, found.pop(others, np.nan))
        return found

    def _part(self, number: int, ranks: tuple[int, ...], used: Vector) -> PartWeights:
        """Explain a gradient by its window, or else also by the gradient that was used before and never cleared."""
        known, previous = ~np.isnan(used), 0.0
        batches = [
            (rank, place, found)
            for rank, record in self.ranks.items()
            for place, found in enumerate(record.sampled[number].micro_batches)
        ]
        columns = np.column_stack([_flat(found.sample) for _, _, found in batches])
        coefficients, errors, residual = fit(columns[known], used[known])
        if number and residual > self.explained / 10 and ranks in (last := self._gradients(number - 1)):
            other = fit(np.column_stack([columns, last[ranks]])[known], used[known])
            if other[2] < min(self.explained, residual / 2):
                coefficients, errors, residual = other
                previous = float(coefficients[-1])
        coefficients, errors = coefficients[: len(batches)], errors[: len(batches)]
        good = errors < self.tolerance * np.abs(coefficients).max()
        largest = np.abs(coefficients[good]).max(initial=0.0)
        weights = [
            Weight(
                update=number,
                gradient_of=ranks,
                rank=rank,
                micro_batch=place,
                weight=float(c),
                loss_weight=found.loss_weight(float(c)),
                terms=found.criterion.get("terms"),
                is_present=bool(abs(c) > self.tolerance * largest),
            )
            for (rank, place, found), c, is_good in zip(batches, coefficients, good, strict=True)
            if is_good
        ]
        return PartWeights(number, ranks, weights, residual, bool(good.all()), previous)


def _flat(leaves: Any) -> Vector:
    """The values of all leaves at their coordinates."""
    return np.concatenate([np.empty(0), *leaves])
