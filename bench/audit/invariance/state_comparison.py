"""What differs between two runs of a training, tensor by tensor: bitwise equal, equal to rounding, or different."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from bench.audit.invariance import rounding_bounds as bounds
from bench.audit.invariance.inside.state_records import (
    BUCKETS,
    BUFFER,
    CLIPPED,
    COORDINATES,
    COPY,
    GRADIENT,
    PARAMETER,
)
from bench.audit.invariance.split_runs import RankState, SplitRun, TensorSketch

OF_SKETCH = 1.5
"""A sketch estimates the norm of a difference within so much."""
SMALL = 0.01
"""A tensor whose elements are smaller than this share of the largest gradients' is compared with that share."""
CLEAR = 10.0
"""Elements of a gradient that are so many times as large as its rounding differs decide where a parameter moves."""
LEAST_CLEAR = 8
"""Such elements that are needed."""
OF_BUFFERS = 0.02
"""Buffers may count what rounding decides, such as the tokens of an expert."""
COLLINEAR = 0.02
"""A factor leaves at most this share of a tensor unexplained."""


class Likeness(StrEnum):
    """How two tensors compare, the closest first."""

    BITWISE = "bitwise"
    ROUNDED = "equal to rounding"
    UNCLEAR = "not judged"
    """Different, but within what rounding may do to it."""
    DIFFERENT = "different"


@dataclass(frozen=True)
class TensorPair:
    """One tensor in both runs."""

    update: int
    kind: str
    name: str
    rank: int
    likeness: Likeness
    relative: float = 0.0
    """The norm of the difference, as a share of that of the larger tensor, or of its change."""
    scaled: float = 0.0
    """The same, where a tensor with small elements is compared with those of its module, or of all."""
    factor: float | None = None
    """What the tensor of the other run is multiplied by, where that is all."""
    bound: float = 0.0


@dataclass
class SplitComparison:
    """The common updates of two runs."""

    first: SplitRun
    other: SplitRun
    updates: int
    """Updates that are compared: both have made them, with the same samples."""
    floor: float = 0.0
    """What two runs of one command differ by."""
    pairs: list[TensorPair] = field(default_factory=list)
    moved: dict[int, float] = field(default_factory=dict)
    """By update how far the parameters are apart, as a share of their changes."""
    bound: float = 0.0
    """Of the gradients of the first update."""

    def __post_init__(self) -> None:
        dtypes = {
            dtype
            for run in (self.first, self.other)
            for rank in run.ranks.values()
            for micro_batch in rank.micro_batches
            for dtype in micro_batch.dtypes
        }
        self.bound = max(bounds.of_gradients(dtypes), 3 * self.floor)
        for update in range(1, self.updates + 1):
            self.pairs += list(self._of_update(update))

    @property
    def ranks(self) -> list[int]:
        return sorted(self.first.ranks.keys() & self.other.ranks.keys())

    def different(self) -> list[TensorPair]:
        return [pair for pair in self.pairs if pair.likeness is Likeness.DIFFERENT]

    @property
    def likeness(self) -> Likeness:
        """Of the pair that is least alike, of those that are judged."""
        order = list(Likeness)
        judged = [pair.likeness for pair in self.pairs if pair.likeness is not Likeness.UNCLEAR]
        return max(judged, key=order.index, default=Likeness.UNCLEAR)

    def largest(self) -> float:
        """The largest relative difference of gradients in the first update, of those that are judged."""
        found = [
            pair.scaled
            for pair in self.pairs
            if pair.update == 1
            and pair.kind in (GRADIENT, CLIPPED)
            and pair.likeness is not Likeness.UNCLEAR
        ]
        return max(found, default=0.0)

    def _of_update(self, update: int) -> Iterator[TensorPair]:
        allowed = self.bound
        if update > 1:
            allowed = bounds.of_later_gradients(self.bound, self.moved.get(update - 1, 0.0))
        apart, changed = 0.0, 0.0
        for rank in self.ranks:
            mine, others = self.first.ranks[rank], self.other.ranks[rank]
            gradients: dict[str, TensorPair] = {}
            for kind in _kinds(mine, others, update):
                pairs = self._of_kind(update, kind, rank, allowed, gradients)
                if kind in (GRADIENT, CLIPPED):
                    gradients |= {pair.name: pair for pair in pairs}
                yield from pairs
            difference, change = _total(mine, others, update)
            apart, changed = apart + difference**2, changed + change**2
        if changed:
            self.moved[update] = math.sqrt(apart / changed)

    def _of_kind(
        self,
        update: int,
        kind: str,
        rank: int,
        allowed: float,
        gradients: dict[str, TensorPair],
    ) -> list[TensorPair]:
        mine, others = self.first.ranks[rank], self.other.ranks[rank]
        first, other = mine.tensors.get((update, kind), {}), others.tensors.get((update, kind), {})
        names = [name for name in first if name in other and first[name].size == other[name].size]
        found = []
        scales = _Scales([*first.items(), *other.items()])
        for name in names:
            pair = TensorPair(update, kind, name, rank, Likeness.BITWISE)
            if first[name].is_bitwise(other[name]):
                found.append(pair)
            elif kind in (PARAMETER, COPY):
                gradient = gradients.get(name) or gradients.get(f"{name} (part)")
                found.append(self._of_change(pair, allowed, gradient))
            else:
                found.append(_of_value(pair, first[name], other[name], allowed, scales.of(name)))
        return found

    def _of_change(
        self, pair: TensorPair, allowed: float, gradient: TensorPair | None
    ) -> TensorPair:
        """A parameter, or a copy: what it has changed by since the update before."""
        update, kind, name = pair.update, pair.kind, pair.name
        mine, others = self.first.ranks[pair.rank], self.other.ranks[pair.rank]
        before = mine.tensors.get((update - 1, kind), {}).get(name)
        other_before = others.tensors.get((update - 1, kind), {}).get(name)
        first, other = mine.tensors[update, kind][name], others.tensors[update, kind][name]
        if before is None or other_before is None or before.size != first.size:
            before = other_before = TensorSketch(0, "", 0, np.zeros_like(first.values))
        change, other_change = first.values - before.values, other.values - other_before.values
        size = max(_norm(change, first.size), _norm(other_change, first.size))
        difference = _norm(other_change - change, first.size)
        stored = bounds.STORED * bounds.unit([first.dtype]) * max(first.norm, other.norm)
        relative = difference / size if size else 0.0
        factor = _factor(
            change, other_change, first.size, max(allowed, bounds.STORED * stored / (size or 1))
        )
        tolerance = max(bounds.STEP, allowed)
        clear = self._clear(pair, gradient)
        if clear is not None and kind == PARAMETER:
            parts = change[clear], other_change[clear]
            largest = max(float(np.linalg.norm(part)) for part in parts)
            apart = float(np.linalg.norm(parts[1] - parts[0]))
            stored *= math.sqrt(len(clear) / first.size)
            is_near = apart <= tolerance * largest + stored
        else:
            noise = allowed if gradient is None else max(gradient.relative, self.bound)
            tolerance = bounds.of_changes(max(tolerance, bounds.UNSTABLE), noise)
            is_near = difference <= OF_SKETCH * (tolerance * size + stored)
        likeness = Likeness.DIFFERENT
        if is_near:
            likeness = Likeness.ROUNDED
        elif tolerance >= bounds.LIMIT and factor is None:
            likeness = Likeness.UNCLEAR
        if is_near:
            factor = None
        return TensorPair(
            update, kind, name, pair.rank, likeness, relative, relative, factor, tolerance
        )

    def _clear(self, pair: TensorPair, gradient: TensorPair | None) -> np.ndarray | None:
        """Places of kept elements whose gradient is far above rounding; None if these are too few."""
        if gradient is None or gradient.likeness is Likeness.DIFFERENT:
            return None
        if gradient.name != pair.name:  # another part of it
            return None
        first = self.first.ranks[pair.rank].tensors[pair.update, gradient.kind][pair.name]
        count = min(first.size, COORDINATES)
        places = np.arange(1 + BUCKETS, 1 + BUCKETS + count)
        noise = max(gradient.relative, bounds.unit([first.dtype])) * first.norm
        typical = noise / math.sqrt(first.size)
        clear = places[np.abs(first.values[places]) > CLEAR * typical]
        return clear if len(clear) >= LEAST_CLEAR else None


class _Scales:
    """Sizes with which differences are compared: of a tensor's elements, those of its module, and of all."""

    def __init__(self, items: Iterable[tuple[str, TensorSketch]]) -> None:
        self._modules: dict[str, float] = {}
        every = []
        for name, found in items:
            if not found.size:
                continue
            element = found.norm / math.sqrt(found.size)
            module = name.rpartition(".")[0]
            self._modules[module] = max(self._modules.get(module, 0.0), element)
            every.append(element)
        self._floor = SMALL * max(every, default=0.0)

    def of(self, name: str) -> float:
        """The size of an element below which a tensor's is small."""
        return max(self._modules.get(name.rpartition(".")[0], 0.0), self._floor)


def _of_value(
    pair: TensorPair, first: TensorSketch, other: TensorSketch, allowed: float, element: float
) -> TensorPair:
    """Gradients, states of optimizers and buffers, whose values are compared."""
    is_exact = first.dtype not in bounds.UNITS
    norm = max(first.norm, other.norm)
    difference = _norm(other.values - first.values, first.size)
    relative = difference / norm if norm else 0.0
    factor = _factor(first.values, other.values, first.size, allowed)
    tolerance = max(allowed, math.sqrt(2) * bounds.unit([first.dtype]))
    size = norm
    if pair.kind == BUFFER:
        tolerance += OF_BUFFERS
    elif pair.kind in (GRADIENT, CLIPPED):
        size = max(norm, element * math.sqrt(first.size))
    elif pair.kind in bounds.LINEAR:
        tolerance *= 3
        size = max(norm, element * math.sqrt(first.size))
    else:
        tolerance = max(tolerance, bounds.UNSTABLE)
    likeness = Likeness.DIFFERENT
    if (is_exact and pair.kind != BUFFER) or not math.isfinite(difference):
        likeness = Likeness.UNCLEAR
    elif difference <= OF_SKETCH * tolerance * size:
        likeness = Likeness.ROUNDED
        factor = None
    elif tolerance >= bounds.LIMIT and factor is None:
        likeness = Likeness.UNCLEAR
    scaled = difference / size if size else 0.0
    return TensorPair(
        pair.update, pair.kind, pair.name, pair.rank, likeness, relative, scaled, factor, tolerance
    )


def _norm(values: np.ndarray, size: int) -> float:
    """The norm of the tensor that a difference of sketches belongs to; exact if all elements are kept."""
    if size <= COORDINATES:
        return float(np.linalg.norm(values[1 + BUCKETS : 1 + BUCKETS + size]))
    return float(np.linalg.norm(values[1 : 1 + BUCKETS]))


def _factor(first: np.ndarray, other: np.ndarray, size: int, allowed: float) -> float | None:
    """What ``first`` is multiplied by to be ``other``; None if that is not all, or if it is 1."""
    if size < 2:
        return None
    sums = slice(1, 1 + BUCKETS)
    if size <= COORDINATES:
        sums = slice(1 + BUCKETS, 1 + BUCKETS + size)
    a, b = first[sums], other[sums]
    square = float(a @ a)
    if not square or not np.isfinite(b).all():
        return None
    factor = float(a @ b) / square
    rest = float(np.linalg.norm(b - factor * a))
    unexplained = max(3 * allowed, 1e-4)
    if rest > min(unexplained, COLLINEAR) * float(np.linalg.norm(b)):
        return None
    if abs(factor - 1) < max(0.02, 10 * allowed):
        return None
    return factor


def _kinds(first: RankState, other: RankState, update: int) -> list[str]:
    """Kinds that both have in an update, in the order in which one follows from the other."""
    mine = {kind for at, kind in first.tensors if at == update}
    both = mine & {kind for at, kind in other.tensors if at == update}
    order = [GRADIENT, CLIPPED]
    last = [BUFFER, PARAMETER, COPY]
    states = sorted(both - {*order, *last})
    return [kind for kind in [*order, *states, *last] if kind in both]


def _total(first: RankState, other: RankState, update: int) -> tuple[float, float]:
    """The norm by which all parameters differ after an update, and that of their changes since the start."""
    start = first.tensors.get((0, PARAMETER), {})
    mine, others = (rank.tensors.get((update, PARAMETER), {}) for rank in (first, other))
    apart = changed = 0.0
    for name, begin in start.items():
        if name in mine and name in others:
            change = mine[name].values - begin.values
            difference = others[name].values - mine[name].values
            apart += _norm(difference, begin.size) ** 2
            changed += _norm(change, begin.size) ** 2
    return math.sqrt(apart), math.sqrt(changed)
