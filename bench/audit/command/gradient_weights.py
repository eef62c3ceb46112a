"""What each micro-batch weighs in the gradient of each update, by least squares over sampled coordinates.

The gradient that an optimizer uses of a parameter is y = sum of c_j g_j, with g_j the micro-gradient that backward j
added on some rank, or what was left of an earlier gradient. All are known at some coordinates, so the c_j are the
solution of an overdetermined linear system. Its residual tells whether y is such a sum at all. The standard error of a
coefficient is s sqrt(((A'A)^-1)_jj) with s^2 = |r|^2 / (m - n) for m coordinates and n columns (Björck, Numerical
Methods for Least Squares Problems, 1996, section 1.1.4); its diagonal has the squared lengths of the rows of A's
pseudo-inverse.

All parameters of an optimizer are solved together first. Where that leaves a residual at one of them, each is solved
by itself, and those with the same coefficients are put together again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.audit.command.inside.records import Leaf, Rank
from bench.audit.command.update_windows import AuditedUpdate, Vector, added, left

SINGULAR = 1e-5
"""Columns with smaller relative singular values cannot be told apart in fp32."""
TOLERANCE = 0.02
"""Weights are told apart if they differ by more, relative to the largest."""
ABSENT = 1e-3
"""A smaller weight is 0, relative to the largest, or one that is not larger than some of its standard errors."""
ERRORS = 10
EXPLAINED = 0.05
"""The largest relative residual of a sum of micro-gradients: that of 256 in bf16 is 0.02, in fp32 it is near 1e-7."""
SAME = 1e-3
"""A parameter whose residual is smaller has the coefficients of the others; one in bf16 may have more."""
COPY = 1e-5
"""Micro-gradients of two ranks that differ by less, relative to their length, are the same."""
Place = tuple[int, int]
"""Rank and backward, from 0."""


@dataclass(frozen=True)
class Weight:
    """The coefficient of a micro-gradient."""

    rank: int
    micro_batch: int
    weight: float
    is_present: bool
    """Whether it is not 0."""


@dataclass
class ExplainedGradient:
    """The gradient of an update, or of some of its parameters, as a sum."""

    update: int
    optimizer: int
    gradient_of: tuple[int, ...]
    """Ranks that have this gradient: alone, or together by shards."""
    replicas: tuple[int, ...]
    """Ranks with the same parameters, whose micro-batches may be in it."""
    leaves: list[str]
    num_leaves: int
    """Of the parameters that were sampled of this optimizer on these ranks."""
    weights: list[Weight]
    """Of the micro-batches that can be told apart."""
    is_resolved: bool
    """Whether all can."""
    residual: float
    left: float
    """The coefficient of what was left of an earlier gradient; 0 if there was nothing."""
    left_in: list[str]
    """Parameters in which something was left."""

    @property
    def level(self) -> float:
        """The largest weight."""
        return max((abs(found.weight) for found in self.weights), default=0.0)


@dataclass
class Explained:
    """The gradients of an optimizer's updates, and what could not be explained."""

    gradients: list[ExplainedGradient] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Why there may be none."""
    unexplained: dict[str, float] = field(default_factory=dict)
    """By parameter the largest residual of a gradient that is no such sum."""

    def add(self, other: Explained) -> None:
        """Those of another update."""
        self.gradients += other.gradients
        self.reasons += other.reasons
        for leaf, residual in other.unexplained.items():
            self.unexplained[leaf] = max(residual, self.unexplained.get(leaf, 0.0))


@dataclass
class _Equation:
    """What is known of the gradient of one parameter."""

    leaf: str
    holders: tuple[int, ...]
    replicas: tuple[int, ...]
    columns: dict[Place, Vector]
    left: Vector
    right: Vector


@dataclass
class _Solution:
    coefficients: dict[Place, float]
    errors: dict[Place, float]
    left: float
    left_error: float


def fit(columns: Vector, right: Vector) -> tuple[Vector, Vector, float]:
    """Coefficients, their standard errors, and the relative residual. Raises ValueError if there is no fit.

    Columns are scaled to length 1 first: micro-gradients differ in length, and singular values are to show directions.
    A column of zeros, or one that cannot be told apart from others, has an infinite error.
    """
    if not (np.isfinite(right).all() and np.isfinite(columns).all()):
        raise ValueError("gradients are not finite")
    if not columns.any():
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
    size = np.linalg.norm(right)
    return solution / lengths, errors / lengths, float(rest / size) if size else 0.0


def explain(
    ranks: Mapping[int, Rank], updates: Mapping[int, AuditedUpdate], optimizer: int
) -> Explained:
    """The gradients of one update on all ranks that make it."""
    found = Explained()
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Equation]] = {}
    for equation in _equations(ranks, updates):
        groups.setdefault((equation.holders, equation.replicas), []).append(equation)
    number = next(iter(updates.values())).number
    for (holders, replicas), equations in groups.items():
        try:
            solved = _solve(equations, found)
        except ValueError as error:
            found.reasons.append(str(error))
            continue
        lefts = {equation.leaf for equation in equations if equation.left.any()}
        for leaves, solution, residual in solved:
            gradient = _gradient(number, optimizer, (holders, replicas), leaves, solution)
            gradient.residual, gradient.num_leaves = residual, len(equations)
            gradient.left_in = [leaf for leaf in leaves if leaf in lefts]
            found.gradients.append(gradient)
    return found


def _gradient(
    update: int,
    optimizer: int,
    ranks: tuple[tuple[int, ...], tuple[int, ...]],
    leaves: list[str],
    solution: _Solution,
) -> ExplainedGradient:
    largest = max(map(abs, solution.coefficients.values()), default=0.0)
    weights = []
    for place in sorted(solution.coefficients):
        error = solution.errors[place]
        if error < TOLERANCE * largest or not largest:
            weight = solution.coefficients[place]
            is_present = abs(weight) > max(ABSENT * largest, ERRORS * error)
            weights.append(Weight(*place, weight, is_present))
    left = solution.left
    if solution.left_error >= TOLERANCE or abs(left) <= TOLERANCE:
        left = 0.0
    is_resolved = len(weights) == len(solution.errors)
    holders, replicas = ranks
    return ExplainedGradient(
        update, optimizer, holders, replicas, leaves, 0, weights, is_resolved, 0.0, left, []
    )


def _equations(ranks: Mapping[int, Rank], updates: Mapping[int, AuditedUpdate]) -> list[_Equation]:
    """One for each parameter and each set of ranks that holds its gradient."""
    places: dict[str, dict[int, int]] = {}
    for rank, update in updates.items():
        for leaf in update.used:
            places.setdefault(ranks[rank].leaves[leaf].name, {})[rank] = leaf
    equations = []
    for name, leaf_of in places.items():
        for replicas in replica_groups(
            {rank: ranks[rank].leaves[leaf] for rank, leaf in leaf_of.items()}
        ):
            equations += _of_replicas(name, {rank: leaf_of[rank] for rank in replicas}, updates)
    return equations


def replica_groups(leaves: Mapping[int, Leaf]) -> list[tuple[int, ...]]:
    """Ranks with the same part of a parameter, and the same values in it when the training began."""
    groups: list[list[int]] = []
    for rank, leaf in leaves.items():
        for group in groups:
            if _is_replica(leaves[group[0]], leaf):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return [tuple(group) for group in groups]


def _is_replica(first: Leaf, second: Leaf) -> bool:
    if tuple(first.shape) != tuple(second.shape) or first.part != second.part:
        return False
    if first.start is None or second.start is None:
        return True
    return bool(np.allclose(first.start, second.start, rtol=1e-5, atol=1e-8, equal_nan=True))


def _of_replicas(
    name: str, leaf_of: Mapping[int, int], updates: Mapping[int, AuditedUpdate]
) -> list[_Equation]:
    used = {rank: updates[rank].used[leaf] for rank, leaf in leaf_of.items()}
    size = max(len(values) for values in used.values())
    columns: dict[Place, Vector] = {}
    for rank, leaf in leaf_of.items():
        for number, backward in enumerate(updates[rank].backwards):
            values = added(backward, leaf)
            if values is not None and np.isfinite(values).all():
                columns[rank, number] = np.array(values)
    equations = []
    for holders, right in _shards(used).items():
        known = ~np.isnan(right)
        rest = np.zeros(size)
        for rank in holders:
            for backward in updates[rank].backwards:
                values = left(backward, leaf_of[rank])
                if values is not None:
                    rest += np.nan_to_num(np.array(values, dtype=float))
        here = {place: column[known] for place, column in columns.items()}
        equations.append(_Equation(name, holders, tuple(leaf_of), here, rest[known], right[known]))
    return equations


def _shards(used: Mapping[int, Vector]) -> dict[tuple[int, ...], Vector]:
    """The gradient of a parameter: of ranks with shards together, of replicas apart."""
    found: dict[tuple[int, ...], Vector] = {}
    for rank, values in used.items():
        is_here = ~np.isnan(values)
        if not is_here.any():
            continue
        others = next((some for some, known in found.items() if np.isnan(known[is_here]).all()), ())
        before = found.pop(others, np.full(len(values), np.nan))
        found[*others, rank] = np.where(is_here, values, before)
    return found


def _solve(
    equations: Sequence[_Equation], found: Explained
) -> list[tuple[list[str], _Solution, float]]:
    """Parameters, solution and residual: of all parameters together, or of groups that differ."""
    solution = _together(equations)
    residuals = [_residual(equation, solution) for equation in equations]
    usual = float(np.median(residuals))
    limit = max(SAME, 20 * usual)
    if max(residuals) <= min(limit, EXPLAINED):
        return [([equation.leaf for equation in equations], solution, max(residuals))]
    return _apart(equations, found)


def _apart(
    equations: Sequence[_Equation], found: Explained
) -> list[tuple[list[str], _Solution, float]]:
    """Each parameter is solved by itself, the largest first; others that the solution explains join it."""
    groups: list[tuple[list[_Equation], _Solution]] = []
    waiting: list[_Equation] = []
    for equation in sorted(equations, key=lambda equation: -len(equation.right)):
        for members, solution in groups:
            if _residual(equation, solution) <= SAME:
                members.append(equation)
                break
        else:
            try:
                solution = _together([equation])
            except ValueError:
                waiting.append(equation)
                continue
            residual = _residual(equation, solution)
            if residual > EXPLAINED:
                found.unexplained[equation.leaf] = max(
                    residual, found.unexplained.get(equation.leaf, 0.0)
                )
            else:
                groups.append(([equation], solution))
    for equation in waiting:
        near = sorted(groups, key=lambda group: _residual(equation, group[1]))
        if near and _residual(equation, near[0][1]) <= EXPLAINED:
            near[0][0].append(equation)
        elif near:
            found.unexplained[equation.leaf] = _residual(equation, near[0][1])
    merged: list[tuple[list[str], _Solution, float]] = []
    for members, _ in groups:
        again = _together(members)
        merged.append(
            (
                [member.leaf for member in members],
                again,
                max(_residual(member, again) for member in members),
            )
        )
    return merged


def _together(equations: Sequence[_Equation]) -> _Solution:
    """Least squares over all of these. Micro-gradients that are the same on several ranks are one column."""
    places = sorted({place for equation in equations for place in equation.columns})
    copies = _copies(equations, places)
    kept = [place for place in places if place not in copies]
    if not kept:
        raise ValueError("no backward has added to the gradient that the optimizer uses")
    blocks = []
    for equation in equations:
        zero = np.zeros(len(equation.right))
        blocks.append(
            np.column_stack([*(equation.columns.get(place, zero) for place in kept), equation.left])
        )
    columns = np.concatenate(blocks)
    right = np.concatenate([equation.right for equation in equations])
    values, errors, _ = fit(columns, right)
    has_left = bool(columns[:, -1].any())
    return _Solution(
        dict(zip(kept, values.tolist(), strict=False)),
        dict(zip(kept, errors.tolist(), strict=False)),
        float(values[-1]) if has_left else 0.0,
        float(errors[-1]) if has_left else 0.0,
    )


def _copies(equations: Sequence[_Equation], places: Sequence[Place]) -> set[Place]:
    """Micro-gradients that another rank has, too, as replicas of tensor parallelism do."""
    vectors = {}
    for place in places:
        columns = [
            equation.columns.get(place, np.zeros(len(equation.right))) for equation in equations
        ]
        vectors[place] = np.concatenate(columns)
    copies: set[Place] = set()
    for place in places:
        length = np.linalg.norm(vectors[place])
        for other in places:
            is_earlier = other[0] < place[0] and other[1] == place[1] and other not in copies
            if (
                is_earlier
                and length
                and np.linalg.norm(vectors[place] - vectors[other]) <= COPY * length
            ):
                copies.add(place)
                break
    return copies


def _residual(equation: _Equation, solution: _Solution) -> float:
    """Relative to the gradient, or to its largest part where that is 0."""
    parts = [
        coefficient * equation.columns[place]
        for place, coefficient in solution.coefficients.items()
        if place in equation.columns
    ]
    total = np.sum([*parts, solution.left * equation.left], axis=0)
    size = max([np.linalg.norm(equation.right), *(np.linalg.norm(part) for part in parts)])
    return float(np.linalg.norm(total - equation.right) / size) if size else 0.0
