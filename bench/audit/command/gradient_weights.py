"""What each micro-batch weighs in the gradient of each update, by least squares over sampled coordinates.

The gradient that an optimizer uses is y = sum of c_j g_j, with g_j the micro-gradient that backward j added on some
rank, or what was left of an earlier gradient. All are known at some coordinates, so the c_j are the solution of an
overdetermined linear system. Its residual tells whether y is such a sum at all. The standard error of a coefficient is
s sqrt(((A'A)^-1)_jj) with s^2 = |r|^2 / (m - n) for m coordinates and n columns (Björck, Numerical Methods for Least
Squares Problems, 1996, section 1.1.4); its diagonal has the squared lengths of the rows of A's pseudo-inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.audit.command.inside.records import AuditedUpdate, Rank

SINGULAR = 1e-5
"""Columns with smaller relative singular values cannot be told apart in fp32."""
TOLERANCE = 0.02
"""Weights are told apart if they differ by more, relative to the largest."""
EXPLAINED = 0.05
"""The largest relative residual of a sum of micro-gradients: that of 256 in bf16 is 0.02, in fp32 it is near 1e-7."""
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Weight:
    """What a micro-batch weighs in a gradient; rank and micro-batch are numbers from 0."""

    rank: int
    micro_batch: int
    weight: float
    loss_weight: float | None
    """The same of the mean of its loss; None if the number of terms is not visible."""
    terms: float | None
    is_present: bool
    """Whether the weight is not 0."""


@dataclass(frozen=True)
class ExplainedGradient:
    """The gradient of an update, numbered from 0, as a sum."""

    update: int
    gradient_of: tuple[int, ...]
    """Ranks that have this gradient: alone, or together by shards."""
    weights: list[Weight]
    """Of the micro-batches that can be told apart."""
    is_resolved: bool
    """Whether all can."""
    residual: float
    has_left: bool
    """Whether it contains what was left of an earlier gradient."""


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
    if rows < count + 1:
        raise ValueError(f"{count - 1} micro-batches are too many for {rows} sampled coordinates")
    lengths = np.linalg.norm(columns, axis=0)
    lengths[lengths == 0] = 1.0
    scaled = columns / lengths
    inverse = np.linalg.pinv(scaled, rcond=SINGULAR)
    solution = inverse @ right
    rest = np.linalg.norm(scaled @ solution - right)
    errors = np.linalg.norm(inverse, axis=1) * rest / (rows - count) ** 0.5
    errors[np.diag(inverse @ scaled) < 1 - 1e-6] = np.inf
    return solution / lengths, errors / lengths, float(rest / np.linalg.norm(right))


def flat(leaves: Any) -> Vector:
    """The values of all leaves at their coordinates."""
    return np.concatenate([np.empty(0), *leaves])


def explain(ranks: Mapping[int, Rank]) -> tuple[list[ExplainedGradient], str]:
    """The gradients of sampled updates that all ranks made, and why there may be none."""
    explained, reason = [], "no gradient that the optimizer used was found"
    for number, sampled in enumerate(zip(*(rank.sampled for rank in ranks.values()), strict=False)):
        updates = dict(zip(ranks, sampled, strict=True))
        batches = [(rank, i, batch) for rank in ranks for i, batch in enumerate(updates[rank].micro_batches)]
        for some, used in _gradients(updates).items():
            known = ~np.isnan(used)
            try:
                left = np.sum([np.nan_to_num(flat(updates[rank].left)) for rank in some], axis=0)
                columns = np.column_stack([*(flat(batch.sample) for _, _, batch in batches), left])
                coefficients, errors, residual = fit(columns[known], used[known])
            except ValueError as error:
                reason = str(error)
                continue
            least = TOLERANCE * float(np.abs(coefficients[:-1]).max())
            good = errors < least
            weights = [
                Weight(rank, i, c, batch.loss_weight(c), batch.criterion.get("terms"), abs(c) > least)
                for (rank, i, batch), c, is_good in zip(batches, coefficients.tolist(), good, strict=False)
                if is_good
            ]
            has_left = bool(good[-1] and abs(coefficients[-1]) > TOLERANCE)
            explained.append(ExplainedGradient(number, some, weights, bool(good[:-1].all()), residual, has_left))
    return explained, reason


def _gradients(updates: Mapping[int, AuditedUpdate]) -> dict[tuple[int, ...], Vector]:
    """The gradient of an update: of ranks with shards together, of replicas apart."""
    found: dict[tuple[int, ...], Vector] = {}
    for rank, update in updates.items():
        used = flat(update.used)
        is_here = ~np.isnan(used)
        others = next((some for some, known in found.items() if np.isnan(known[is_here]).all()), ())
        if is_here.any():
            found[*others, rank] = np.where(is_here, used, found.pop(others, np.nan))
    return found
