"""The updates of each optimizer of a rank: which backwards it uses, and what happened between them.

A window belongs to the parameters of an optimizer: it has the backwards that add to one of them between two of its
steps. A backward is not a micro-batch: two losses of a batch may have a backward each. Micro-batches are counted by
the batches that data loaders hand out, or else by backwards of one loss at one place, with data that differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.audit.command.inside.records import Backward, Clipping, End, Rank, Step, Values

Vector = NDArray[np.float64]
CHANGED = 1.0001
"""A gradient that is divided by more is changed by clipping."""
WHOLE = 0.05
"""Largest distance of the backwards per batch from a whole number."""


@dataclass
class AuditedUpdate:
    """An update of one optimizer on one rank."""

    number: int
    """From 0, among the updates of this optimizer on this rank."""
    step: Step
    backwards: list[Backward]
    clips: list[tuple[int, Clipping]]
    """Each after how many of the backwards."""
    events: str
    """``BBBBCS``: backwards, clipping, the step, and Z where a gradient was cleared before a backward."""
    used: dict[int, Vector] = field(default_factory=dict)
    """By leaf the gradient at each coordinate; NaN where it is on another rank."""
    num_steps: int = 1
    """Steps with the same gradient."""

    @property
    def count(self) -> int:
        """Backwards."""
        return len(self.backwards)

    @property
    def moves(self) -> bool:
        """Whether parameters change between its backwards."""
        later = self.backwards[1:]
        return any(
            True in [backward.moved[leaf] for leaf in self._owned(backward.moved)]
            for backward in later
        )

    def _owned(self, values: list[Values]) -> list[int]:
        return [leaf for leaf in self.step.owned if leaf < len(values)]

    def changed_early(self) -> list[int]:
        """Leaves whose gradient was changed by clipping before a later backward added to it."""
        leaves = set()
        for place, clip in self.clips:
            for leaf, factor in enumerate(clip.factors):
                is_changed = factor is not None and factor > CHANGED
                if is_changed and any(
                    added(backward, leaf) is not None for backward in self.backwards[place:]
                ):
                    leaves.add(leaf)
        return sorted(leaves)

    def known_rates(self) -> list[float]:
        """The learning rate at each of its backwards, as far as it is known."""
        return [rate for rate in self.step.rates if not math.isnan(rate)]


def added(backward: Backward, leaf: int) -> Values:
    """What a backward added to a leaf; None if nothing."""
    return backward.added[leaf] if leaf < len(backward.added) else None


def is_finite(backward: Backward) -> bool:
    """Whether all that it added is."""
    return all(values is None or np.isfinite(values).all() for values in backward.added)


def left(backward: Backward, leaf: int) -> Values:
    """What was left in the gradient of a leaf when the first backward of a window added to it; None at any other."""
    return backward.left[leaf] if leaf < len(backward.left) else None


def updates_of(rank: Rank) -> dict[int, list[AuditedUpdate]]:
    """The sampled updates of each optimizer that uses a gradient."""
    owned: dict[int, set[int]] = {}
    for event in rank.events:
        if isinstance(event, Step) and event.is_sampled:
            owned.setdefault(event.optimizer, set()).update(event.owned)
    return {number: _Windows(number, leaves, rank).updates for number, leaves in owned.items()}


class _Windows:
    """The windows of one optimizer, from the events of a rank in order."""

    def __init__(self, number: int, leaves: set[int], rank: Rank) -> None:
        self.updates: list[AuditedUpdate] = []
        self._number, self._leaves = number, leaves
        self._begin()
        for event in rank.events:
            if isinstance(event, Backward):
                self._on_backward(event)
            elif isinstance(event, Clipping):
                self._on_clip(event)
            elif isinstance(event, Step) and event.is_sampled and event.optimizer == number:
                self._on_step(event)

    def _begin(self) -> None:
        self._backwards: list[Backward] = []
        self._clips: list[tuple[int, Clipping]] = []
        self._events = ""

    def _on_backward(self, backward: Backward) -> None:
        reached = {leaf for leaf, values in enumerate(backward.added) if values is not None}
        if not self._leaves & reached:
            return
        if self._backwards and self._leaves & set(backward.cleared):
            self._events += "Z"
        self._events += "B"
        self._backwards.append(backward)

    def _on_clip(self, clip: Clipping) -> None:
        clipped = {leaf for leaf, factor in enumerate(clip.factors) if factor is not None}
        if self._backwards and self._leaves & clipped:
            self._events += "C"
            self._clips.append((len(self._backwards), clip))

    def _on_step(self, step: Step) -> None:
        if self._backwards:
            events = self._events + "S"
            self.updates.append(
                AuditedUpdate(len(self.updates), step, self._backwards, self._clips, events)
            )
        if self.updates:
            _use(self.updates[-1], step)
        self._begin()


def _use(update: AuditedUpdate, step: Step) -> None:
    """Fill in the gradients of a step: ZeRO has several with a part each."""
    is_again = False
    for leaf in step.owned:
        values = np.array(step.used[leaf], dtype=float)
        old = update.used.get(leaf)
        if old is None:
            update.used[leaf] = values
        else:
            is_again |= bool((~np.isnan(old) & ~np.isnan(values)).any())
            update.used[leaf] = np.where(np.isnan(old), values, old)
    update.num_steps += is_again


def unused(rank: Rank) -> int:
    """Backwards at the end that led to no step."""
    ends = [event.backwards for event in rank.events if isinstance(event, End)]
    if ends:
        return ends[-1]
    count = 0
    for event in rank.events:
        count = 0 if isinstance(event, Step) else count + isinstance(event, Backward)
    return count


def kind(backward: Backward) -> tuple[str, ...]:
    """What tells one loss from another: its criteria."""
    return tuple(
        sorted(f"{criterion.node} {criterion.reduction}" for criterion in backward.criteria)
    )


def batches_per_backward(updates: list[AuditedUpdate]) -> float | None:
    """By data loaders; None if none was seen, or backwards per batch, or batches per backward, are no whole number."""
    if len(updates) < 2:
        return None
    batches = updates[-1].backwards[0].fetched - updates[0].backwards[0].fetched
    backwards = sum(update.count for update in updates[:-1])
    if batches <= 0:
        return None
    ratio = backwards / batches
    return 1 / round(ratio) if ratio > 0.9 and abs(ratio - round(ratio)) < WHOLE else None


def micro_batches(update: AuditedUpdate, ratio: float | None) -> int | None:
    """How many an update has; None if that cannot be seen. ``ratio``: batches per backward."""
    if ratio is not None:
        return round(update.count * ratio)
    kinds = [(kind(backward), backward.place) for backward in update.backwards]
    sizes = {kinds.count(found) for found in kinds}
    if len(sizes) != 1 or (len(set(kinds)) == 1 and not has_distinct_data(update)):
        return None
    return sizes.pop()


def has_distinct_data(update: AuditedUpdate) -> bool:
    """Whether each backward has other inputs than the rest."""
    data = [tuple(map(tuple, backward.data)) for backward in update.backwards]
    return all(data) and len(set(data)) == len(data)
