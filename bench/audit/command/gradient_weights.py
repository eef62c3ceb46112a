"""What each micro-batch weighs in the gradient of each update, by least squares over sampled coordinates.

The gradient that an optimizer uses is y = sum of c_j g_j, with g_j the micro-gradient that the backward j added on some
rank. Both are known at some coordinates, so the c_j are the solution of an overdetermined linear system. Its residual
tells whether y is such a sum at all. The standard error of a coefficient is s sqrt(((A'A)^-1)_jj) with
s^2 = |r|^2 / (m - n) for m coordinates and n micro-batches (Gauss-Markov; Björck, Numerical Methods for Least Squares
Problems, 1996, section 1.1.4), with A'A inverted by the singular values of A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.audit.command.recorded_updates import RankRecord

LOW = {"bfloat16", "float16"}
TOLERANCE, LOW_TOLERANCE = 0.02, 0.15
"""Two weights are told apart if they differ by more, relative to the largest."""
EXPLAINED, LOW_EXPLAINED = 0.01, 0.2
"""Largest relative residual of a gradient that is a sum of micro-gradients: rounding is far below, in fp32 by 1e4."""
SINGULAR = 1e-5
"""Columns with smaller relative singular values cannot be told apart in fp32."""
Use = tuple[int, int, int]
"""A micro-batch: its rank, update and number in it."""


@dataclass
class PartWeights:
    """The weights in the gradient of one update, on ranks that have shards of one replica together."""

    update: int
    ranks: tuple[int, ...]
    weights: dict[Use, float]
    """Of the micro-batches that can be resolved."""
    residual: float
    unresolved: int
    previous: float = 0.0
    """The coefficient of the gradient that the update before used, where that is needed to explain this one."""

    def zero(self, tolerance: float) -> set[Use]:
        """Micro-batches of this update that are not in its gradient."""
        largest = max(map(abs, self.weights.values()), default=0.0)
        return {use for use, c in self.weights.items() if use[1] == self.update and abs(c) < tolerance * largest}


@dataclass
class Weights:
    """The weights of all sampled updates."""

    parts: list[PartWeights] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    """Why some could not be calculated."""
    is_low: bool = False
    """Whether micro-gradients or sums have 16 bits."""

    @property
    def tolerance(self) -> float:
        return LOW_TOLERANCE if self.is_low else TOLERANCE

    @property
    def explained(self) -> float:
        return LOW_EXPLAINED if self.is_low else EXPLAINED

    @property
    def residual(self) -> float:
        return max((part.residual for part in self.parts), default=0.0)


@dataclass
class Fit:
    """A least-squares solution: coefficients, their standard errors, and the residual relative to the right side."""

    coefficients: NDArray[np.float64]
    errors: NDArray[np.float64]
    residual: float


def fit(columns: NDArray[np.float64], right: NDArray[np.float64]) -> Fit | None:
    """The least-squares fit of ``right``; None if there are too few coordinates. Columns of zeros have infinite errors.

    Columns are scaled to length 1 first: micro-gradients differ in length, and singular values are to show directions.
    """
    norms = np.linalg.norm(columns, axis=0)
    length = np.linalg.norm(right)
    known = norms > SINGULAR * norms.max(initial=0.0)
    rows, count = len(right), int(known.sum())
    if not count or rows < count + 2 or not length:
        return None
    left, singular, axes = np.linalg.svd(columns[:, known] / norms[known], full_matrices=False)
    inverse = np.divide(1.0, singular, out=np.zeros_like(singular), where=singular > SINGULAR * singular[0])
    scaled = axes.T @ (inverse * (left.T @ right))
    rest = float(np.linalg.norm(columns[:, known] / norms[known] @ scaled - right))
    spread = np.sqrt(((axes.T * inverse) ** 2).sum(axis=1)) * rest / (rows - count) ** 0.5
    # A direction that was left out moves all columns that take part in it.
    spread[(np.abs(axes[inverse == 0]) > 1e-3).any(axis=0)] = np.inf
    coefficients, errors = np.zeros(len(norms)), np.full(len(norms), np.inf)
    coefficients[known], errors[known] = scaled / norms[known], spread / norms[known]
    return Fit(coefficients, errors, rest / float(length))


def solve(ranks: Mapping[int, RankRecord]) -> Weights:
    """The weights in every update that all ranks took while they were sampled."""
    found = Weights()
    updates = min(len(record.updates) for record in ranks.values())
    sampled = [mb for record in ranks.values() for update in record.updates[:updates] for mb in update.micro_batches]
    found.is_low = any(LOW & {*mb.event.get("dtypes", ()), *mb.event.get("held", ())} for mb in sampled)
    for number in range(updates):
        mine = _uses(ranks, number)
        if not all(ranks[r].updates[u].micro_batches[i].samples for r, u, i in mine):
            break  # sampling has ended
        before = _uses(ranks, number - 1) if number else []
        for some, used in _parts(ranks, number):
            try:
                part = _part(ranks, number, some, used, (mine, before), found.is_low)
            except ValueError as error:
                found.reasons.add(str(error))
                continue
            found.parts.append(part)
    return found


def _uses(ranks: Mapping[int, RankRecord], number: int) -> list[Use]:
    return [(r, number, i) for r, record in ranks.items() for i in range(len(record.updates[number].micro_batches))]


def _parts(ranks: Mapping[int, RankRecord], number: int) -> list[tuple[tuple[int, ...], dict[tuple[int, int], float]]]:
    """The gradient of an update by leaf and position: of ranks with shards together, of replicas apart."""
    parts: list[tuple[tuple[int, ...], dict[tuple[int, int], float]]] = []
    for rank, record in ranks.items():
        update = record.updates[number]
        scale = update.steps[0].get("scale") or 1.0
        here = {
            (leaf, place): value / scale
            for leaf, found in enumerate(update.used)
            if found is not None
            for place, value in zip(*found, strict=True)
        }
        if not here:
            continue
        whole = sum((record.first("probes") or {}).get("sizes", ()))
        for at, (some, known) in enumerate(parts):
            if len(known) < whole and not known.keys() & here.keys():
                parts[at] = (*some, rank), known | here
                break
        else:
            parts.append(((rank,), here))
    return parts


def _part(
    ranks: Mapping[int, RankRecord],
    number: int,
    some: tuple[int, ...],
    used: Mapping[tuple[int, int], float],
    uses: tuple[Sequence[Use], Sequence[Use]],
    is_low: bool,
) -> PartWeights:
    """Explain a gradient by its window; else with the window before; else with the gradient that was used before.

    Raises ValueError with the reason if it cannot be calculated.
    """
    mine, before = uses
    positions = sorted(used)
    right = np.array([used[position] for position in positions])
    columns = np.array([_column(ranks, use, positions) for use in mine]).T
    if not (np.isfinite(right).all() and np.isfinite(columns).all()):
        raise ValueError("gradients are not finite")
    limit = LOW_EXPLAINED if is_low else EXPLAINED
    found, known, previous = fit(columns, right), list(mine), 0.0
    if found is None:
        raise ValueError(f"{len(mine)} micro-batches are too many for {len(positions)} sampled coordinates")
    if found.residual > limit / 10 and before:
        both = np.column_stack([columns, *(_column(ranks, use, positions) for use in before)])
        with_before = fit(both, right) if np.isfinite(both).all() else None
        if with_before and with_before.residual < min(limit, found.residual / 2):
            found, known = with_before, [*mine, *before]
        elif last := next((known for ranks_before, known in _parts(ranks, number - 1) if ranks_before == some), None):
            column = np.array([last.get(position, 0.0) for position in positions])
            with_last = fit(np.column_stack([columns, column]), right)
            if with_last and with_last.residual < min(limit, found.residual / 2):
                found, previous = with_last, float(with_last.coefficients[-1])
    limits = [step["clip"] for step in ranks[some[0]].updates[number].steps if step.get("clip")]
    factor = max(1.0, limits[0][1] / limits[0][0]) if limits and limits[0][0] else 1.0  # DeepSpeed clips by itself
    largest = float(np.abs(found.coefficients[: len(known)]).max())
    tolerance = LOW_TOLERANCE if is_low else TOLERANCE
    resolved = found.errors[: len(known)] < tolerance * largest
    weights = {
        use: float(c) * factor for use, c, good in zip(known, found.coefficients, resolved, strict=False) if good
    }
    unresolved = sum(1 for use in mine if use not in weights)
    return PartWeights(number, some, weights, found.residual, unresolved, previous)


def _column(ranks: Mapping[int, RankRecord], use: Use, positions: Sequence[tuple[int, int]]) -> list[float]:
    samples: Any = ranks[use[0]].updates[use[1]].micro_batches[use[2]].samples
    return [0.0 if samples[leaf] is None else samples[leaf][place] for leaf, place in positions]
