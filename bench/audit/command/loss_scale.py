"""Whether the weights of the losses of an update sum to 1, and if not, to what.

The criterion of a micro-batch is a mean or sum of terms. A hook on its autograd node reads its
factor f in the loss that backward was called with, so c f, times the number of terms of a sum, is
what the mean loss of that micro-batch weighs in the gradient. With N micro-batches on each of W
ranks these weights are 1 / (N W) if all is right, and sum to 1. They sum to N if the loss is not
divided, to 1 / N if it is divided twice, to n / N in a window of n micro-batches where others have
N, and to W or 1 / W if ranks are summed or averaged once too often. A loss may have any other
factor on purpose, so nothing else is called wrong, and a wrong factor must be that of every update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from statistics import median, mode

import numpy as np

from bench.audit.command.gradient_weights import (
    TOLERANCE,
    ExplainedGradient,
    Place,
    Weight,
    updates_with,
)
from bench.audit.command.recorded_events import (
    RecordedBackward,
    RecordedCriterion,
    RecordedHook,
    RecordedRank,
    Vector,
)
from bench.audit.command.update_windows import (
    AuditedUpdate,
    added,
    batches_per_backward,
    contrast,
    has_distinct_data,
    micro_batches,
    reached_leaves,
)
from bench.findings import Finding, error, good, warning

NEAR = 0.005
"""Largest relative distance of a sum from the wrong value that it is taken for."""
NEAR_IN_LOW_PRECISION = 0.05
MATTERS = 0.05
"""A mean of means is wrong where it changes the gradient by more, relative to its norm."""
EQUAL = 1e-3
Kind = tuple[str, str | None, int]
"""A criterion's node, its reduction, and which of these it is in its backward."""


def described(criterion: RecordedCriterion | None) -> str:
    """A criterion and the factor that it receives."""
    if criterion is None or criterion.seed is None:
        return "no criterion found"
    reduction = criterion.reduction
    if reduction is None:
        reduction = "unknown reduction"
    return f"{criterion.node} ({reduction}) receives {criterion.seed:.4g}"


def hook_factor(backward: RecordedBackward) -> float | None:
    """By what hooks have multiplied the gradient on its way to the parameters.

    None if that is no single factor.
    """
    factors = []
    for hook in backward.hooks:
        if not _changes(hook):
            continue
        factor = _factor_of(hook)
        if factor is None:
            return None
        factors.append(factor)
    if not factors:
        return 1.0
    if max(factors) - min(factors) > EQUAL * abs(factors[0]):
        return None
    return factors[0]


def _changes(hook: RecordedHook) -> bool:
    """Whether what came out is visible, and something else than what went in."""
    old, new = hook.before, hook.after
    if old is None or new is None or len(old) != len(new):
        return False
    return not np.array_equal(old, new)


def _factor_of(hook: RecordedHook) -> float | None:
    """What a hook has multiplied a gradient by.

    None if it has done something else, or was given a parameter's.
    """
    if hook.is_parameter or hook.before is None or hook.after is None:
        return None
    nonzero = hook.before != 0
    ratios = hook.after[nonzero] / hook.before[nonzero]
    if not len(ratios) or hook.after[~nonzero].any():
        return None
    if np.ptp(ratios) > EQUAL * abs(ratios[0]):
        return None
    return float(ratios[0])


def weight_of(criterion: RecordedCriterion, coefficient: float) -> float | None:
    """What the mean of its terms weighs, by the weight of the micro-gradient.

    None if that is not visible.
    """
    if criterion.seed is None or not criterion.is_even:
        return None
    if criterion.reduction in ("mean", "terms"):
        return coefficient * criterion.seed
    if criterion.reduction == "sum" and criterion.terms:
        return coefficient * criterion.seed * criterion.terms
    return None


@dataclass
class LossWeight:
    """What a criterion of a micro-batch weighs."""

    place: Place
    kind: Kind
    weight: float | None
    criterion: RecordedCriterion
    line: str
    """Where its backward was called."""


@dataclass
class WeighedUpdate:
    """The losses in one gradient."""

    gradient: ExplainedGradient
    losses: list[LossWeight]

    @property
    def main(self) -> list[Kind]:
        """Kinds of the loss functions of torch, or else of whatever is a mean."""
        named: dict[Kind, None] = {}
        means: dict[Kind, None] = {}
        for loss in self.losses:
            if loss.criterion.is_named:
                named[loss.kind] = None
            elif loss.criterion.reduction == "mean":
                means[loss.kind] = None
        if named:
            return list(named)
        return list(means)

    def is_named(self, kind: Kind) -> bool:
        """Whether it is a loss function of torch, and not any mean."""
        return any(loss.criterion.is_named for loss in self.of_kind(kind))

    @property
    def has_class_weights(self) -> bool:
        """Whether classes of a loss have weights of their own."""
        return any(loss.criterion.is_weighted for loss in self.losses)

    def of_kind(self, kind: Kind) -> list[LossWeight]:
        return [loss for loss in self.losses if loss.kind == kind]

    @property
    def kinds(self) -> list[Kind]:
        """In the order in which they are found."""
        return list(dict.fromkeys(loss.kind for loss in self.losses))

    @property
    def others(self) -> list[Kind]:
        """Kinds that are not the main ones."""
        main = self.main
        return [kind for kind in self.kinds if kind not in main]

    def total(self, kind: Kind, line: str = "") -> float | None:
        """What all losses of a kind weigh; None if one of them is not visible."""
        total = 0.0
        for loss in self.of_kind(kind):
            if line in ("", loss.line):
                if loss.weight is None:
                    return None
                total += loss.weight
        return total

    def lines(self, kind: Kind) -> list[str]:
        """Where backwards of a kind were called."""
        return list(dict.fromkeys(loss.line for loss in self.of_kind(kind)))


@dataclass
class CountedLoss:
    """A micro-batch whose loss is a mean over a known number of terms."""

    place: Place
    weight: float
    terms: float
    rows: int | None
    """Of its first input, such as sequences; None if that is not visible."""

    @property
    def share(self) -> float:
        """What one term weighs."""
        return self.weight / self.terms


@dataclass
class CountedUpdate:
    """The micro-batches of one gradient with the terms of their losses."""

    weighed: WeighedUpdate
    losses: list[CountedLoss]

    @property
    def has_different_sizes(self) -> bool:
        return len(set(self.sizes)) > 1

    @property
    def sizes(self) -> list[float]:
        """The terms of each micro-batch."""
        return [loss.terms for loss in self.losses]

    @property
    def shares(self) -> list[float]:
        """What one term of each micro-batch weighs."""
        return [loss.share for loss in self.losses]

    @property
    def is_exact(self) -> bool:
        """Whether all terms weigh the same."""
        return 1 - min(self.shares) / max(self.shares) < TOLERANCE

    @property
    def has_one_sequence_each(self) -> bool:
        """Whether no micro-batch is seen to have several.

        A mean may weigh sequences alike on purpose.
        """
        return all(loss.rows is None or loss.rows <= 1 for loss in self.losses)

    def differs_within_a_rank(self) -> bool:
        """Otherwise it is the mean over ranks that has unequal parts."""
        by_rank: dict[int, list[float]] = {}
        for loss in self.losses:
            by_rank.setdefault(loss.place[0], []).append(loss.share)
        return any(1 - min(shares) / max(shares) > TOLERANCE for shares in by_rank.values())


@dataclass
class LossScale:
    """Judges the weights of losses of one optimizer."""

    gradients: list[ExplainedGradient]
    ranks: Mapping[int, RecordedRank]
    updates: Mapping[int, list[AuditedUpdate]]
    """By rank."""
    expect: int | None
    is_low: bool
    """Whether gradients are held or reduced in 16 bits."""
    label: str = ""
    """The optimizer, where there are several."""
    status: str = "unknown"
    """``right``, ``main`` if only for the main loss, ``sum`` if weights sum to something else,
    or ``unknown``."""
    total: float | None = None
    """What the weights sum to in most updates."""
    weighed: list[WeighedUpdate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first = next(iter(self.updates))
        self._mine = self.updates[self._first]
        self._beside = ""
        """Sums of several kinds of losses, of which one is 1."""
        self._ratio = batches_per_backward(self._mine)
        known = []
        for update in self._mine:
            count = self._num_micro_batches(update)
            if count:
                known.append(count)
        self.usual = 0
        """Micro-batches of most updates; 0 if that is not visible."""
        if known:
            self.usual = mode(sorted(known))

    def _num_micro_batches(self, update: AuditedUpdate) -> int:
        """Those of an update; 0 if that is not visible."""
        count = micro_batches(update, self._ratio)
        if count is None:
            return 0
        return count

    def findings(self) -> Iterator[Finding]:
        """What the weights sum to, and whether all terms weigh the same."""
        for gradient in self._main_gradients():
            if gradient.is_resolved and gradient.weights:
                self.weighed.append(self._weigh(gradient))
        if not self.weighed:
            yield self._open("micro-gradients are 0, or too alike to be told apart")
            return
        doubt = self._first_doubt()
        if doubt and self.ranks[self._first].parallel:
            # Of a pipeline only the last stage knows the loss.
            clear = list(filter(self._is_clear, self.weighed))
            if clear:
                self.weighed, doubt = clear, ""
        totals = self._totals()
        if doubt:
            yield self._open(doubt)
        elif isinstance(totals, str):
            yield self._open(totals)
        else:
            yield from self._of_totals(totals)
            yield from self._of_others()
        yield from self._of_terms()

    def _main_gradients(self) -> list[ExplainedGradient]:
        """Of each update and rank the one of most parameters.

        That others differ is said elsewhere.
        """
        found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], ExplainedGradient] = {}
        for gradient in self.gradients:
            largest = found.get(gradient.owner)
            if largest is None or len(gradient.leaves) > len(largest.leaves):
                found[gradient.owner] = gradient
        return list(found.values())

    def _open(self, why: str) -> Finding:
        return warning("scale not judged", f"{self.label}{why}")

    def _backward_of(self, gradient: ExplainedGradient, found: Weight) -> RecordedBackward:
        return self.updates[found.rank][gradient.update].backwards[found.micro_batch]

    def _weigh(self, gradient: ExplainedGradient) -> WeighedUpdate:
        losses: list[LossWeight] = []
        for found in gradient.weights:
            if found.is_present:
                losses += _loss_weights(found, self._backward_of(gradient, found))
        return WeighedUpdate(gradient, losses)

    # Why backwards of an update may be parts of a loss instead of micro-batches

    def _first_doubt(self) -> str:
        for weighed in self.weighed:
            for why in self._doubts(weighed):
                return why
        return ""

    def _is_clear(self, weighed: WeighedUpdate) -> bool:
        return not any(self._doubts(weighed))

    def _doubts(self, weighed: WeighedUpdate) -> Iterator[str]:
        for found in weighed.gradient.weights:
            backward = self._backward_of(weighed.gradient, found)
            yield from backward.doubts
            if hook_factor(backward) is None:
                yield "hooks change gradients between the loss and the parameters"
            if backward.covered < 1:
                yield self._of_joined(backward)

    def _of_joined(self, backward: RecordedBackward) -> str:
        text = (
            "the loss joins rows that have a gradient with others that have none, as a cache of "
            "features does"
        )
        if not backward.covered:
            return text
        sums = []
        for weighed in self.weighed:
            for kind in weighed.main[:1]:
                total = weighed.total(kind)
                if total is not None:
                    sums.append(total * backward.covered)
        share = f"{backward.covered:.3g} of the rows of a loss have a gradient"
        if not sums:
            return f"{text}: {share}"
        return f"{text}: {share}, and weights times that share sum to {median(sums):.4g}"

    # What weights sum to

    def _totals(self) -> dict[int, float] | str:
        """By update what the weights of the main loss sum to, or why that is not known.

        Of replicas it is the one farthest from 1.
        """
        totals: dict[int, float] = {}
        for weighed in self.weighed:
            total = self._total(weighed)
            if isinstance(total, str):
                return total
            number = weighed.gradient.update
            if abs(total - 1) >= abs(totals.get(number, 1.0) - 1):
                totals[number] = total
        return totals

    def _total(self, weighed: WeighedUpdate) -> float | str:
        """The same of one gradient."""
        main = weighed.main
        if not main:
            criterion = None
            if weighed.losses:
                criterion = weighed.losses[0].criterion
            return f"no mean over a visible number of terms: {described(criterion)}"
        sums = []
        for kind in main:
            total = weighed.total(kind)
            if total is None:
                return _why_invisible(weighed.of_kind(kind)[0].criterion)
            total = self._of_places(weighed, kind, total)
            if not weighed.is_named(kind):
                total = abs(total)  # a mean of logarithms may be subtracted
            sums.append(total)
        return self._of_kinds(main, sums)

    def _of_kinds(self, main: list[Kind], sums: list[float]) -> float | str:
        """The sum of several kinds of losses, or why that is not judged.

        It is 1 if each has 1, or all together.
        """
        worst = max(sums, key=lambda total: abs(total - 1))
        if len(main) == 1:
            return worst
        if self._is_one(worst):
            if self.usual == len(main):
                return (
                    f"each of {len(main)} losses sums to 1, and so would their mean that is not "
                    "divided by N"
                )
            return worst
        nodes = set()
        for node, reduction, _ in main:
            nodes.add((node, reduction))
        if len(nodes) == 1 and self._is_one(sum(sums)):
            return sum(sums)
        right = list(filter(self._is_one, sums))
        shown = [f"{kind[0]} {total:.4g}" for kind, total in zip(main, sums, strict=True)]
        parts = ", ".join(shown)
        if len(right) == 1 and len(nodes) > 1:
            self._beside = parts
            return right[0]
        return f"the loss has several terms, whose weights sum to {parts}"

    def _of_places(self, weighed: WeighedUpdate, kind: Kind, total: float) -> float:
        """1 where backwards at several places each sum to 1.

        Then the batch has several losses, each with a right weight.
        """
        lines = weighed.lines(kind)
        if self._is_one(total) or len(lines) == 1 or not self._shares_batches(weighed):
            return total
        for line in lines:
            part = weighed.total(kind, line)
            assert part is not None, "a part of a total that is known"
            if not weighed.is_named(kind):
                part = abs(part)
            if not self._is_one(part):
                return total
        return 1.0

    def _shares_batches(self, weighed: WeighedUpdate) -> bool:
        """Whether several backwards have a batch together, as far as that is visible."""
        if self._ratio is not None:
            return self._ratio < 1
        return not has_distinct_data(self._mine[weighed.gradient.update])

    def _is_one(self, total: float) -> bool:
        if self.is_low:
            return abs(total - 1) <= NEAR_IN_LOW_PRECISION
        return abs(total - 1) <= TOLERANCE

    def _of_totals(self, sums: dict[int, float]) -> Iterator[Finding]:
        self.total = median(sums.values())
        wrong = {number: total for number, total in sums.items() if not self._is_one(total)}
        if wrong:
            self.status = "sum"
            yield self._wrong(wrong, len(sums))
        else:
            self.status = "right"
            yield good(
                "scale 1",
                f"{self.label}the weights of micro-batches sum to {sums[min(sums)]:.4g}: a mean",
            )

    def _wrong(self, wrong: dict[int, float], num_updates: int) -> Finding:
        """What sums other than 1, by update, are equal to."""
        example = f"weights sum to {wrong[min(wrong)]:.4g} in {len(wrong)} of {num_updates} updates"
        counts = {}
        for number in wrong:
            counts[number] = self._num_micro_batches(self._mine[number])
        doubt = self._doubt_of_parts(wrong)
        fault: Finding | None = None
        if not doubt and len(wrong) < num_updates:
            fault = self._other_window(wrong, counts, example)
        elif not doubt:
            fault = self._wrong_factor(wrong, counts, example)
            if fault is None:
                fault = self._wrong_ranks(wrong, example)
        if fault is not None:
            return fault
        return warning("scale", f"{self.label}{example}: {self._meaning(wrong, doubt)}")

    def _other_window(
        self, wrong: dict[int, float], counts: dict[int, int], example: str
    ) -> Finding | None:
        """Windows of another length that are divided as if they had the usual one."""
        if not self.usual or not {0, self.usual}.isdisjoint(counts.values()):
            return None
        expected = {number: count / self.usual for number, count in counts.items()}
        if not self._equals(wrong, expected):
            return None
        topic, shown = "partial window", min(counts.values())
        if shown > self.usual:
            topic, shown = "overfull window", max(counts.values())
        which = ", ".join(str(number + 1) for number in sorted(counts)[:4])
        subject = f"update {which} has"
        if len(counts) > 1:
            subject = f"updates {which} have"
        text = f"{subject} {shown} micro-batches where others have {self.usual}: {example}"
        return self._accuse(topic, text, [self._mine[min(counts)].step.place])

    def _wrong_factor(
        self, wrong: dict[int, float], counts: dict[int, int], example: str
    ) -> Finding | None:
        """A loss that is never divided by N, or twice."""
        if self.usual < 2:
            return None
        also = ""
        if len(self.gradients[0].replicas) == self.usual:
            also = f"; or it is scaled by the number of ranks, which is {self.usual} too"
        if self._equals(wrong, counts):
            text = f"the loss is not divided by N: {example}{also}"
            return self._accuse("not divided", text, self._lines())
        # Twice 2 may be any 4.
        is_sure = self.usual > 2 or self.usual == self.expect
        squares = {}
        for number, count in counts.items():
            squares[number] = count / self.usual**2
            is_sure = is_sure or self.usual == self._mine[number].step.asked
        if is_sure and self._equals(wrong, squares):
            text = f"the loss is divided by N twice: {example}{also}"
            return self._accuse("divided twice", text, self._lines())
        return None

    def _wrong_ranks(self, wrong: dict[int, float], example: str) -> Finding | None:
        """Ranks that are summed or averaged once too often."""
        world = len(self.gradients[0].replicas)
        if world < 2:
            return None
        is_wrong = self._equals(wrong, dict.fromkeys(wrong, float(world)))
        # Where a mean is averaged over ranks, 1 / W is a factor of the loss.
        if self.weighed[0].main[0][1] != "mean":
            is_wrong |= self._equals(wrong, dict.fromkeys(wrong, 1 / world))
        if not is_wrong:
            return None
        return self._accuse("scaled by ranks", f"with {world} ranks {example}", self._lines())

    def _lines(self) -> list[str]:
        """Where the backwards of the main loss are called."""
        weighed = self.weighed[0]
        return weighed.lines(weighed.main[0])

    def _accuse(self, topic: str, text: str, lines: list[str]) -> Finding:
        return error(topic, f"{self.label}{text}{at(lines)}")

    def _meaning(self, wrong: dict[int, float], doubt: str) -> str:
        if doubt:
            return f"this may be meant, {doubt}"
        total = wrong[min(wrong)]
        steps = 0
        if total:
            steps = round(1 / total)
        if self.usual == 1 and steps > 1 and abs(total * steps - 1) < NEAR:
            text = f"a step at each micro-batch, as if {steps} were to be accumulated"
            num_clipped = 0
            for update in self._mine:
                num_clipped += bool(update.clips)
            if 0 < num_clipped <= len(self._mine) / 2:
                text += f", and {num_clipped} of {len(self._mine)} updates are clipped"
            return f"{text}; or this is meant"
        return "this may be meant"

    def _equals(self, wrong: dict[int, float], expected: Mapping[int, float]) -> bool:
        near = NEAR
        if self.is_low:
            near = NEAR_IN_LOW_PRECISION
        for number, total in wrong.items():
            if not expected[number] or abs(total / expected[number] - 1) >= near:
                return False
        return True

    def _doubt_of_parts(self, wrong: dict[int, float]) -> str:
        """Why backwards may be parts of a loss.

        Only the right sum needs no proof that they are micro-batches.
        """
        for gradient in self.gradients:
            if not all(found.is_present for found in gradient.weights):
                return "since some backwards are not in the gradient"
        kinds: set[Kind] = set()
        for weighed in self.weighed:
            kinds.update(weighed.kinds)
        if len(kinds) > 1:
            return "since the loss has several terms"
        if any(self._mine[number].backwards[-1].inner_gradients for number in wrong):
            return "since gradients are differentiated, as in a sum over tasks"
        if contrast(chain.from_iterable(update.backwards for update in self._mine)):
            return "since the rows of a batch are contrasted with each other"
        for number in wrong:
            doubt = self._doubt_of_update(self._mine[number])
            if doubt:
                return doubt
        return ""

    def _doubt_of_update(self, update: AuditedUpdate) -> str:
        if len(update.places()) > 1:
            return "since backward is called at several places"
        first = reached_leaves(update.backwards[0])
        for backward in update.backwards:
            if reached_leaves(backward) != first:
                return "since the backwards of an update reach different parameters"
        is_asked = update.count in (update.step.asked, self.expect)
        if update.count > 1 and not is_asked and self._ratio != 1 and not has_distinct_data(update):
            return "since it is not visible whether backwards have a micro-batch each"
        return ""

    # Other losses

    def _of_others(self) -> Iterator[Finding]:
        """What losses beside the main one weigh, which may have any factor."""
        sums: dict[str, list[float]] = {}
        for weighed in self.weighed:
            for kind in weighed.others:
                sums.setdefault(kind[0], []).append(_sum_of_other(weighed, kind))
        gradient = self.weighed[0].gradient
        for found in gradient.weights:
            for criterion in self._backward_of(gradient, found).injected:
                total = criterion.factor * found.weight * len(gradient.weights)
                sums.setdefault(f"{criterion.node} (injected by a function)", []).append(total)
        parts = []
        is_right = not self._beside
        if self._beside:
            parts.append(self._beside)
        for name, totals in sums.items():
            if any(totals):
                total = median(totals)
                is_right = is_right and self._is_one(total)
                parts.append(f"{name} {total:.4g}")
        if is_right:
            return
        if self.status == "right":
            self.status = "main"
        text = "whether other losses have the right factors is not judged; theirs sum to"
        yield warning("other losses", f"{self.label}{text}: {', '.join(parts)}")

    # Terms

    def _of_terms(self) -> Iterator[Finding]:
        """Whether an update's terms weigh the same, where micro-batches differ in their number."""
        uneven = []
        num_exact = 0
        for weighed in self.weighed:
            counted = CountedUpdate(weighed, self._counted(weighed))
            if not counted.has_different_sizes or max(counted.shares) <= 0:
                continue
            if counted.is_exact:
                num_exact += 1
            else:
                uneven.append(counted)
        rows = self._uneven_rows()
        if rows and not uneven and not num_exact:
            yield warning(
                "mean of means",
                f"{self.label}micro-batches of an update have from {min(rows)} to {max(rows)} "
                "rows, and how many terms their loss has is not visible",
            )
        if uneven:
            yield self._of_uneven(uneven)
        elif num_exact:
            text = f"{self.label}all terms of the loss of an update have the same weight"
            yield good("token-exact", text)

    def _uneven_rows(self) -> set[int]:
        """Of the micro-batches of an update whose loss is a mean over terms that nothing counts.

        Empty where all have the same number.
        """
        for weighed in self.weighed:
            rows: set[int] = set()
            for kind in weighed.main:
                for loss in weighed.of_kind(kind):
                    rank, number = loss.place
                    backward = self.updates[rank][weighed.gradient.update].backwards[number]
                    is_mean = loss.criterion.reduction == "mean" and not loss.criterion.terms
                    if is_mean and backward.rows is not None:
                        rows.add(backward.rows)
            if len(rows) > 1:
                return rows
        return set()

    def _of_uneven(self, uneven: list[CountedUpdate]) -> Finding:
        """Terms of different weight: whether that is wrong, or may be meant."""
        sizes: list[float] = []
        deviations = []
        updates = set()
        is_sure = may_be_meant = True
        for counted in uneven:
            updates.add(counted.weighed.gradient.update)
            sizes += counted.sizes
            deviations.append(self._deviation(counted))
            is_sure = is_sure and counted.differs_within_a_rank()
            is_sure = is_sure and not counted.weighed.has_class_weights
            may_be_meant = may_be_meant and counted.has_one_sequence_each
        num_updates = len(updates_with(weighed.gradient for weighed in self.weighed))
        text = (
            f"micro-batches of an update have from {min(sizes):.0f} to {max(sizes):.0f} terms, "
            "and weights do not "
            f"follow them: the gradient is off by {max(deviations):.0%} ({len(updates)} of "
            f"{num_updates} updates)"
        )
        if may_be_meant:
            text += "; each may be one sequence, and sequences may be meant to weigh alike"
            return warning("mean of means", f"{self.label}{text}")
        is_sure = is_sure and len(updates) > num_updates / 2 and median(deviations) > MATTERS
        if is_sure and self.status in ("right", "main", "sum"):
            return self._accuse("mean of means", text, self._lines())
        return warning("mean of means", f"{self.label}{text}")

    def _counted(self, weighed: WeighedUpdate) -> list[CountedLoss]:
        """The main loss of each micro-batch; empty if one is not visible."""
        main = weighed.main
        if len(main) != 1:
            return []
        counted = []
        for loss in weighed.of_kind(main[0]):
            terms = loss.criterion.terms
            if not loss.weight or not terms:
                return []
            rank, number = loss.place
            backward = self.updates[rank][weighed.gradient.update].backwards[number]
            counted.append(CountedLoss(loss.place, loss.weight, terms, backward.rows))
        return counted

    def _deviation(self, counted: CountedUpdate) -> float:
        """Of the gradient from one in which all terms weigh the same, relative to its norm."""
        differences, exact = [], []
        for name in counted.weighed.gradient.leaves:
            actual, right = self._with_equal_terms(counted, name)
            differences.append(float(np.linalg.norm(actual - right)))
            exact.append(float(np.linalg.norm(right)))
        if not any(exact):
            return 0.0
        return float(np.linalg.norm(differences) / np.linalg.norm(exact))

    def _with_equal_terms(self, counted: CountedUpdate, name: str) -> tuple[Vector, Vector]:
        """The gradient of a parameter as it is, and as it would be."""
        total, terms = 0.0, 0.0
        for loss in counted.losses:
            total += loss.weight
            terms += loss.terms
        gradient = counted.weighed.gradient
        coefficients = gradient.coefficients()
        actual, right = np.zeros(1), np.zeros(1)
        for loss in counted.losses:
            rank, number = loss.place
            leaf = self.ranks[rank].leaf_number(name)
            assert leaf is not None, "a parameter of a gradient is sampled on its ranks"
            values = added(self.updates[rank][gradient.update].backwards[number], leaf)
            if values is not None:
                part = coefficients[loss.place] * values
                actual = actual + part
                right = right + total / terms / loss.share * part
        return actual, right


def at(lines: list[str]) -> str:
    """Where in a script something is, to stand behind a sentence; empty if that is not known."""
    known = sorted(set(filter(None, lines)))
    if not known:
        return ""
    return f", at {', '.join(known[:3])}"


def _loss_weights(found: Weight, backward: RecordedBackward) -> Iterator[LossWeight]:
    """The criteria of a micro-batch."""
    factor = hook_factor(backward)
    numbers: dict[tuple[str, str | None], int] = {}
    for criterion in backward.criteria:
        number = numbers.get((criterion.node, criterion.reduction), 0)
        numbers[criterion.node, criterion.reduction] = number + 1
        weight = None
        if factor is not None:
            weight = weight_of(criterion, found.weight * factor)
        kind = criterion.node, criterion.reduction, number
        yield LossWeight(found.place, kind, weight, criterion, backward.place)


def _why_invisible(criterion: RecordedCriterion) -> str:
    """Why the weight of a loss is not known."""
    why = "the number of terms of the loss is not visible"
    if not criterion.is_even:
        why = "the terms of the loss have factors of their own"
    return f"{why}: {described(criterion)}"


def _sum_of_other(weighed: WeighedUpdate, kind: Kind) -> float:
    """What the losses of a kind weigh, or their factors where their terms are not visible."""
    total = weighed.total(kind)
    if total is not None:
        return total
    factors = 0.0
    for loss in weighed.of_kind(kind):
        factors += loss.criterion.factor
    return factors * weighed.gradient.level
