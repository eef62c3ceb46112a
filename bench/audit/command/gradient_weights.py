"""What each micro-batch weighs in the gradient of each update, by least squares over sampled coordinates.

The gradient that an optimizer uses is y = sum of c_j g_j, with g_j the micro-gradient that backward j added on some
rank. Both are known at some coordinates, so the c_j are the solution of an overdetermined linear system. Its residual
tells whether y is such a sum at all. The standard error of a coefficient is s sqrt(((A'A)^-1)_jj) with
s^2 = |r|^2 / (m - n) for m coordinates and n micro-batches (Björck, Numerical Methods for Least Squares Problems, 1996,
section 1.1.4); its diagonal has the squared lengths of the rows of A's pseudo-inverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bench.audit.command.recorded_updates import Event, RankRecord

LOW = {"bfloat16", "float16"}
SINGULAR = 1e-5
"""Columns with smaller relative singular values cannot be told apart in fp32."""
Use = tuple[int, int, int]
"""A micro-batch: its rank, update and number."""
Gradient = dict[tuple[int, int], float]
"""Values by leaf and coordinate."""


@dataclass
class PartWeights:
    """The weights in the gradient of one update, on ranks that have shards of one replica together."""

    update: int
    ranks: tuple[int, ...]
    weights: dict[Use, float]
    """Of the micro-batches that can be told apart."""
    residual: float
    is_resolved: bool
    """Whether all micro-batches of the update can."""
    previous: float
    """The coefficient of the gradient that the update before used, where it is needed to explain this one."""


def fit(
    columns: NDArray[np.float64], right: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Coefficients, their standard errors, and the relative residual. Raises ValueError if there is no fit.

    Columns are scaled to length 1 first: micro-gradients differ in length, and singular values are to show directions.
    A column of zeros, or one that cannot be told apart from others, has an infinite error.
    """
    if not (np.isfinite(right).all() and np.isfinite(columns).all()):
        raise ValueError("gradients are not finite")
    norms = np.linalg.norm(columns, axis=0)
    known = norms > SINGULAR * norms.max()
    rows, count = len(right), int(known.sum())
    if not count or not right.any():
        raise ValueError("gradients are 0")
    if rows < count + 2:
        raise ValueError(f"{count} micro-batches are too many for {rows} sampled coordinates")
    scaled = columns[:, known] / norms[known]
    inverse = np.linalg.pinv(scaled, rcond=SINGULAR)
    solution = inverse @ right
    rest = np.linalg.norm(scaled @ solution - right)
    spread = np.linalg.norm(inverse, axis=1) * rest / (rows - count) ** 0.5
    spread[np.diag(inverse @ scaled) < 1 - 1e-6] = np.inf
    coefficients, errors = np.zeros(len(norms)), np.full(len(norms), np.inf)
    coefficients[known], errors[known] = solution / norms[known], spread / norms[known]
    return coefficients, errors, float(rest / np.linalg.norm(right))


@dataclass
class GradientWeights:
    """The weights in every update that all ranks took while they were sampled."""

    ranks: Mapping[int, RankRecord]
    reason: str = "no gradient that the optimizer used was found"
    """Why there are none."""

    def __post_init__(self) -> None:
        updates = [update for record in self.ranks.values() for update in record.updates]
        events = [event for update in updates for event in update.micro_batches]
        self.is_low = any(LOW & {*event.get("dtypes", ()), *event.get("held", ())} for event in events)
        """Whether micro-gradients or their sums have 16 bits."""
        self.tolerance = 0.15 if self.is_low else 0.02
        """Weights are told apart if they differ by more, relative to the largest."""
        self.explained = 0.2 if self.is_low else 0.01
        """The largest relative residual of a sum of micro-gradients; in fp32 rounding is far below, near 1e-7."""

    @cached_property
    def parts(self) -> list[PartWeights]:
        """The weights by update and by the ranks that have the gradient."""
        parts = []
        for number in range(min(len(record.updates) for record in self.ranks.values())):
            if not all(self.micro_batch(use)["samples"] for use in self._uses(number)):
                break  # sampling has ended
            for ranks, used in self._gradients(number).items():
                try:
                    parts.append(self._part(number, ranks, used))
                except ValueError as error:
                    self.reason = str(error)
        return parts

    def micro_batch(self, use: Use) -> Event:
        """The micro-batch."""
        return self.ranks[use[0]].updates[use[1]].micro_batches[use[2]]

    def _uses(self, number: int) -> list[Use]:
        counts = {rank: len(record.updates[number].micro_batches) for rank, record in self.ranks.items()}
        return [(rank, number, place) for rank, count in counts.items() for place in range(count)]

    def _gradients(self, number: int) -> dict[tuple[int, ...], Gradient]:
        """The gradient of an update: of ranks with shards together, of replicas apart."""
        found: dict[tuple[int, ...], Gradient] = {}
        for rank, record in self.ranks.items():
            leaves = [(leaf, values) for leaf, values in enumerate(record.updates[number].used) if values]
            here = {(leaf, at): value for leaf, values in leaves for at, value in zip(*values, strict=True)}
            whole = record.first("probes")["coordinates"]
            shards = (ranks for ranks, known in found.items() if len(known) < whole and not known.keys() & here.keys())
            if here:
                others = next(shards, ())
                found[*others, rank] = found.pop(others, {}) | here
        return found

    def _part(self, number: int, ranks: tuple[int, ...], used: Gradient) -> PartWeights:
        """Explain a gradient by its window, or else also by the gradient that was used before and never cleared."""
        uses, right = self._uses(number), np.array([*used.values()])
        columns, previous = self._columns(uses, [*used]), 0.0
        coefficients, errors, residual = fit(columns, right)
        if residual > self.explained / 10 and number:
            last = self._gradients(number - 1).get(ranks, {})
            other = fit(np.column_stack([columns, [last.get(position, 0.0) for position in used]]), right)
            if other[2] < min(self.explained, residual / 2):
                coefficients, errors, residual = other
                previous = float(coefficients[-1])
        good = errors[: len(uses)] < self.tolerance * np.abs(coefficients[: len(uses)]).max()
        weights = {use: float(c) for use, c, is_good in zip(uses, coefficients, good, strict=False) if is_good}
        return PartWeights(number, ranks, weights, residual, bool(good.all()), previous)

    def _columns(self, uses: Sequence[Use], positions: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
        samples = [self.micro_batch(use)["samples"] for use in uses]
        return np.array([[leaves[leaf][at] if leaves[leaf] else 0.0 for leaves in samples] for leaf, at in positions])
