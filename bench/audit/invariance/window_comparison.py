"""Whether two runs train on the same samples, and how each cuts them into micro-batches."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from bench.audit.command.inside.records import Criterion
from bench.audit.invariance.split_runs import RankState, RecordedMicroBatch, SplitRun

SAME_ROWS = 1e-3
"""Of the same rows, sums of fingerprints differ by less, in units of the noise of so many other
rows."""
OTHER_ROWS = 0.3
"""Of other rows they differ by more."""
EVEN = 1.01
"""Numbers of terms that differ by less are the same."""


class Samples(StrEnum):
    """What is known of the samples of two runs."""

    SAME = "the same samples"
    OTHER = "other samples"
    UNKNOWN = "unknown samples"


@dataclass(frozen=True)
class SamplesCheck:
    """The answer, and how it was found."""

    samples: Samples
    reason: str


class RowCounts(NamedTuple):
    """Rows of an update in two runs."""

    first: int
    other: int

    @property
    def are_equal(self) -> bool:
        return self.first == self.other


class Terms(NamedTuple):
    """How many terms the losses of micro-batches have."""

    fewest: int
    most: int


def backwards(run: SplitRun, update: int) -> int:
    """Backwards of an update, on the rank that has most."""
    return max((len(rank.of_update(update)) for rank in run.ranks.values()), default=0)


def rows(run: SplitRun, update: int) -> dict[int, int]:
    """Rows of an update on all ranks, by the place of an input among those of its graph.

    Some inputs, such as positions, have as many rows for any micro-batch.
    """
    found: dict[int, int] = defaultdict(int)
    for micro_batch in run.of_update(update):
        for place, given in enumerate(micro_batch.data):
            found[place] += given.rows
    return dict(found)


def compare_rows(first: SplitRun, other: SplitRun, update: int) -> RowCounts | None:
    """Rows of an update in both runs, equal if any input has as many in both.

    Where micro-batches are to have other sizes, an input that has as many rows in each is no data.
    If no input shows the rows, those count that loaders have handed out; None if neither does.
    """
    mine, others = rows(first, update), rows(other, update)
    num_first, num_other = backwards(first, update), backwards(other, update)
    is_cut = first.split.batch != other.split.batch
    found = []
    for place in mine:
        if place not in others:
            continue
        counts = RowCounts(mine[place], others[place])
        if counts.are_equal:
            return counts
        is_constant = counts.first * num_other == counts.other * num_first
        if not (is_cut and is_constant):
            found.append(counts)
    if found:
        return max(found)
    drawn, others_drawn = _drawn_for(first, update), _drawn_for(other, update)
    if drawn is None or others_drawn is None:
        return None
    return RowCounts(drawn, others_drawn)


def _drawn_for(run: SplitRun, update: int) -> int | None:
    """Samples of an update; None unless each backward follows one batch, whose samples are known."""
    drawn = 0
    for micro_batch in run.of_update(update):
        if micro_batch.batches != 1 or len(micro_batch.samples) != 1:
            return None
        drawn += len(micro_batch.samples[0].indices)
    if drawn == 0:
        return None
    return drawn


def check_samples(first: SplitRun, other: SplitRun, bound: float) -> SamplesCheck:
    """Compare rows that models were given, then indices that loaders gave, then losses."""
    inputs, indices = _compare_inputs(first, other, 1), _compare_indices(first, other)
    if indices is None:
        if inputs is not None:
            return inputs
        return _compare_losses(first, other, bound)
    if inputs is None or inputs.samples is indices.samples:
        return indices
    if inputs.samples is Samples.OTHER:
        reason = "the loaders draw the same samples, but what they make of them differs"
        return SamplesCheck(Samples.OTHER, f"{reason}: seed what is random in it per sample")
    return inputs


def same_updates(first: SplitRun, other: SplitRun) -> int:
    """How many updates both made before the first that is seen to have other samples."""
    updates = min(first.updates, other.updates)
    for update in range(1, updates + 1):
        inputs = _compare_inputs(first, other, update)
        if inputs is not None and inputs.samples is Samples.OTHER:
            return update - 1
        counts = compare_rows(first, other, update)
        if counts is not None and not counts.are_equal:
            return update - 1
    return updates


# Rows


@dataclass
class _Sums:
    """Of fingerprints of rows."""

    rows: int = 0
    total: float = 0.0
    squares: float = 0.0


def _compare_inputs(first: SplitRun, other: SplitRun, update: int) -> SamplesCheck | None:
    """By what models were given in an update.

    None if it is not visible, or not in the same form.
    """
    mine, others = _sums(first, update), _sums(other, update)
    apart = []
    for place, ours in mine.items():
        theirs = others.get(place)
        if theirs is None or theirs.rows != ours.rows:
            continue
        noise = math.sqrt(max(ours.squares, theirs.squares))
        if noise:
            apart.append(abs(theirs.total - ours.total) / noise)
            of_squares = abs(theirs.squares - ours.squares) / noise**2
            apart.append(of_squares * math.sqrt(ours.rows))
    if not apart:
        return None
    if max(apart) < SAME_ROWS:
        return SamplesCheck(Samples.SAME, f"the same inputs reach the model in update {update}")
    if max(apart) > OTHER_ROWS:
        what = f"other samples reach the model in update {update}"
        reason = f"{what}: seed the sampler, or give data a generator of their own"
        return SamplesCheck(Samples.OTHER, reason)
    return None


def _sums(run: SplitRun, update: int) -> dict[tuple[int, int], _Sums]:
    """By the input's place among those of its graph, and the elements of its rows."""
    found: dict[tuple[int, int], _Sums] = defaultdict(_Sums)
    for micro_batch in run.of_update(update):
        for place, given in enumerate(micro_batch.data):
            sums = found[place, given.width]
            sums.rows += given.rows
            sums.total += given.total
            sums.squares += given.squares
    return dict(found)


# Indices


def _compare_indices(first: SplitRun, other: SplitRun) -> SamplesCheck | None:
    """By the numbers of samples that loaders have handed out; None if they show none."""
    ranks = sorted(first.ranks.keys() & other.ranks.keys())
    are_shown, are_same = False, True
    for rank in ranks:
        mine, others = _indices(first.ranks[rank]), _indices(other.ranks[rank])
        if mine and others:
            are_shown = True
        are_same &= _begin_alike(mine, others)
    if not are_shown:
        return None
    if are_same:
        return SamplesCheck(Samples.SAME, "the loaders draw the same samples in the same order")
    if _draw_the_same_together(first, other, ranks):
        reason = "the loaders of all ranks together draw the same samples for each update"
        return SamplesCheck(Samples.SAME, reason)
    return SamplesCheck(Samples.OTHER, "the loaders draw other samples: seed the sampler")


def _indices(rank: RankState) -> dict[int, list[int]]:
    """By loader, in the order in which they were handed out."""
    found: dict[int, list[int]] = defaultdict(list)
    for micro_batch in rank.micro_batches:
        for drawn in micro_batch.samples:
            found[drawn.loader] += drawn.indices
    return dict(found)


def _begin_alike(first: dict[int, list[int]], other: dict[int, list[int]]) -> bool:
    if first.keys() != other.keys():
        return False
    for loader, mine in first.items():
        others = other[loader]
        if mine[: len(others)] != others[: len(mine)]:
            return False
    return True


def _draw_the_same_together(first: SplitRun, other: SplitRun, ranks: Iterable[int]) -> bool:
    """Whether the ranks are handed out the same samples until each update, in any order."""
    counts = set()
    for run in (first, other):
        for rank in ranks:
            counts.add(_per_update(run.ranks[rank]))
    count = counts.pop()
    if counts or count is None:
        return False
    for update in range(1, min(first.updates, other.updates) + 1):
        drawn = count * update
        if _drawn_together(first, ranks, drawn) != _drawn_together(other, ranks, drawn):
            return False
    return True


def _per_update(rank: RankState) -> int | None:
    """Samples that a rank is handed out between two updates.

    None if they are not always as many.
    """
    drawn: Counter[int] = Counter()
    for micro_batch in rank.micro_batches:
        num_samples = sum(len(samples.indices) for samples in micro_batch.samples)
        drawn[micro_batch.update] += num_samples
    later = [count for update, count in drawn.items() if update > 1]
    if len(set(later)) != 1:
        return None
    return statistics.mode(later)


def _drawn_together(run: SplitRun, ranks: Iterable[int], count: int) -> Counter[tuple[int, int]]:
    """The first ``count`` samples of each loader of each rank."""
    found: Counter[tuple[int, int]] = Counter()
    for rank in ranks:
        for loader, samples in _indices(run.ranks[rank]).items():
            for sample in samples[:count]:
                found[loader, sample] += 1
    return found


# Losses


def _compare_losses(first: SplitRun, other: SplitRun, bound: float) -> SamplesCheck:
    mine, others = _loss(first), _loss(other)
    unknown = SamplesCheck(Samples.UNKNOWN, "no loader and no input shows which samples they are")
    if mine is None or others is None:
        return unknown
    if abs(others - mine) <= bound * max(abs(mine), abs(others)):
        return SamplesCheck(Samples.SAME, "the loss of update 1 is the same")
    return unknown  # also where a loss is NaN


def _loss(run: SplitRun) -> float | None:
    """The loss of the first update over all of its terms.

    None if micro-batches have not one criterion each.
    """
    total = weight = 0.0
    for micro_batch in run.of_update(1):
        criterion = main_criterion(micro_batch)
        if criterion is None or not criterion.seed or micro_batch.loss is None:
            return None
        terms = criterion.terms
        if terms is None:  # micro-batches count alike
            terms = 1.0
        value = micro_batch.loss / criterion.seed
        if criterion.reduction != "sum":
            value *= terms
        total += value
        weight += terms
    if not weight:
        return None
    return total / weight


def main_criterion(micro_batch: RecordedMicroBatch) -> Criterion[float] | None:
    """The only criterion of a micro-batch."""
    if len(micro_batch.criteria) != 1:
        return None
    return micro_batch.criteria[0]


def uneven_terms(run: SplitRun) -> Terms | None:
    """Of an update whose micro-batches have other numbers of terms than their factors follow."""
    for rank in run.ranks.values():
        for update in range(1, rank.updates + 1):
            found = _uneven_terms(rank.of_update(update))
            if found is not None:
                return found
    return None


def _uneven_terms(micro_batches: Iterable[RecordedMicroBatch]) -> Terms | None:
    terms, factors = [], []
    for micro_batch in micro_batches:
        criterion = main_criterion(micro_batch)
        if criterion is None or not criterion.terms:
            return None
        terms.append(int(criterion.terms))
        factors.append(_factor_of_term(criterion, criterion.terms))
    if len(terms) < 2:
        return None
    if max(terms) > EVEN * min(terms) and max(factors) > EVEN * min(factors) > 0:
        return Terms(min(terms), max(terms))
    return None


def _factor_of_term(criterion: Criterion[float], terms: float) -> float:
    """What the loss of a micro-batch multiplies each of so many terms by."""
    factor = abs(criterion.factor)
    if criterion.reduction == "sum":
        return factor
    return factor / terms
