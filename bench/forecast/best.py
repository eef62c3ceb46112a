"""Which of the predicted backends is best, and at which N, W and speed of the link that changes.

A backend may win if it fits, can run the cell and is not known to be wrong. It is certainly the best if its upper bound
of a step's time is at most the margin above the lower bounds of all others: whatever they hide, none is faster by more.
Of several such backends the one with the least peak memory is the best. If there is none, the bounds overlap and the
answer is undecided; what leads then has the smallest upper bound. Backends with the same bounds send the same, and do
not make each other uncertain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.forecast.prediction import Bounds, Link, Prediction, communication, record

MARGIN = 0.02
"""Times this near to each other are the same, as ``compare`` calls it."""
LARGEST_N = 256
"""End of the sweep over N, unless the N that is asked for is larger."""
LINKS = (1e8, 1e12)
"""Bytes/s between which the speed of the link is swept, extended to the one that is asked for."""
LARGEST_NODES = 128
"""End of the sweep over W in nodes, unless the W that is asked for is larger."""
PER_DECADE = 25
"""Speeds tried per decade; an answer that holds for a shorter range may be missed."""
EXACT = 1e-3
"""Relative error of the speeds at which the answer changes."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The best backend at one point, or none."""

    best: str
    """Name of the best, or of what leads; empty if no backend may win."""
    equal: tuple[str, ...] = ()
    """Further backends with the same bounds and the same memory."""
    undecided: bool = False
    """Whether another may be faster, by more than the margin."""


@dataclass(frozen=True)
class Stretch:
    """A range of N, or of link speeds in bytes/s, with one answer."""

    low: float
    high: float
    choice: Choice


@dataclass(frozen=True, kw_only=True)
class Question:
    """The backends to choose from, and the limits."""

    predictions: Sequence[Prediction]
    compute_s: float
    """Seconds of compute per optimizer step, on a rank."""
    accumulate: int
    """N, which ``compute_s`` is for."""
    memory_bytes: int | None = None
    """What of a device's memory a prediction may fill; None for no limit."""
    margin: float = MARGIN

    def compute(self, accumulate: int) -> float:
        """Seconds of compute at another N, with the same micro-batch."""
        return self.compute_s * accumulate / self.accumulate

    def bounds(self, one: Prediction, accumulate: int, link: Link) -> Bounds:
        """The bounds of a step's time."""
        compute, sent = self.compute(accumulate), communication(one.traffic(accumulate), link)
        return Bounds(max(compute, sent.lower), compute + sent.upper)

    def fits(self, one: Prediction, accumulate: int) -> bool:
        """Whether a rank's peak is within the limit."""
        return self.memory_bytes is None or one.memory(accumulate).peak <= self.memory_bytes

    def may_win(self, one: Prediction, accumulate: int) -> bool:
        """Whether it fits, runs the cell, and is not known to be wrong."""
        return not one.refusal and not one.defect(accumulate) and self.fits(one, accumulate)

    def choose(self, accumulate: int, link: Link) -> Choice:
        """The best backend; see the docstring of the module."""
        found = self._candidates(accumulate, link)
        if not found:
            return Choice("")
        certain = [name for name in found if not self._faster(name, found)]
        least = min(bounds.upper for bounds, _ in found.values())
        chosen = certain or [name for name, (bounds, _) in found.items() if bounds.upper == least]
        ranks = {name: (found[name][1], found[name][0].upper, found[name][0].lower) for name in chosen}
        best = min(ranks, key=lambda name: ranks[name])
        equal = tuple(name for name in ranks if name != best and ranks[name] == ranks[best])
        return Choice(best, equal, undecided=not certain)

    def rivals(self, name: str, accumulate: int, link: Link) -> list[str]:
        """The backends that may be faster than this one by more than the margin."""
        return self._faster(name, self._candidates(accumulate, link))

    def _candidates(self, accumulate: int, link: Link) -> dict[str, tuple[Bounds, int]]:
        """Bounds and peak memory in bytes of the backends that may win, by name."""
        return {
            one.name: (self.bounds(one, accumulate, link), one.memory(accumulate).peak)
            for one in self.predictions
            if self.may_win(one, accumulate)
        }

    def _faster(self, name: str, candidates: Mapping[str, tuple[Bounds, int]]) -> list[str]:
        own, _ = candidates[name]
        return [
            other
            for other, (bounds, _) in candidates.items()
            if bounds != own and bounds.lower * (1 + self.margin) < own.upper
        ]

    def along_link(self, accumulate: int, link: Link) -> list[Stretch]:
        """The answers over the speed of the link between nodes, from slow to fast, exact to EXACT where they change."""
        low, high = min(LINKS[0], link.bytes_per_s), max(LINKS[1], link.bytes_per_s)
        steps = max(1, math.ceil(PER_DECADE * math.log10(high / low)))
        speeds = [low * (high / low) ** (i / steps) for i in range(steps + 1)]

        def answer(speed: float) -> Choice:
            return self.choose(accumulate, dataclasses.replace(link, bytes_per_s=speed))

        return list(_stretches(speeds, answer))

    @property
    def powers(self) -> list[int]:
        """N of the sweep: powers of two."""
        return [2**i for i in range(math.ceil(math.log2(max(LARGEST_N, self.accumulate))) + 1)]

    def along_n(self, link: Link) -> list[Stretch]:
        """The answers over N, tried in powers of two; where two differ, the N at which they change is searched."""
        powers = self.powers
        found: list[Stretch] = []
        answers = [self.choose(n, link) for n in powers]
        first = powers[0]
        for (n, now), (further, then) in pairwise(zip(powers, answers, strict=True)):
            if now != then:
                low, high = n, further
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (middle, high) if self.choose(middle, link) == now else (low, middle)
                found.append(Stretch(first, low, now))
                first = high
        return [*found, Stretch(first, powers[-1], answers[-1])]

    def along_w(self, link: Link) -> list[Stretch]:
        """The answers over W for whole nodes, tried at 1, 2, 4 ... of them and at the W that is asked for.

        HSDP's shards stay as large as they are. Empty if no rank shares a node.
        """
        if link.node_size == 1 or not self.predictions:
            return []
        asked = self.predictions[0].cell.world_size
        nodes = {2**i for i in range(math.ceil(math.log2(max(LARGEST_NODES, asked / link.node_size))) + 1)}
        found: list[Stretch] = []
        for world_size in sorted({asked, *(link.node_size * count for count in nodes)}):
            own = [other for one in self.predictions if (other := one.on(world_size)) is not None]
            choice = dataclasses.replace(self, predictions=own).choose(self.accumulate, link)
            low = found.pop().low if found and found[-1].choice == choice else world_size
            found.append(Stretch(low, world_size, choice))
        return found

    def rows_of_map(self, link: Link) -> dict[int, list[Stretch]]:
        """``along_link`` for each N of the sweep."""
        return {n: self.along_link(n, link) for n in self.powers}

    def hidden_from(self, one: Prediction, accumulate: int, link: Link) -> float:
        """Bytes/s from which the link between nodes could be hidden behind compute.

        Infinite if the link within nodes or the latency alone takes longer.
        """
        traffic, compute = one.traffic(accumulate), self.compute(accumulate)
        at_once = dataclasses.replace(link, bytes_per_s=math.inf)
        if communication(traffic, at_once).lower >= compute:
            return math.inf
        latency = sum(part.seconds(at_once)[1] for part in traffic)
        return sum(part.levels(link.node_size)[1] for part in traffic) / (compute - latency)


def _stretches(speeds: Sequence[float], answer: Callable[[float], Choice]) -> Iterator[Stretch]:
    """Stretches with one answer each; where it changes is found by bisection on a logarithmic scale."""
    start, now = speeds[0], answer(speeds[0])
    for slow, fast in pairwise(speeds):
        low = slow
        while now != answer(fast):
            high = fast
            while high / low > 1 + EXACT:
                middle = math.sqrt(low * high)
                low, high = (middle, high) if answer(middle) == now else (low, middle)
            yield Stretch(start, high, now)
            start, now = high, answer(high)
            low = high
    yield Stretch(start, speeds[-1], now)


def where_best(name: str, stretches: Sequence[Stretch]) -> list[tuple[float, float]]:
    """The stretches in which a backend is certainly the best, or as good as the one that is named."""
    return [
        (one.low, one.high)
        for one in stretches
        if not one.choice.undecided and name in (one.choice.best, *one.choice.equal)
    ]


@dataclass(frozen=True)
class Recommendation:
    """The best backend at the N and the link that were asked for, and where that changes."""

    here: Choice
    rivals: list[str]
    """What may be faster than ``here.best``; empty if that is decided."""
    along_n: list[Stretch]
    """At the asked link."""
    along_link: list[Stretch]
    """At the asked N, in bytes/s between nodes."""
    along_w: list[Stretch]
    """At the asked N and link; empty if ranks share no node."""

    @classmethod
    def of(cls, question: Question, link: Link) -> Recommendation:
        """The answer at the question's N and this link."""
        n = question.accumulate
        here = question.choose(n, link)
        rivals = question.rivals(here.best, n, link) if here.best else []
        return cls(here, rivals, question.along_n(link), question.along_link(n, link), question.along_w(link))


def records(
    question: Question, link: Link | None, compute_s: float | None, answer: Recommendation | None
) -> list[dict[str, Any]]:
    """The predictions as plain values for JSON, one per backend; bounds and what follows from them need an ``answer``.

    - ``backend``, ``framework``, ``sharding``, ``sync``; ``refusal``: why it does not run this (all numbers are then
      null or empty), ``defect``: what is known to be wrong with its updates (such a backend never wins); or empty;
    - ``memory``: bytes of a rank at its peak by category (bench.forecast.footprint), which add up to
      ``peak_memory_bytes``; ``peak_at``: the moment; ``held``: bytes between micro-batches by category, exact;
    - ``collectives``: per operation and dtype of one optimizer step ``op``, ``dtype``, ``calls``, ``payload_bytes`` and
      ``wire_bytes`` (derived: what a rank sends in ring algorithms); ``num_calls`` and ``wire_bytes``: their sums;
      ``intra_bytes``, ``inter_bytes``: what of it stays within a node, or goes to other nodes; null with one level;
    - ``communication_s``: null without a link; ``compute_s``, ``lower_s``, ``upper_s``: null without a time of compute;
    - ``fits``: null without a limit of memory; ``best``: whether it is certainly the best here; ``recommended``:
      whether it is that, or leads where it is undecided; ``may_be_fastest``: whether it may then be faster than what
      leads; ``best_where``: ``accumulate``, ``link`` and ``world_size``, lists of ranges [low, high] of N, of bytes/s
      and of W in which it is certainly the best, or as good. The last four are null without bounds.
    """
    n, found = question.accumulate, []
    for one in question.predictions:
        bounds = question.bounds(one, n, link) if answer is not None and link is not None and not one.refusal else None
        row = record(one, link, compute_s, bounds)
        row["fits"] = None if question.memory_bytes is None or one.refusal else question.fits(one, n)
        if answer is not None:
            row["recommended"] = one.name in (answer.here.best, *answer.here.equal)
            row["best"] = row["recommended"] and not answer.here.undecided
            row["may_be_fastest"] = one.name in answer.rivals
            along = {"accumulate": answer.along_n, "link": answer.along_link, "world_size": answer.along_w}
            row["best_where"] = {key: where_best(one.name, stretches) for key, stretches in along.items()}
        found.append(row)
    return found
