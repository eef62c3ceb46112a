"""The updates of each optimizer of a rank: which backwards it uses, and what happened between them.

A window belongs to the parameters of an optimizer: it has the backwards that add to one of them
between two of its steps. A backward is not a micro-batch: two losses of a batch may have a backward
each. Micro-batches are counted by the batches that data loaders hand out, or else by backwards of
one loss at one place, with data that differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import filterfalse

import numpy as np

from bench.audit.command.inside.records import Backward, Clipping, Step
from bench.audit.command.recorded_events import (
    RecordedBackward,
    RecordedClipping,
    RecordedRank,
    RecordedStep,
    Vector,
)

CHANGED = 1.0001
"""A gradient that is divided by more is changed by clipping."""
SAME = 1e-3
"""Relative distance of gradients that are the same."""
WHOLE = 0.05
"""Largest distance of the backwards per batch from a whole number."""


@dataclass
class AuditedUpdate:
    """An update of one optimizer on one rank."""

    number: int
    """From 0, among the updates of this optimizer on this rank."""
    step: RecordedStep
    backwards: list[RecordedBackward]
    clips: list[tuple[int, RecordedClipping]]
    """Each after how many of the backwards."""
    events: str
    """``BBBBCS``: backwards, clipping, the step, and Z where a gradient was cleared before a
    backward."""
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
        for backward in self.backwards[1:]:
            if backward.moved is None:
                continue
            for leaf, moved in zip(backward.watched, backward.moved, strict=True):
                if moved and leaf in self.step.owned:
                    return True
        return False

    def changed_early(self) -> list[int]:
        """Leaves whose gradient was changed by clipping before a later backward added to it."""
        leaves: set[int] = set()
        for number in range(len(self.clips)):
            leaves.update(self._changed_early_by(number))
        return sorted(leaves)

    def early_clip(self) -> RecordedClipping:
        """The first that changed a gradient before a later backward added to it."""
        for number, (_, clip) in enumerate(self.clips):
            if self._changed_early_by(number):
                return clip
        raise LookupError("no gradient was changed before the last backward")

    def _changed_early_by(self, number: int) -> list[int]:
        """The same of one clipping.

        None where the clipped gradient was put away before more was added, as DP-SGD does with
        that of each sample.
        """
        place, clip = self.clips[number]
        if self._is_put_away(number):
            return []
        leaves = []
        for leaf in changed_leaves(clip):
            later = self._first_to_add(place, leaf)
            if later is None:
                continue
            if not any(leaf in each.cleared for each in self.backwards[place : later + 1]):
                leaves.append(leaf)
        return leaves

    def _first_to_add(self, place: int, leaf: int) -> int | None:
        """The first backward from a place on that adds to a leaf."""
        for number in range(place, self.count):
            if added(self.backwards[number], leaf) is not None:
                return number
        return None

    def _is_put_away(self, number: int) -> bool:
        """Whether the next clipping finds what was added since this one, and nothing from before."""
        if number + 1 == len(self.clips):
            return False
        (place, _), (next_place, following) = self.clips[number], self.clips[number + 1]
        before, since = following.before, np.zeros(1)
        for backward in self.backwards[place:next_place]:
            values = added(backward, following.before_leaf)
            if values is not None:
                since = since + values
        if before is None or before.shape != since.shape:
            return False
        return bool(np.allclose(before, since, rtol=SAME, atol=0, equal_nan=True))

    def places(self) -> set[str]:
        """File and line of its backwards."""
        return places_of(self.backwards)

    def known_rates(self) -> list[float]:
        """The learning rate at each of its backwards, as far as it is known."""
        return list(filterfalse(math.isnan, self.step.rates))


def places_of(backwards: Iterable[RecordedBackward]) -> set[str]:
    """File and line of backwards."""
    return {backward.place for backward in backwards}


def counts_of(updates: Iterable[AuditedUpdate]) -> list[int]:
    """The backwards of each update."""
    return [update.count for update in updates]


def contrast(backwards: Iterable[RecordedBackward]) -> bool:
    """Whether the rows of a batch are contrasted with each other, as at least half of these show.

    The classes of a few rows may count up by chance.
    """
    seen = []
    for backward in backwards:
        seen.append(any(criterion.in_batch for criterion in backward.criteria))
    return sum(seen) >= max(1, len(seen) / 2)


def changed_leaves(clip: RecordedClipping) -> list[int]:
    """Leaves whose gradient clipping has made smaller."""
    changed = []
    for leaf, factor in enumerate(clip.factors):
        if factor is not None and factor > CHANGED:
            changed.append(leaf)
    return changed


def added(backward: RecordedBackward, leaf: int) -> Vector | None:
    """What a backward added to a leaf; None if nothing."""
    if leaf < len(backward.added):
        return backward.added[leaf]
    return None


def reached_leaves(backward: RecordedBackward) -> set[int]:
    """Those that it adds to."""
    return {leaf for leaf, values in enumerate(backward.added) if values is not None}


def is_finite(backward: RecordedBackward) -> bool:
    """Whether all that it added is."""
    return all(values is None or np.isfinite(values).all() for values in backward.added)


def left(backward: RecordedBackward, leaf: int) -> Vector | None:
    """What was left in the gradient of a leaf when the first backward of a window added to it.

    None at any other backward.
    """
    if leaf < len(backward.left):
        return backward.left[leaf]
    return None


def updates_of(rank: RecordedRank) -> dict[int, list[AuditedUpdate]]:
    """The sampled updates of each optimizer that uses a gradient."""
    owned: dict[int, set[int]] = {}
    for step in rank.steps:
        if step.is_sampled:
            owned.setdefault(step.optimizer, set()).update(step.owned)
    updates = {}
    for number, leaves in owned.items():
        updates[number] = _Windows(number, leaves, rank).updates
    return updates


class _Windows:
    """The windows of one optimizer, from the events of a rank in order."""

    def __init__(self, number: int, leaves: set[int], rank: RecordedRank) -> None:
        self.updates: list[AuditedUpdate] = []
        self._number, self._leaves = number, leaves
        self._begin()
        for event in rank.events:
            if isinstance(event, Backward):
                self._on_backward(event)
            elif isinstance(event, Clipping):
                self._on_clip(event)
            elif isinstance(event, Step) and event.is_sampled:
                if event.optimizer == number:
                    self._on_step(event)
                elif leaves <= set(event.owned):  # one optimizer follows another
                    self._begin()

    def _begin(self) -> None:
        self._backwards: list[RecordedBackward] = []
        self._clips: list[tuple[int, RecordedClipping]] = []
        self._events = ""

    def _on_backward(self, backward: RecordedBackward) -> None:
        if not self._leaves & reached_leaves(backward):
            return
        if self._backwards and self._leaves & set(backward.cleared):
            self._events += "Z"
        self._events += "B"
        self._backwards.append(backward)

    def _on_clip(self, clip: RecordedClipping) -> None:
        clipped = {leaf for leaf, factor in enumerate(clip.factors) if factor is not None}
        if self._backwards and self._leaves & clipped:
            self._events += "C"
            self._clips.append((len(self._backwards), clip))

    def _on_step(self, step: RecordedStep) -> None:
        if self._backwards:
            events = self._events + "S"
            self.updates.append(
                AuditedUpdate(len(self.updates), step, self._backwards, self._clips, events)
            )
        if self.updates:
            _use(self.updates[-1], step)
        self._begin()


def _use(update: AuditedUpdate, step: RecordedStep) -> None:
    """Fill in the gradients of a step: ZeRO has several with a part each."""
    is_again = False
    for leaf in step.owned:
        values = step.used[leaf]
        assert values is not None, "a step owns leaves of which it uses the gradient"
        old = update.used.get(leaf)
        if old is None:
            update.used[leaf] = values
        else:
            is_again |= bool((~np.isnan(old) & ~np.isnan(values)).any())
            update.used[leaf] = np.where(np.isnan(old), values, old)
    update.num_steps += is_again


def unused(rank: RecordedRank) -> int:
    """Backwards at the end that led to no step."""
    if rank.end is not None:
        return rank.end.backwards
    count = 0
    for event in rank.events:
        if isinstance(event, Step):
            count = 0
        else:
            count += isinstance(event, Backward)
    return count


def kind(backward: RecordedBackward) -> tuple[str, ...]:
    """What tells one loss from another: its criteria."""
    names = []
    for criterion in backward.criteria:
        names.append(f"{criterion.node} {criterion.reduction}")
    return tuple(sorted(names))


def backwards_per_batch(updates: list[AuditedUpdate]) -> int | None:
    """By data loaders; None if none was seen, or it is no whole number.

    The first window may be another one than the rest: it has no backward of another optimizer's
    loss from before.
    """
    for counted in (updates, updates[1:]):
        if len(counted) < 2:
            return None
        batches = counted[-1].backwards[0].fetched - counted[0].backwards[0].fetched
        if batches <= 0:
            return None
        ratio = sum(counts_of(counted[:-1])) / batches
        if ratio > 0.9 and abs(ratio - round(ratio)) < WHOLE:
            return round(ratio)
    return None


def batches_per_backward(updates: list[AuditedUpdate]) -> float | None:
    """By data loaders; None where backwards per batch are not known."""
    num_backwards = backwards_per_batch(updates)
    if num_backwards is None:
        return None
    return 1 / num_backwards


def micro_batches(update: AuditedUpdate, ratio: float | None) -> int | None:
    """How many an update has; None if that cannot be seen. ``ratio``: batches per backward."""
    if ratio is not None:
        return round(update.count * ratio)
    numbers: Counter[tuple[tuple[str, ...], str]] = Counter()
    for backward in update.backwards:
        numbers[kind(backward), backward.place] += 1
    if len(numbers) == 1 and not has_distinct_data(update):
        return None
    different = set(numbers.values())
    if len(different) != 1:
        return None
    return different.pop()


def data_of(backward: RecordedBackward) -> tuple[bytes, ...]:
    """What tells its inputs from others; empty if they are not visible."""
    return tuple(values.tobytes() for values in backward.data)


def has_distinct_data(update: AuditedUpdate) -> bool:
    """Whether each backward has other inputs than the rest."""
    seen = set(map(data_of, update.backwards))
    return () not in seen and len(seen) == len(update.backwards)
