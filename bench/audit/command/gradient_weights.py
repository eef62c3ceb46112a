"""What each micro-batch weighs in an update's gradient: least squares over coordinates.

The gradient that an optimizer uses of a parameter is y = sum of c_j g_j, with g_j the
micro-gradient that backward j added on some rank, or what was left of an earlier gradient. All are
known at some coordinates, so the c_j are the solution of an overdetermined linear system. Its
residual tells whether y is such a sum at all. The standard error of a coefficient is s
sqrt(((A'A)^-1)_jj) with s^2 = |r|^2 / (m - n) for m coordinates and n columns (Björck, Numerical
Methods for Least Squares Problems, 1996, section 1.1.4); its diagonal has the squared lengths of
the rows of A's pseudo-inverse.

All parameters of an optimizer are solved together first. Where that leaves a residual at one of
them, each is solved by itself, and those with the same coefficients are put together again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.audit.command.recorded_events import RecordedLeaf, RecordedRank, Vector
from bench.audit.command.update_windows import AuditedUpdate, added, left

SINGULAR = 1e-5
"""Columns with smaller relative singular values cannot be told apart in fp32."""
TOLERANCE = 0.02
"""Weights are told apart if they differ by more, relative to the largest."""
ABSENT = 1e-3
"""A smaller weight is 0, relative to the largest, or one that is not larger than some of its
standard errors."""
ERRORS = 10
EXPLAINED = 0.05
"""The largest relative residual of a sum of micro-gradients: that of 256 in bf16 is 0.02, in
fp32 it is near 1e-7."""
SAME = 1e-3
"""A parameter whose residual is smaller has the coefficients of the others; one in bf16 may have
more."""
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

    @property
    def place(self) -> Place:
        return self.rank, self.micro_batch


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
        largest = 0.0
        for found in self.weights:
            largest = max(largest, abs(found.weight))
        return largest

    @property
    def owner(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Whose gradient it is: of which update, ranks and replicas."""
        return self.update, self.gradient_of, self.replicas

    def of_rank(self, rank: int) -> list[Weight]:
        """Of the micro-batches of a rank, in order."""
        return [found for found in self.weights if found.rank == rank]

    def present(self, rank: int) -> list[Weight]:
        """Of those that are in it."""
        return [found for found in self.of_rank(rank) if found.is_present]

    def coefficients(self) -> dict[Place, float]:
        """Of the micro-batches that are in it, by rank and number."""
        coefficients = {}
        for found in self.weights:
            if found.is_present:
                coefficients[found.place] = found.weight
        return coefficients


def updates_with(gradients: Iterable[ExplainedGradient]) -> set[int]:
    """The updates that these gradients are of."""
    return {gradient.update for gradient in gradients}


def largest_residual(gradients: Iterable[ExplainedGradient]) -> float:
    """Of any of these."""
    return max(gradient.residual for gradient in gradients)


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
            self.leave(leaf, residual)

    def leave(self, leaf: str, residual: float) -> None:
        """The gradient of a parameter is no such sum."""
        self.unexplained[leaf] = max(residual, self.unexplained.get(leaf, 0.0))


@dataclass
class _Solution:
    coefficients: dict[Place, float]
    errors: dict[Place, float]
    left: float
    left_error: float

    def weights(self) -> list[Weight]:
        """Those of micro-batches that can be told apart."""
        largest = max(map(abs, self.coefficients.values()), default=0.0)
        weights = []
        for place, weight in sorted(self.coefficients.items()):
            error = self.errors[place]
            if error < TOLERANCE * largest or not largest:
                is_present = abs(weight) > max(ABSENT * largest, ERRORS * error)
                weights.append(Weight(*place, weight, is_present))
        return weights

    @property
    def known_left(self) -> float:
        """The coefficient of what was left; 0 where it is none, or not known."""
        if self.left_error >= TOLERANCE or abs(self.left) <= TOLERANCE:
            return 0.0
        return self.left


@dataclass
class _Equation:
    """What is known of the gradient of one parameter."""

    leaf: str
    holders: tuple[int, ...]
    replicas: tuple[int, ...]
    columns: dict[Place, Vector]
    left: Vector
    right: Vector

    def column(self, place: Place) -> Vector:
        """A micro-gradient; 0 where that backward has not reached the parameter."""
        found = self.columns.get(place)
        if found is None:
            return np.zeros(len(self.right))
        return found

    def block(self, places: Sequence[Place]) -> Vector:
        """The columns of some backwards, and of what was left: [coordinate, column]."""
        return np.column_stack([*map(self.column, places), self.left])

    def residual(self, solution: _Solution) -> float:
        """Relative to the gradient, or to its largest part where that is 0."""
        total = solution.left * self.left
        size = float(np.linalg.norm(self.right))
        for place, coefficient in solution.coefficients.items():
            if place in self.columns:
                part = coefficient * self.columns[place]
                total = total + part
                size = max(size, float(np.linalg.norm(part)))
        if not size:
            return 0.0
        return float(np.linalg.norm(total - self.right)) / size


@dataclass
class _Group:
    """Parameters with the same coefficients."""

    equations: list[_Equation]
    solution: _Solution

    def residuals(self) -> list[float]:
        """Of each parameter."""
        return [equation.residual(self.solution) for equation in self.equations]


def fit(columns: Vector, right: Vector) -> tuple[Vector, Vector, float]:
    """Coefficients, their standard errors, and the relative residual.

    Raises ValueError if there is no fit.

    Columns are scaled to length 1 first: micro-gradients differ in length, and singular values are
    to show directions. A column of zeros, or one that cannot be told apart from others, has an
    infinite error.
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
    share = 0.0
    if size:
        share = float(rest / size)
    return solution / lengths, errors / lengths, share


def explain(
    ranks: Mapping[int, RecordedRank], updates: Mapping[int, AuditedUpdate], optimizer: int
) -> Explained:
    """The gradients of one update on all ranks that make it."""
    found = Explained()
    together: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Equation]] = {}
    for equation in _equations(ranks, updates):
        together.setdefault((equation.holders, equation.replicas), []).append(equation)
    number = next(iter(updates.values())).number
    for equations in together.values():
        try:
            groups = _solve(equations, found)
        except ValueError as error:
            found.reasons.append(str(error))
            continue
        for group in groups:
            found.gradients.append(_gradient(number, optimizer, group, len(equations)))
    return found


def _gradient(update: int, optimizer: int, group: _Group, num_leaves: int) -> ExplainedGradient:
    first, solution = group.equations[0], group.solution
    weights = solution.weights()
    leaves, left_in = [], []
    for equation in group.equations:
        leaves.append(equation.leaf)
        if equation.left.any():
            left_in.append(equation.leaf)
    return ExplainedGradient(
        update,
        optimizer,
        first.holders,
        first.replicas,
        leaves,
        num_leaves,
        weights,
        is_resolved=len(weights) == len(solution.errors),
        residual=max(group.residuals()),
        left=solution.known_left,
        left_in=left_in,
    )


def _equations(
    ranks: Mapping[int, RecordedRank], updates: Mapping[int, AuditedUpdate]
) -> list[_Equation]:
    """One for each parameter and each set of ranks that holds its gradient."""
    places: dict[str, dict[int, int]] = {}
    for rank, update in updates.items():
        for leaf in update.used:
            places.setdefault(ranks[rank].leaves[leaf].name, {})[rank] = leaf
    equations = []
    for name, leaf_of in places.items():
        for replicas in replica_groups(leaves_of(ranks, leaf_of)):
            equations += _of_replicas(name, {rank: leaf_of[rank] for rank in replicas}, updates)
    return equations


def leaves_of(
    ranks: Mapping[int, RecordedRank], numbers: Mapping[int, int]
) -> dict[int, RecordedLeaf]:
    """What each rank says of a parameter, by its number on each of them."""
    return {rank: ranks[rank].leaves[number] for rank, number in numbers.items()}


def replica_groups(leaves: Mapping[int, RecordedLeaf]) -> list[tuple[int, ...]]:
    """Ranks with the same part of a parameter, and the same values in it at the start."""
    groups: list[list[int]] = []
    for rank, leaf in leaves.items():
        for group in groups:
            if _is_replica(leaves[group[0]], leaf):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return list(map(tuple, groups))


def _is_replica(first: RecordedLeaf, second: RecordedLeaf) -> bool:
    if first.shape != second.shape or first.part != second.part:
        return False
    if first.start is None or second.start is None:
        return True
    return bool(np.allclose(first.start, second.start, rtol=1e-5, atol=1e-8, equal_nan=True))


def _of_replicas(
    name: str, leaf_of: Mapping[int, int], updates: Mapping[int, AuditedUpdate]
) -> list[_Equation]:
    columns: dict[Place, Vector] = {}
    used: dict[int, Vector] = {}
    for rank, leaf in leaf_of.items():
        used[rank] = updates[rank].used[leaf]
        for number, backward in enumerate(updates[rank].backwards):
            values = added(backward, leaf)
            if values is not None and np.isfinite(values).all():
                columns[rank, number] = values
    equations = []
    for holders, right in _shards(used).items():
        known = ~np.isnan(right)
        rest = np.zeros(len(right))
        for rank in holders:
            rest += _left_in(updates[rank], leaf_of[rank], len(right))
        here = {place: column[known] for place, column in columns.items()}
        equations.append(_Equation(name, holders, tuple(leaf_of), here, rest[known], right[known]))
    return equations


def _left_in(update: AuditedUpdate, leaf: int, size: int) -> Vector:
    """What was left in the gradient of a leaf when the window began; 0 where that is not known."""
    rest = np.zeros(size)
    for backward in update.backwards:
        values = left(backward, leaf)
        if values is not None:
            rest += np.nan_to_num(values)
    return rest


def _shards(used: Mapping[int, Vector]) -> dict[tuple[int, ...], Vector]:
    """The gradient of a parameter: of ranks with shards together, of replicas apart."""
    found: dict[tuple[int, ...], Vector] = {}
    for rank, values in used.items():
        is_here = ~np.isnan(values)
        if not is_here.any():
            continue
        others: tuple[int, ...] = ()
        for holders, known in found.items():
            if np.isnan(known[is_here]).all():
                others = holders
                break
        before = found.pop(others, np.full(len(values), np.nan))
        found[*others, rank] = np.where(is_here, values, before)
    return found


def _solve(equations: list[_Equation], found: Explained) -> list[_Group]:
    """All parameters together, or groups that differ."""
    everything = _Group(equations, _together(equations))
    residuals = everything.residuals()
    limit = max(SAME, 20 * float(np.median(residuals)))
    if max(residuals) <= min(limit, EXPLAINED):
        return [everything]
    return _apart(equations, found)


def _apart(equations: Sequence[_Equation], found: Explained) -> list[_Group]:
    """Each parameter is solved by itself, the largest first.

    Others that the solution explains join it.
    """
    groups: list[_Group] = []
    waiting: list[_Equation] = []
    for equation in sorted(equations, key=lambda equation: -len(equation.right)):
        if _join(equation, groups):
            continue
        try:
            solution = _together([equation])
        except ValueError:
            waiting.append(equation)
            continue
        residual = equation.residual(solution)
        if residual > EXPLAINED:
            found.leave(equation.leaf, residual)
        else:
            groups.append(_Group([equation], solution))
    for equation in waiting:
        _join_nearest(equation, groups, found)
    for group in groups:
        group.solution = _together(group.equations)
    return groups


def _join(equation: _Equation, groups: Sequence[_Group]) -> bool:
    """Add a parameter to the first group whose coefficients it has."""
    for group in groups:
        if equation.residual(group.solution) <= SAME:
            group.equations.append(equation)
            return True
    return False


def _join_nearest(equation: _Equation, groups: Sequence[_Group], found: Explained) -> None:
    """Of a parameter with too few coordinates."""
    if not groups:
        return
    nearest = min(groups, key=lambda group: equation.residual(group.solution))
    residual = equation.residual(nearest.solution)
    if residual <= EXPLAINED:
        nearest.equations.append(equation)
    else:
        found.leave(equation.leaf, residual)


def _together(equations: Sequence[_Equation]) -> _Solution:
    """Least squares over all of these.

    Micro-gradients that are the same on several ranks are one column.
    """
    places: set[Place] = set()
    for equation in equations:
        places.update(equation.columns)
    kept = _without_copies(equations, sorted(places))
    if not kept:
        raise ValueError("no backward has added to the gradient that the optimizer uses")
    blocks, rights = [], []
    for equation in equations:
        blocks.append(equation.block(kept))
        rights.append(equation.right)
    columns = np.concatenate(blocks)
    values, errors, _ = fit(columns, np.concatenate(rights))
    solution = _Solution(
        dict(zip(kept, values.tolist(), strict=False)),
        dict(zip(kept, errors.tolist(), strict=False)),
        left=0.0,
        left_error=0.0,
    )
    if columns[:, -1].any():
        solution.left, solution.left_error = float(values[-1]), float(errors[-1])
    return solution


def _without_copies(equations: Sequence[_Equation], places: Sequence[Place]) -> list[Place]:
    """Without micro-gradients that another rank has, too, as replicas of tensor parallelism do."""
    kept: dict[Place, Vector] = {}
    for place in places:
        vector = np.concatenate([equation.column(place) for equation in equations])
        if not _is_copy(place, vector, kept):
            kept[place] = vector
    return list(kept)


def _is_copy(place: Place, vector: Vector, kept: Mapping[Place, Vector]) -> bool:
    """Whether an earlier rank has the same micro-gradient at the same backward."""
    length = np.linalg.norm(vector)
    if not length:
        return False
    for (rank, backward), other in kept.items():
        is_earlier = rank < place[0] and backward == place[1]
        if is_earlier and np.linalg.norm(vector - other) <= COPY * length:
            return True
    return False
