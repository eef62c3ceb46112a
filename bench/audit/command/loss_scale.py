"""Whether the weights of the losses of an update sum to 1, and if not, to what.

The criterion of a micro-batch is a mean or sum of terms. A hook on its autograd node reads its factor f in the loss
that backward was called with, so c f, times the number of terms of a sum, is what the mean loss of that micro-batch
weighs in the gradient. With N micro-batches on each of W ranks these weights are 1 / (N W) if all is right, and sum to
1. They sum to N if the loss is not divided, to 1 / N if it is divided twice, to n / N in a window of n micro-batches
where others have N, and to W or 1 / W if ranks are summed or averaged once too often. A loss may have any other factor
on purpose, so nothing else is called wrong, and a wrong factor must be that of every update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from bench.audit.command.gradient_weights import TOLERANCE, ExplainedGradient, Place
from bench.audit.command.inside.records import Backward, Criterion, Rank
from bench.audit.command.update_windows import (
    AuditedUpdate,
    added,
    batches_per_backward,
    has_distinct_data,
    micro_batches,
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


def described(criterion: Criterion | None) -> str:
    """A criterion and the factor that it receives."""
    if criterion is None or criterion.seed is None:
        return "no criterion found"
    return f"{criterion.node} ({criterion.reduction or 'unknown reduction'}) receives {criterion.seed:.4g}"


def hook_factor(backward: Backward) -> float | None:
    """By what hooks have multiplied the gradient on its way to the parameters; None if that is no single factor."""
    factors = []
    for is_parameter, before, after in backward.hooks:
        if not before or not after or len(before) != len(after):
            continue
        old, new = np.array(before), np.array(after)
        if np.array_equal(old, new):
            continue
        nonzero = old != 0
        ratios = new[nonzero] / old[nonzero]
        is_uniform = (
            len(ratios) and np.ptp(ratios) <= EQUAL * abs(ratios[0]) and not new[~nonzero].any()
        )
        if is_parameter or not is_uniform:
            return None
        factors.append(float(ratios[0]))
    if not factors:
        return 1.0
    if max(factors) - min(factors) > EQUAL * abs(factors[0]):
        return None
    return factors[0]


def weight_of(criterion: Criterion, coefficient: float) -> float | None:
    """What the mean of its terms weighs, by the weight of the micro-gradient; None if that is not visible."""
    if criterion.seed is None or not criterion.is_even:
        return None
    if criterion.reduction in ("mean", "terms"):
        return coefficient * float(criterion.seed)
    if criterion.reduction == "sum" and criterion.terms:
        return coefficient * float(criterion.seed * criterion.terms)
    return None


@dataclass
class LossWeight:
    """What a criterion of a micro-batch weighs."""

    place: Place
    kind: Kind
    weight: float | None
    criterion: Criterion
    line: str
    """Where its backward was called."""


@dataclass
class WeighedUpdate:
    """The losses in one gradient."""

    gradient: ExplainedGradient
    count: int | None
    """Micro-batches of a rank; None if that is not visible."""
    losses: list[LossWeight]

    @property
    def main(self) -> list[Kind]:
        """Kinds of the loss functions of torch, or else of whatever is a mean."""
        kinds = {loss.kind: loss.criterion for loss in self.losses}
        named = [kind for kind, criterion in kinds.items() if criterion.is_named]
        if named:
            return named
        return [kind for kind, criterion in kinds.items() if criterion.reduction == "mean"]

    def is_named(self, kind: Kind) -> bool:
        """Whether it is a loss function of torch, and not any mean."""
        return any(loss.criterion.is_named for loss in self.losses if loss.kind == kind)

    @property
    def others(self) -> list[Kind]:
        main = self.main
        return list(dict.fromkeys(loss.kind for loss in self.losses if loss.kind not in main))

    def total(self, kind: Kind, line: str = "") -> float | None:
        """What all losses of a kind weigh; None if one of them is not visible."""
        total = 0.0
        for loss in self.losses:
            if loss.kind == kind and line in ("", loss.line):
                if loss.weight is None:
                    return None
                total += loss.weight
        return total

    def lines(self, kind: Kind) -> list[str]:
        return list(dict.fromkeys(loss.line for loss in self.losses if loss.kind == kind))


@dataclass
class LossScale:
    """Judges the weights of losses of one optimizer."""

    gradients: list[ExplainedGradient]
    ranks: Mapping[int, Rank]
    updates: Mapping[int, list[AuditedUpdate]]
    """By rank."""
    expect: int | None
    is_low: bool
    """Whether gradients are held in 16 bits."""
    label: str = ""
    """The optimizer, where there are several."""
    status: str = "unknown"
    """``right``, ``main`` if only for the main loss, ``sum`` if weights sum to something else, or ``unknown``."""
    total: float | None = None
    """What the weights sum to in most updates."""
    weighed: list[WeighedUpdate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first = next(iter(self.updates))
        self._beside = ""
        """Sums of several kinds of losses, of which one is 1."""
        self._ratio = batches_per_backward(self.updates[self._first])
        counts = [micro_batches(update, self._ratio) for update in self.updates[self._first]]
        known = sorted(count for count in counts if count)
        self.usual = max(known, key=known.count, default=0)
        """Micro-batches of most updates; 0 if that is not visible."""

    def findings(self) -> Iterator[Finding]:
        """What the weights sum to, and whether all terms weigh the same."""
        resolved = [
            gradient
            for gradient in self._main_gradients()
            if gradient.is_resolved and gradient.weights
        ]
        if not resolved:
            yield self._open("micro-gradients are 0, or too alike to be told apart")
            return
        self.weighed = [self._weigh(gradient) for gradient in resolved]
        doubt = next((why for weighed in self.weighed for why in self._doubts(weighed)), "")
        if doubt and self.ranks[self._first].parallel:
            # Of a pipeline only the last stage knows the loss.
            clear = [weighed for weighed in self.weighed if not any(self._doubts(weighed))]
            if clear:
                self.weighed, doubt = clear, ""
        totals = self._totals()
        if doubt or isinstance(totals, str):
            yield self._open(doubt or str(totals))
        else:
            yield from self._of_totals(totals)
            yield from self._of_others()
        yield from self._of_terms()

    def _main_gradients(self) -> list[ExplainedGradient]:
        """Of each update and rank the one of most parameters: that others differ is said elsewhere."""
        found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], ExplainedGradient] = {}
        for gradient in self.gradients:
            key = gradient.update, gradient.gradient_of, gradient.replicas
            if key not in found or len(gradient.leaves) > len(found[key].leaves):
                found[key] = gradient
        return list(found.values())

    def _open(self, why: str) -> Finding:
        return warning("scale not judged", f"{self.label}{why}")

    def _weigh(self, gradient: ExplainedGradient) -> WeighedUpdate:
        losses = []
        for found in gradient.weights:
            if not found.is_present:
                continue
            backward = self.updates[found.rank][gradient.update].backwards[found.micro_batch]
            factor = hook_factor(backward)
            numbers: dict[tuple[str, str | None], int] = {}
            for criterion in backward.criteria:
                number = numbers.get((criterion.node, criterion.reduction), 0)
                numbers[criterion.node, criterion.reduction] = number + 1
                weight = None
                if factor is not None:
                    weight = weight_of(criterion, found.weight * factor)
                kind = criterion.node, criterion.reduction, number
                losses.append(
                    LossWeight(
                        (found.rank, found.micro_batch), kind, weight, criterion, backward.place
                    )
                )
        count = micro_batches(self.updates[gradient.gradient_of[0]][gradient.update], self._ratio)
        return WeighedUpdate(gradient, count, losses)

    def _doubts(self, weighed: WeighedUpdate) -> Iterator[str]:
        """Why backwards of an update may be parts of a loss instead of micro-batches."""
        for found in weighed.gradient.weights:
            backward = self.updates[found.rank][weighed.gradient.update].backwards[
                found.micro_batch
            ]
            yield from backward.doubts
            if hook_factor(backward) is None:
                yield "hooks change gradients between the loss and the parameters"
            if backward.covered < 1:
                yield self._of_joined(backward)

    def _of_joined(self, backward: Backward) -> str:
        text = "the loss joins rows that have a gradient with others that have none, as a cache of features does"
        if not backward.covered:
            return text
        sums = []
        for weighed in self.weighed:
            totals = [weighed.total(kind) for kind in weighed.main[:1]]
            sums += [total * backward.covered for total in totals if total is not None]
        share = f"{backward.covered:.3g} of the rows of a loss have a gradient"
        if not sums:
            return f"{text}: {share}"
        return f"{text}: {share}, and weights times that share sum to {median(sums):.4g}"

    def _totals(self) -> dict[int, float] | str:
        """By update what the weights of the main loss sum to, of replicas the one farthest from 1; or why not."""
        totals: dict[int, float] = {}
        for weighed in self.weighed:
            main = weighed.main
            if not main:
                shown = described(next((loss.criterion for loss in weighed.losses), None))
                return f"no mean over a visible number of terms: {shown}"
            sums = []
            for kind in main:
                total = weighed.total(kind)
                if total is None:
                    criterion = next(loss.criterion for loss in weighed.losses if loss.kind == kind)
                    why = "the number of terms of the loss is not visible"
                    if not criterion.is_even:
                        why = "the terms of the loss have factors of their own"
                    return f"{why}: {described(criterion)}"
                total = self._of_places(weighed, kind, total)
                if not weighed.is_named(kind):
                    total = abs(total)  # a mean of logarithms may be subtracted
                sums.append(total)
            worst = self._of_kinds(main, sums)
            if isinstance(worst, str):
                return worst
            number = weighed.gradient.update
            if abs(worst - 1) >= abs(totals.get(number, 1.0) - 1):
                totals[number] = worst
        return totals

    def _of_kinds(self, main: list[Kind], sums: list[float]) -> float | str:
        """The sum of several kinds of losses: 1 if each has 1, or all together; or why that is not judged."""
        worst = max(sums, key=lambda total: abs(total - 1))
        if len(main) == 1 or abs(worst - 1) <= self._near(1.0):
            return worst
        is_one_loss = len({kind[:2] for kind in main}) == 1
        if is_one_loss and abs(sum(sums) - 1) <= self._near(1.0):
            return sum(sums)
        right = [total for total in sums if abs(total - 1) <= self._near(1.0)]
        parts = ", ".join(f"{kind[0]} {total:.4g}" for kind, total in zip(main, sums, strict=True))
        if len(right) == 1 and not is_one_loss:
            self._beside = parts
            return right[0]
        return f"the loss has several terms, whose weights sum to {parts}"

    def _of_places(self, weighed: WeighedUpdate, kind: Kind, total: float) -> float:
        """Where backwards at several places each sum to 1, the batch has several losses, each with a right weight."""
        lines = weighed.lines(kind)
        if abs(total - 1) <= self._near(1.0) or len(lines) == 1:
            return total
        parts = [weighed.total(kind, line) or 0.0 for line in lines]
        if not weighed.is_named(kind):
            parts = list(map(abs, parts))
        if all(abs(part - 1) <= self._near(1.0) for part in parts):
            return 1.0
        return total

    def _near(self, value: float) -> float:
        return abs(value) * (NEAR_IN_LOW_PRECISION if self.is_low else TOLERANCE)

    def _of_totals(self, sums: dict[int, float]) -> Iterator[Finding]:
        self.total = median(sums.values())
        wrong = {
            number: total for number, total in sums.items() if abs(total - 1) > self._near(1.0)
        }
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
        updates = self.updates[self._first]
        example = f"weights sum to {wrong[min(wrong)]:.4g} in {len(wrong)} of {num_updates} updates"
        counts = {number: micro_batches(updates[number], self._ratio) or 0 for number in wrong}
        usual, world = self.usual, len(self.gradients[0].replicas)
        is_every = len(wrong) == num_updates
        doubt = self._doubt_of_parts(wrong)
        is_of_others = (
            not is_every and usual > 0 and all(count not in (0, usual) for count in counts.values())
        )
        if (
            not doubt
            and is_of_others
            and self._equals(wrong, {n: count / usual for n, count in counts.items()})
        ):
            return self._other_window(counts, example)
        also = ""
        if world == usual:
            also = f"; or it is scaled by the number of ranks, which is {world} too"
        asked = {step_asked for number in wrong if (step_asked := updates[number].step.asked) > 1}
        if not doubt and is_every and usual > 1:
            if self._equals(wrong, dict(counts)):
                return error(
                    "not divided", f"{self.label}the loss is not divided by N: {example}{also}"
                )
            # Twice 2 may be any 4.
            is_sure = usual > 2 or usual in asked or usual == self.expect
            if is_sure and self._equals(
                wrong, {number: count / usual**2 for number, count in counts.items()}
            ):
                return error(
                    "divided twice", f"{self.label}the loss is divided by N twice: {example}{also}"
                )
        if not doubt and is_every and world > 1:
            if self._equals(wrong, dict.fromkeys(wrong, float(world))):
                return error("scaled by ranks", f"{self.label}with {world} ranks {example}")
            # Where a mean is averaged over ranks, 1 / W is a factor of the loss.
            if self.weighed[0].main[0][1] != "mean" and self._equals(
                wrong, dict.fromkeys(wrong, 1 / world)
            ):
                return error("scaled by ranks", f"{self.label}with {world} ranks {example}")
        return warning("scale", f"{self.label}{example}: {self._meaning(wrong, doubt)}")

    def _other_window(self, counts: dict[int, int], example: str) -> Finding:
        topic, shown = "partial window", min(counts.values())
        if shown > self.usual:
            topic, shown = "overfull window", max(counts.values())
        which = ", ".join(str(number + 1) for number in sorted(counts)[:4])
        verb = "have" if len(counts) > 1 else "has"
        updates = "updates" if len(counts) > 1 else "update"
        text = f"{updates} {which} {verb} {shown} micro-batches where others have {self.usual}: {example}"
        return error(topic, f"{self.label}{text}")

    def _meaning(self, wrong: dict[int, float], doubt: str) -> str:
        if doubt:
            return f"this may be meant, {doubt}"
        total = wrong[min(wrong)]
        clipped = [update.events.count("C") > 0 for update in self.updates[self._first]]
        steps = round(1 / total) if total else 0
        if self.usual == 1 and steps > 1 and abs(total * steps - 1) < NEAR:
            text = f"a step at each micro-batch, as if {steps} were to be accumulated"
            if 0 < sum(clipped) <= len(clipped) / 2:
                text += f", and {sum(clipped)} of {len(clipped)} updates are clipped"
            return f"{text}; or this is meant"
        return "this may be meant"

    def _equals(self, wrong: dict[int, float], expected: Mapping[int, float]) -> bool:
        near = NEAR_IN_LOW_PRECISION if self.is_low else NEAR
        return all(
            expected[number] and abs(total / expected[number] - 1) < near
            for number, total in wrong.items()
        )

    def _doubt_of_parts(self, wrong: dict[int, float]) -> str:
        """Why backwards may be parts of a loss: only the right sum needs no proof that they are micro-batches."""
        if any(not found.is_present for gradient in self.gradients for found in gradient.weights):
            return "since some backwards are not in the gradient"
        if len({loss.kind for weighed in self.weighed for loss in weighed.losses}) > 1:
            return "since the loss has several terms"
        reasons = [self._doubt_of_update(self.updates[self._first][number]) for number in wrong]
        return next(filter(None, reasons), "")

    def _doubt_of_update(self, update: AuditedUpdate) -> str:
        reached = {
            tuple(values is not None for values in backward.added) for backward in update.backwards
        }
        if len({backward.place for backward in update.backwards}) > 1:
            return "since backward is called at several places"
        if len(reached) > 1:
            return "since the backwards of an update reach different parameters"
        if any(
            criterion.in_batch for backward in update.backwards for criterion in backward.criteria
        ):
            return "since the rows of a batch are contrasted with each other"
        is_asked = update.count in (update.step.asked, self.expect)
        if update.count > 1 and not is_asked and self._ratio != 1 and not has_distinct_data(update):
            return "since it is not visible whether backwards have a micro-batch each"
        return ""

    def _of_others(self) -> Iterator[Finding]:
        """What losses beside the main one weigh, which may have any factor."""
        sums: dict[str, list[float]] = {}
        for weighed in self.weighed:
            for kind in weighed.others:
                losses = [loss for loss in weighed.losses if loss.kind == kind]
                weights = [found.weight for found in weighed.gradient.weights]
                seeds = [loss.criterion.seed or 0.0 for loss in losses]
                total = weighed.total(kind)
                if total is None:
                    total = sum(seeds) * max(map(abs, weights), default=0.0)
                sums.setdefault(kind[0], []).append(total)
        for weighed in self.weighed[:1]:
            for found in weighed.gradient.weights:
                backward = self.updates[found.rank][weighed.gradient.update].backwards[
                    found.micro_batch
                ]
                for criterion in backward.injected:
                    seed = (criterion.seed or 0.0) * found.weight
                    sums.setdefault(f"{criterion.node} (injected by a function)", []).append(
                        seed * len(weighed.gradient.weights)
                    )
        sums = {name: totals for name, totals in sums.items() if any(totals)}
        is_right = all(abs(median(totals) - 1) <= self._near(1.0) for totals in sums.values())
        if is_right and not self._beside:
            return
        if self.status == "right":
            self.status = "main"
        parts = ", ".join(f"{name} {median(totals):.4g}" for name, totals in sums.items())
        parts = ", ".join(filter(None, [self._beside, parts]))
        text = f"whether other losses have the right factors is not judged; theirs sum to: {parts}"
        yield warning("other losses", f"{self.label}{text}")

    def _of_terms(self) -> Iterator[Finding]:
        """Whether the terms of an update weigh the same, where micro-batches have different numbers of them."""
        uneven = []
        exact = 0
        for weighed in self.weighed:
            counted = self._counted(weighed)
            sizes = {terms for _, _, terms in counted}
            shares = [weight / terms for _, weight, terms in counted]
            if len(sizes) < 2 or max(shares) <= 0:
                continue
            if 1 - min(shares) / max(shares) < TOLERANCE:
                exact += 1
            else:
                uneven.append((weighed, counted))
        if not uneven:
            if exact:
                yield good(
                    "token-exact",
                    f"{self.label}all terms of the loss of an update have the same weight",
                )
            return
        deviations = [self._deviation(weighed, counted) for weighed, counted in uneven]
        within = [self._differs_within_a_rank(counted) for _, counted in uneven]
        num_updates = len({weighed.gradient.update for weighed in self.weighed})
        num_uneven = len({weighed.gradient.update for weighed, _ in uneven})
        weighted = any(
            loss.criterion.is_weighted for weighed, _ in uneven for loss in weighed.losses
        )
        text = (
            f"{self.label}micro-batches of an update have from {min(c[2] for _, cs in uneven for c in cs):.0f} to "
            f"{max(c[2] for _, cs in uneven for c in cs):.0f} terms, and weights do not follow them: "
            f"the gradient is off by {max(deviations):.0%} ({num_uneven} of {num_updates} updates)"
        )
        is_sure = (
            num_uneven > num_updates / 2
            and median(deviations) > MATTERS
            and all(within)
            and not weighted
        )
        if is_sure and self.status in ("right", "main", "sum"):
            yield error("mean of means", text)
        else:
            yield warning("mean of means", text)

    def _counted(self, weighed: WeighedUpdate) -> list[tuple[Place, float, float]]:
        """Weight and terms of the main loss of each micro-batch; empty if one is not visible."""
        main = weighed.main
        counted = []
        for loss in weighed.losses:
            if loss.kind in main[:1]:
                if not loss.weight or not loss.criterion.terms:
                    return []
                counted.append((loss.place, loss.weight, loss.criterion.terms))
        if len(main) != 1:
            return []
        return counted

    def _differs_within_a_rank(self, counted: list[tuple[Place, float, float]]) -> bool:
        """Otherwise it is the mean over ranks that has unequal parts."""
        by_rank: dict[int, list[float]] = {}
        for (rank, _), weight, terms in counted:
            by_rank.setdefault(rank, []).append(weight / terms)
        return any(1 - min(shares) / max(shares) > TOLERANCE for shares in by_rank.values())

    def _deviation(
        self, weighed: WeighedUpdate, counted: list[tuple[Place, float, float]]
    ) -> float:
        """Of the gradient from one in which all terms weigh the same, relative to the norm of that."""
        total, terms = (
            sum(weight for _, weight, _ in counted),
            sum(number for _, _, number in counted),
        )
        coefficients = {
            (found.rank, found.micro_batch): found.weight for found in weighed.gradient.weights
        }
        differences, exact = [], []
        number = weighed.gradient.update
        for name in weighed.gradient.leaves:
            sums: list[np.ndarray] = []
            for place, weight, count in counted:
                leaf = self._leaf(place[0], name)
                values = added(self.updates[place[0]][number].backwards[place[1]], leaf)
                if values is None:
                    continue
                wanted = total * count / terms / weight
                part = coefficients[place] * np.array(values, dtype=float)
                sums.append(np.stack([part, wanted * part]))
            if sums:
                actual, right = np.sum(sums, axis=0)
                differences.append(np.linalg.norm(actual - right))
                exact.append(np.linalg.norm(right))
        return float(np.linalg.norm(differences) / np.linalg.norm(exact)) if any(exact) else 0.0

    def _leaf(self, rank: int, name: str) -> int:
        return next(
            number for number, leaf in enumerate(self.ranks[rank].leaves) if leaf.name == name
        )
