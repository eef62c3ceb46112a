"""What differs between two runs of a training, tensor by tensor.

A tensor is bitwise equal, equal to rounding, or different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

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
from bench.audit.invariance.split_runs import RankState, SplitRun, TensorSketch, Values

OF_SKETCH = 1.5
"""A sketch estimates the norm of a difference within so much."""
SMALL = 0.01
"""A tensor whose elements are smaller than this share of the largest gradients' is compared with
that share."""
CLEAR = 10.0
"""Elements of a gradient that are so many times as large as its rounding differs decide where a
parameter moves."""
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
    """The same, where a tensor with small elements is compared with those of its module, or of
    all."""
    factor: float | None = None
    """What the tensor of the other run is multiplied by, where that is all."""
    bound: float = 0.0

    @property
    def is_gradient(self) -> bool:
        return self.kind in (GRADIENT, CLIPPED)

    @property
    def is_judged(self) -> bool:
        return self.likeness is not Likeness.UNCLEAR


class Change(NamedTuple):
    """What an update has changed a tensor by in both runs."""

    first: Values
    other: Values
    size: int
    """Elements of the tensor."""


class Moved(NamedTuple):
    """Norms over all parameters of a rank."""

    apart: float
    """Of what they differ by between two runs, after an update."""
    changed: float
    """Of what they have changed by since the start."""


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
        dtypes: set[str] = set()
        for run in (self.first, self.other):
            for micro_batch in run.micro_batches():
                dtypes.update(micro_batch.dtypes)
        self.bound = max(bounds.of_gradients(dtypes), 3 * self.floor)
        for update in range(1, self.updates + 1):
            self.pairs += self._of_update(update)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.first.ranks.keys() & self.other.ranks.keys())

    def different(self) -> list[TensorPair]:
        return [pair for pair in self.pairs if pair.likeness is Likeness.DIFFERENT]

    @property
    def likeness(self) -> Likeness:
        """Of the pair that is least alike; one that is not judged counts where none is rounded."""
        found = {pair.likeness for pair in self.pairs}
        for likeness in (Likeness.DIFFERENT, Likeness.ROUNDED, Likeness.UNCLEAR):
            if likeness in found:
                return likeness
        if found:
            return Likeness.BITWISE
        return Likeness.UNCLEAR

    def largest(self) -> float:
        """The largest relative difference of gradients in the first update that are judged."""
        largest = 0.0
        for pair in self.pairs:
            if pair.update == 1 and pair.is_gradient and pair.is_judged:
                largest = max(largest, pair.scaled)
        return largest

    def _of_update(self, update: int) -> Iterator[TensorPair]:
        allowed = self.bound
        if update > 1:
            allowed = bounds.of_later_gradients(self.bound, self.moved.get(update - 1, 0.0))
        apart, changed = 0.0, 0.0
        for rank in self.ranks:
            mine, others = self.first.ranks[rank], self.other.ranks[rank]
            gradients: dict[str, TensorPair] = {}
            for kind in _kinds(mine, others, update):
                for pair in self._of_kind(update, kind, rank, allowed, gradients):
                    if pair.is_gradient:
                        gradients[pair.name] = pair
                    yield pair
            moved = _moved(mine, others, update)
            apart += moved.apart**2
            changed += moved.changed**2
        if changed:
            self.moved[update] = math.sqrt(apart / changed)

    def _of_kind(
        self,
        update: int,
        kind: str,
        rank: int,
        allowed: float,
        gradients: Mapping[str, TensorPair],
    ) -> Iterator[TensorPair]:
        first = self.first.ranks[rank].state(update, kind)
        other = self.other.ranks[rank].state(update, kind)
        scales = _Scales([*first.items(), *other.items()])
        for name, tensor in first.items():
            if name not in other or other[name].size != tensor.size:
                continue
            pair = TensorPair(update, kind, name, rank, Likeness.BITWISE)
            if tensor.is_bitwise(other[name]):
                yield pair
            elif kind in (PARAMETER, COPY):
                gradient = gradients.get(name, gradients.get(f"{name} (part)"))
                yield self._of_change(pair, allowed, gradient)
            else:
                yield _of_value(pair, tensor, other[name], allowed, scales.of(name))

    def _of_change(
        self, pair: TensorPair, allowed: float, gradient: TensorPair | None
    ) -> TensorPair:
        """A parameter, or a copy: what it has changed by since the update before."""
        first = self.first.ranks[pair.rank].state(pair.update, pair.kind)[pair.name]
        other = self.other.ranks[pair.rank].state(pair.update, pair.kind)[pair.name]
        change = self._change(pair, first, other)
        size = max(_norm(change.first, change.size), _norm(change.other, change.size))
        difference = _norm(change.other - change.first, change.size)
        relative = _share(difference, size)
        stored = bounds.STORED * bounds.unit([first.dtype]) * max(first.norm, other.norm)
        of_storing = _share(bounds.STORED * stored, size)
        factor = _factor(change.first, change.other, change.size, max(allowed, of_storing))
        tolerance = max(bounds.STEP, allowed)
        clear = None
        if pair.kind == PARAMETER:
            clear = self._clear(pair, gradient)
        if clear is not None:
            mine, others = change.first[clear], change.other[clear]
            largest = max(float(np.linalg.norm(mine)), float(np.linalg.norm(others)))
            apart = float(np.linalg.norm(others - mine))
            is_near = apart <= tolerance * largest + stored * math.sqrt(len(clear) / first.size)
        else:
            noise = allowed
            if gradient is not None:
                noise = max(gradient.relative, self.bound)
            tolerance = bounds.of_changes(max(tolerance, bounds.UNSTABLE), noise)
            is_near = difference <= OF_SKETCH * (tolerance * size + stored)
        follows = gradient is not None and gradient.likeness is Likeness.DIFFERENT
        if is_near and not follows:
            factor = None
        if first.dtype not in bounds.UNITS:
            likeness = Likeness.UNCLEAR
        elif factor is not None:
            likeness = Likeness.DIFFERENT
        elif is_near and follows:
            likeness = Likeness.UNCLEAR
        else:
            likeness = _likeness(is_near, tolerance)
        return replace(
            pair,
            likeness=likeness,
            relative=relative,
            scaled=relative,
            factor=factor,
            bound=tolerance,
        )

    def _change(self, pair: TensorPair, first: TensorSketch, other: TensorSketch) -> Change:
        """Since the update before; where that is not known, the tensors themselves."""
        before = self.first.ranks[pair.rank].state(pair.update - 1, pair.kind).get(pair.name)
        others = self.other.ranks[pair.rank].state(pair.update - 1, pair.kind).get(pair.name)
        if before is None or others is None or before.size != first.size:
            return Change(first.values, other.values, first.size)
        return Change(first.values - before.values, other.values - others.values, first.size)

    def _clear(self, pair: TensorPair, gradient: TensorPair | None) -> np.ndarray | None:
        """Places of kept elements whose gradient is far above rounding; None if too few."""
        if gradient is None or gradient.likeness is Likeness.DIFFERENT:
            return None
        if gradient.name != pair.name:  # another part of it
            return None
        first = self.first.ranks[pair.rank].state(pair.update, gradient.kind)[pair.name]
        count = min(first.size, COORDINATES)
        places = np.arange(1 + BUCKETS, 1 + BUCKETS + count)
        noise = max(gradient.relative, bounds.unit([first.dtype])) * first.norm
        typical = noise / math.sqrt(first.size)
        clear: np.ndarray = places[np.abs(first.values[places]) > CLEAR * typical]
        if len(clear) < LEAST_CLEAR:
            return None
        return clear


class _Scales:
    """Sizes that differences are compared with: of a tensor's elements, its module's, and all."""

    def __init__(self, items: Iterable[tuple[str, TensorSketch]]) -> None:
        self._modules: dict[str, float] = {}
        elements = []
        for name, found in items:
            if not found.size:
                continue
            element = found.norm / math.sqrt(found.size)
            module = name.rpartition(".")[0]
            self._modules[module] = max(self._modules.get(module, 0.0), element)
            elements.append(element)
        self._floor = SMALL * max(elements, default=0.0)

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
    factor = _factor(first.values, other.values, first.size, allowed)
    tolerance = max(allowed, math.sqrt(2) * bounds.unit([first.dtype]))
    size = norm
    if pair.kind == BUFFER:
        tolerance += OF_BUFFERS
    elif pair.is_gradient:
        size = max(norm, element * math.sqrt(first.size))
    elif pair.kind in bounds.LINEAR:
        tolerance *= 3
        size = max(norm, element * math.sqrt(first.size))
    else:
        tolerance = max(tolerance, bounds.UNSTABLE)
    is_near = difference <= OF_SKETCH * tolerance * size
    if is_near:
        factor = None
    if (is_exact and pair.kind != BUFFER) or not math.isfinite(difference):
        likeness = Likeness.UNCLEAR
    elif factor is not None:
        likeness = Likeness.DIFFERENT
    else:
        likeness = _likeness(is_near, tolerance)
    return replace(
        pair,
        likeness=likeness,
        relative=_share(difference, norm),
        scaled=_share(difference, size),
        factor=factor,
        bound=tolerance,
    )


def _likeness(is_near: bool, tolerance: float) -> Likeness:
    """Of tensors that differ, and not by a factor alone."""
    if tolerance >= bounds.LIMIT:
        return Likeness.UNCLEAR
    if is_near:
        return Likeness.ROUNDED
    return Likeness.DIFFERENT


def _share(part: float, whole: float) -> float:
    """0 of nothing."""
    if not whole:
        return 0.0
    return part / whole


def _norm(values: Values, size: int) -> float:
    """The norm of the tensor that a difference of sketches belongs to.

    It is exact if all elements are kept.
    """
    if size <= COORDINATES:
        return float(np.linalg.norm(values[1 + BUCKETS : 1 + BUCKETS + size]))
    return float(np.linalg.norm(values[1 : 1 + BUCKETS]))


def _factor(first: Values, other: Values, size: int, allowed: float) -> float | None:
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
    both = set()
    for at, kind in first.tensors.keys() & other.tensors.keys():
        if at == update:
            both.add(kind)
    order = [GRADIENT, CLIPPED]
    last = [BUFFER, PARAMETER, COPY]
    states = sorted(both.difference(order, last))
    return [kind for kind in (*order, *states, *last) if kind in both]


def _moved(first: RankState, other: RankState, update: int) -> Moved:
    """How far parameters are apart after an update, as far as both runs have them."""
    mine, others = first.state(update, PARAMETER), other.state(update, PARAMETER)
    apart = changed = 0.0
    for name, begin in first.state(0, PARAMETER).items():
        if name in mine and name in others:
            change = mine[name].values - begin.values
            difference = others[name].values - mine[name].values
            apart += _norm(difference, begin.size) ** 2
            changed += _norm(change, begin.size) ** 2
    return Moved(math.sqrt(apart), math.sqrt(changed))
