"""What each micro-batch weighs in the gradient of each update, by least squares over sampled coordinates.

The gradient that an optimizer uses is y = sum of c_j g_j, with g_j the micro-gradient that backward j added on some
rank. Both are known at some coordinates, so the c_j are the solution of an overdetermined linear system. Its residual
tells whether y is such a sum at all. The standard error of a coefficient is s sqrt(((A'A)^-1)_jj) with
s^2 = |r|^2 / (m - n) for m coordinates and n micro-batches (Björck, Numerical Methods for Least Squares Problems, 1996,
section 1.1.4); with the singular value decomposition A = U S V', (A'A)^-1 is V S^-2 V'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.audit.command.recorded_updates import MicroBatch, RankRecord

LOW = {"bfloat16", "float16"}
SINGULAR = 1e-5
"""Columns with smaller relative singular values cannot be told apart in fp32."""
Use = tuple[int, int, int]
"""A micro-batch: its rank, update and number."""
Position = tuple[int, int]
"""A leaf and one of its coordinates."""


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

    def largest(self) -> float:
        """The size of the largest weight."""
        return max(map(abs, self.weights.values()), default=0.0)


class Fit(NamedTuple):
    """A least-squares solution with standard errors, and the residual relative to the right side."""

    coefficients: NDArray[np.float64]
    errors: NDArray[np.float64]
    residual: float


def fit(columns: NDArray[np.float64], right: NDArray[np.float64]) -> Fit:
    """The least-squares fit of ``right``; columns of zeros have infinite errors. Raises ValueError if there is none.

    Columns are scaled to length 1 first: micro-gradients differ in length, and singular values are to show directions.
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
    left, singular, axes = np.linalg.svd(scaled, full_matrices=False)
    inverse = np.divide(1.0, singular, out=np.zeros_like(singular), where=singular > SINGULAR * singular[0])
    solution = axes.T @ (inverse * (left.T @ right))
    rest = float(np.linalg.norm(scaled @ solution - right))
    spread = np.sqrt(((axes.T * inverse) ** 2).sum(axis=1)) * rest / (rows - count) ** 0.5
    # The columns that take part in a direction without an inverse cannot be told apart.
    spread[(np.abs(axes[inverse == 0]) > 1e-3).any(axis=0)] = np.inf
    coefficients, errors = np.zeros(len(norms)), np.full(len(norms), np.inf)
    coefficients[known], errors[known] = solution / norms[known], spread / norms[known]
    return Fit(coefficients, errors, rest / float(np.linalg.norm(right)))


@dataclass
class GradientWeights:
    """The weights in every update that all ranks took while they were sampled."""

    ranks: Mapping[int, RankRecord]
    reason: str = "no gradient that the optimizer used was found"
    """Why there are none."""

    @cached_property
    def parts(self) -> list[PartWeights]:
        """The weights by update and by the ranks that have the gradient."""
        parts = []
        for number in range(min(len(record.updates) for record in self.ranks.values())):
            if not all(self.micro_batch(use).samples for use in self._uses(number)):
                break  # sampling has ended
            for ranks, used in self._gradients(number).items():
                try:
                    parts.append(self._part(number, ranks, used))
                except ValueError as error:
                    self.reason = str(error)
        return parts

    @property
    def is_low(self) -> bool:
        """Whether micro-gradients or their sums have 16 bits."""
        events = [
            mb.event for record in self.ranks.values() for update in record.updates for mb in update.micro_batches
        ]
        return any(LOW & {*event.get("dtypes", ()), *event.get("held", ())} for event in events)

    @property
    def tolerance(self) -> float:
        """Weights are told apart if they differ by more, relative to the largest."""
        return 0.15 if self.is_low else 0.02

    @property
    def explained(self) -> float:
        """The largest relative residual of a sum of micro-gradients; in fp32 rounding is far below, near 1e-7."""
        return 0.2 if self.is_low else 0.01

    def micro_batch(self, use: Use) -> MicroBatch:
        """The micro-batch."""
        return self.ranks[use[0]].updates[use[1]].micro_batches[use[2]]

    def _uses(self, number: int) -> list[Use]:
        counts = {rank: len(record.updates[number].micro_batches) for rank, record in self.ranks.items()}
        return [(rank, number, place) for rank, count in counts.items() for place in range(count)]

    def _gradients(self, number: int) -> dict[tuple[int, ...], dict[Position, float]]:
        """The gradient of an update: of ranks with shards together, of replicas apart."""
        found: dict[tuple[int, ...], dict[Position, float]] = {}
        for rank, record in self.ranks.items():
            update = record.updates[number]
            scale = update.steps[0].get("scale") or 1.0
            leaves = [(leaf, values) for leaf, values in enumerate(update.used) if values]
            here = {(leaf, at): value / scale for leaf, values in leaves for at, value in zip(*values, strict=True)}
            whole = record.first("probes")["coordinates"]
            shards = (ranks for ranks, known in found.items() if len(known) < whole and not known.keys() & here.keys())
            if here:
                others = next(shards, ())
                found[*others, rank] = found.pop(others, {}) | here
        return found

    def _columns(self, uses: Sequence[Use], positions: Sequence[Position]) -> NDArray[np.float64]:
        samples = [self.micro_batch(use).samples for use in uses]
        return np.array([[(leaves[leaf] or {at: 0.0})[at] for leaves in samples] for leaf, at in positions])

    def _part(self, number: int, ranks: tuple[int, ...], used: Mapping[Position, float]) -> PartWeights:
        """Explain a gradient by its window; if that fails with the window before, or with the gradient used before."""
        uses, positions = self._uses(number), sorted(used)
        right, columns = np.array([used[position] for position in positions]), self._columns(uses, positions)
        known, found, previous = [*uses], fit(columns, right), 0.0
        if found.residual > self.explained / 10 and number:
            before = self._uses(number - 1)
            last = self._gradients(number - 1).get(ranks, {})
            others = [self._columns(before, positions), np.array([[last.get(position, 0.0)] for position in positions])]
            for column in others:
                try:
                    other = fit(np.hstack([columns, column]), right)
                except ValueError:
                    continue
                if other.residual < min(self.explained, found.residual / 2):
                    known, found = [*uses, *before] if column is others[0] else [*uses], other
                    previous = 0.0 if column is others[0] else float(other.coefficients[-1])
                    break
        limit, norm = self.ranks[ranks[0]].updates[number].steps[0].get("clip", (0.0, 0.0))
        factor = max(1.0, norm / limit) if limit and norm else 1.0  # DeepSpeed clips by itself
        good = found.errors < self.tolerance * np.abs(found.coefficients[: len(known)]).max()
        solved = zip(known, found.coefficients, good, strict=False)
        weights = {use: float(coefficient) * factor for use, coefficient, is_good in solved if is_good}
        return PartWeights(number, ranks, weights, found.residual, all(good[: len(uses)]), previous)
