"""Whether two runs train on the same samples, update by update, and how each cuts them into micro-batches."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import StrEnum

from bench.audit.command.inside.records import Criterion
from bench.audit.invariance.inside.state_records import MicroBatch
from bench.audit.invariance.split_runs import RankState, SplitRun

SAME_ROWS = 1e-3
"""Of the same rows, sums of fingerprints differ by less, in units of the noise of so many other rows."""
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


def backwards(run: SplitRun, update: int) -> int:
    """Backwards of an update, on the rank that has most."""
    return max((len(rank.of_update(update)) for rank in run.ranks.values()), default=0)


def rows(run: SplitRun, update: int) -> dict[int, int]:
    """Rows of an update on all ranks, by the place of an input among those of its graph.

    Some inputs, such as positions, have as many rows for any micro-batch.
    """
    found: dict[int, int] = defaultdict(int)
    for rank in run.ranks.values():
        for micro_batch in rank.of_update(update):
            for place, values in enumerate(micro_batch.data):
                found[place] += int(values[0])
    return dict(found)


def compare_rows(first: SplitRun, other: SplitRun, update: int) -> tuple[int, int] | None:
    """Rows of an update in both runs, equal if any input has as many in both; None if no input shows them.

    Where micro-batches are to have other sizes, an input that has as many rows in each is no data.
    """
    mine, others = rows(first, update), rows(other, update)
    counts = backwards(first, update), backwards(other, update)
    is_cut = first.split.batch != other.split.batch
    pairs = []
    for place in mine:
        if place not in others:
            continue
        is_constant = mine[place] * counts[1] == others[place] * counts[0]
        if mine[place] == others[place] or not (is_cut and is_constant):
            pairs.append((mine[place], others[place]))
    if not pairs:
        return None
    return next((pair for pair in pairs if pair[0] == pair[1]), max(pairs))


def check_samples(first: SplitRun, other: SplitRun, bound: float) -> SamplesCheck:
    """Compare the rows that models were given, then the indices that loaders gave, then the losses."""
    inputs, indices = _compare_inputs(first, other, 1), _compare_indices(first, other)
    if inputs is None and indices is None:
        return _compare_losses(first, other, bound)
    if inputs is None or (indices is not None and inputs.samples is indices.samples):
        assert indices is not None
        return indices
    if indices is not None and inputs.samples is Samples.OTHER:
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
        if counts is not None and counts[0] != counts[1]:
            return update - 1
    return updates


# Rows


def _compare_inputs(first: SplitRun, other: SplitRun, update: int) -> SamplesCheck | None:
    """By what models were given in an update; None if it is not visible, or not in the same form."""
    mine, others = _sums(first, update), _sums(other, update)
    common = [shape for shape in mine if shape in others and mine[shape][0] == others[shape][0]]
    apart = []
    for shape in common:
        count, total, squares = mine[shape]
        _, other_total, other_squares = others[shape]
        noise = math.sqrt(max(squares, other_squares))
        if not noise:
            continue
        apart.append(abs(other_total - total) / noise)
        apart.append(abs(other_squares - squares) / noise**2 * math.sqrt(count))
    if not apart:
        return None
    if max(apart) < SAME_ROWS:
        return SamplesCheck(Samples.SAME, f"the same inputs reach the model in update {update}")
    if max(apart) > OTHER_ROWS:
        what = f"other samples reach the model in update {update}"
        reason = f"{what}: seed the sampler, or give data a generator of their own"
        return SamplesCheck(Samples.OTHER, reason)
    return None


def _sums(run: SplitRun, update: int) -> dict[tuple[int, int], tuple[int, float, float]]:
    """Rows and sums of fingerprints by the input's place among those of its graph and the elements of its rows."""
    found: dict[tuple[int, int], tuple[int, float, float]] = {}
    for rank in run.ranks.values():
        for micro_batch in rank.of_update(update):
            for place, (count, width, total, squares) in enumerate(micro_batch.data):
                before = found.get((place, width), (0, 0.0, 0.0))
                found[place, width] = before[0] + count, before[1] + total, before[2] + squares
    return found


# Indices


def _compare_indices(first: SplitRun, other: SplitRun) -> SamplesCheck | None:
    """By the numbers of samples that loaders have handed out; None if they show none."""
    ranks = sorted(first.ranks.keys() & other.ranks.keys())
    drawn = [(_indices(first.ranks[rank]), _indices(other.ranks[rank])) for rank in ranks]
    if not any(mine and others for mine, others in drawn):
        return None
    if all(_begin_alike(mine, others) for mine, others in drawn):
        return SamplesCheck(Samples.SAME, "the loaders draw the same samples in the same order")
    counts = {_per_update(run.ranks[rank]) for run in (first, other) for rank in ranks}
    if len(counts) == 1 and None not in counts:
        (count,) = counts
        assert count is not None
        updates = min(first.updates, other.updates)
        unions = [
            [
                _union([sequences[side] for sequences in drawn], count * update)
                for update in range(1, updates + 1)
            ]
            for side in (0, 1)
        ]
        if unions[0] == unions[1]:
            reason = "the loaders of all ranks together draw the same samples for each update"
            return SamplesCheck(Samples.SAME, reason)
    return SamplesCheck(Samples.OTHER, "the loaders draw other samples: seed the sampler")


def _indices(rank: RankState) -> dict[int, list[int]]:
    """By loader, in the order in which they were handed out."""
    found: dict[int, list[int]] = defaultdict(list)
    for micro_batch in rank.micro_batches:
        for loader, samples in micro_batch.samples:
            found[loader] += samples
    return dict(found)


def _begin_alike(first: dict[int, list[int]], other: dict[int, list[int]]) -> bool:
    if first.keys() != other.keys():
        return False
    return all(
        mine[: len(others)] == others[: len(mine)]
        for mine, others in ((first[loader], other[loader]) for loader in first)
    )


def _per_update(rank: RankState) -> int | None:
    """Samples that a rank is handed out between two updates; None if they are not always as many."""
    drawn: Counter[int] = Counter()
    for micro_batch in rank.micro_batches:
        drawn[micro_batch.update] += sum(len(samples) for _, samples in micro_batch.samples)
    later = [count for update, count in drawn.items() if update > 1]
    return statistics.mode(later) if later and len(set(later)) == 1 else None


def _union(sequences: list[dict[int, list[int]]], count: int) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for by_loader in sequences:
        for loader, samples in by_loader.items():
            found.update((loader, sample) for sample in samples[:count])
    return found


# Losses


def _compare_losses(first: SplitRun, other: SplitRun, bound: float) -> SamplesCheck:
    mine, others = _loss(first), _loss(other)
    unknown = SamplesCheck(Samples.UNKNOWN, "no loader and no input shows which samples they are")
    if mine is None or others is None:
        return unknown
    if abs(others - mine) > bound * max(abs(mine), abs(others)):
        return unknown
    return SamplesCheck(Samples.SAME, "the loss of update 1 is the same")


def _loss(run: SplitRun) -> float | None:
    """The loss of the first update over all of its terms; None if micro-batches have not one criterion each."""
    total = weight = 0.0
    for rank in run.ranks.values():
        for micro_batch in rank.of_update(1):
            criterion = main_criterion(micro_batch)
            if criterion is None or not criterion.seed or micro_batch.loss is None:
                return None
            terms = float(criterion.terms or 1)
            value = micro_batch.loss / criterion.seed
            total += value if criterion.reduction == "sum" else value * terms
            weight += terms
    return total / weight if weight else None


def main_criterion(micro_batch: MicroBatch) -> Criterion[float] | None:
    """The only criterion of a micro-batch."""
    if len(micro_batch.criteria) != 1:
        return None
    criterion: Criterion[float] = micro_batch.criteria[0]
    return criterion


def uneven_terms(run: SplitRun) -> tuple[int, int] | None:
    """The fewest and most terms of micro-batches of an update whose factors do not follow them, if there are such."""
    for rank in run.ranks.values():
        for update in range(1, rank.updates + 1):
            criteria = [main_criterion(found) for found in rank.of_update(update)]
            known = [found for found in criteria if found is not None and found.terms]
            if len(known) < 2 or len(known) < len(criteria):
                continue
            terms = [int(found.terms or 0) for found in known]
            per_term = [_factor_of_term(found) for found in known]
            if max(terms) > EVEN * min(terms) and max(per_term) > EVEN * min(per_term) > 0:
                return min(terms), max(terms)
    return None


def _factor_of_term(criterion: Criterion[float]) -> float:
    seed = abs(float(criterion.seed or 0.0))
    return seed if criterion.reduction == "sum" else seed / float(criterion.terms or 1)
