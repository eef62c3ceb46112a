"""What is wrong with the updates of one optimizer, as far as its coefficients show it."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import mode

import numpy as np

from bench.audit.command.gradient_weights import (
    Explained,
    ExplainedGradient,
    explain,
    replica_groups,
)
from bench.audit.command.inside.records import Backward, End, Rank, Values
from bench.audit.command.loss_scale import LossScale
from bench.audit.command.update_windows import AuditedUpdate, added, is_finite, kind
from bench.findings import Finding, Level, error, good, note, warning
from bench.formatting import plural

LOW = {"bfloat16", "float16"}
ROUNDED = 1e-4
"""Larger relative residuals of gradients in float32 come from rounding to fewer bits."""
MOST_ROUNDED = 1e-2
SAME_VALUES = 1e-5
"""Relative distance of parameters that are the same on two ranks."""
EQUAL = 0.01
MOST_NAMES = 3
"""Parameters that a finding names."""
SCALED = 0.1
"""How near a ratio of gradients is to the factor of a loss scaler, relative to it."""


def names(leaves: list[str]) -> str:
    """The first few parameters."""
    more = len(leaves) - MOST_NAMES
    text = ", ".join(leaves[:MOST_NAMES])
    return f"{text} and {more} more" if more > 0 else text


class OptimizerAudit:
    """The findings of one optimizer: errors are certain, warnings are not, the rest are facts."""

    def __init__(
        self,
        number: int,
        ranks: Mapping[int, Rank],
        updates: Mapping[int, list[AuditedUpdate]],
        others: Mapping[int, list[AuditedUpdate]],
        expect: int | None,
        is_idle_elsewhere: bool = False,
    ) -> None:
        self._is_idle_elsewhere = is_idle_elsewhere
        """Whether other ranks run backwards, and take none of its steps."""
        self.number, self.ranks, self.updates, self.expect = number, ranks, dict(updates), expect
        self._others = others
        """Updates of other optimizers of the first rank, by number."""
        self.first = next(iter(self.updates))
        """The rank of which most is said."""
        self.mine = self.updates[self.first]
        self.name = self.mine[0].step.name
        self.label = ""
        """What stands before its findings, where there are several optimizers."""
        if others:
            self.label = f"{self.title()}: "
        self.usual = mode([update.count for update in self.mine])
        """Backwards of most updates."""
        self.held = {
            dtype
            for update in self.mine
            for backward in update.backwards
            for dtype in backward.held
        }
        """Dtypes in which gradients are held between backwards."""
        self.gradients: list[ExplainedGradient] = []
        """Where their weights mean something."""
        self.scale: LossScale | None = None
        self.status = "unknown"
        """``unknown``, ``present`` if only which micro-batches are in it, or as in LossScale."""
        self.findings = list(self._all())

    def title(self) -> str:
        """Its name with that of what it trains."""
        if not self._others:
            return self.name
        trained = self._owned_names()
        shared = (
            posixpath.commonpath([name.replace(".", "/") for name in trained]) if trained else ""
        )
        if len(trained) > 1 and shared:
            return f"{self.name} of {shared.replace('/', '.')}"
        return f"{self.name} of {names(trained)}" if trained else self.name

    def _say(self, topic: str, text: str) -> Finding:
        return warning(topic, f"{self.label}{text}")

    def _accuse(self, topic: str, text: str) -> Finding:
        return error(topic, f"{self.label}{text}")

    def _all(self) -> Iterator[Finding]:
        obstacles = [why for update in self.mine for why in update.step.obstacles]
        if any(update.moves for update in self.mine):
            obstacles.append("parameters are moved between the backwards of an update, as by SAM")
        if obstacles:
            yield self._say("not judged", obstacles[0])
            return
        differences = list(self._of_numbers())
        yield from differences
        if self._is_idle_elsewhere or any(found.level is Level.ERROR for found in differences):
            return
        yield from self._of_repeats()
        yield from self._of_clipping()
        yield from self._of_rates()
        yield from self._of_gradients()
        if self.usual > 1 and (low := LOW & self.held) and self.gradients:
            text = f"gradients of {self.usual} micro-batches are summed in {'/'.join(sorted(low))}"
            yield self._accuse("low precision", text)

    # What ranks do differently

    def drifts(self, leaf: str) -> bool | None:
        """Whether replicas of a parameter end with different values; None if that cannot be seen."""
        found = {}
        for rank in self.updates:
            number = self._leaf(rank, leaf)
            if number is not None:
                found[rank] = number
        leaves = {rank: self.ranks[rank].leaves[number] for rank, number in found.items()}
        result: bool | None = None
        for group in replica_groups(leaves):
            values = [self._last_values(rank, found[rank]) for rank in group]
            known = [value for value in values if value is not None]
            if (
                len(group) < 2
                or len(known) < len(group)
                or len({len(value) for value in known}) > 1
            ):
                continue
            result = bool(result) or not all(_same(known[0], value) for value in known[1:])
        return result

    def _leaf(self, rank: int, name: str) -> int | None:
        leaves = self.ranks[rank].leaves
        return next((number for number, leaf in enumerate(leaves) if leaf.name == name), None)

    def _last_values(self, rank: int, leaf: int) -> Values:
        """Of a parameter: when the process ended, or else before the last step that is sampled."""
        ends = [
            event
            for event in self.ranks[rank].events
            if isinstance(event, End) and leaf < len(event.end)
        ]
        if ends and ends[-1].end[leaf] is not None:
            return ends[-1].end[leaf]
        updates = self.updates.get(rank, [])
        if len(updates) > 1 and leaf < len(updates[-1].step.start):
            return updates[-1].step.start[leaf]
        return None

    def _of_numbers(self) -> Iterator[Finding]:
        """Ranks with the same parameters that take other updates, or use other numbers of micro-batches."""
        counts = {
            rank: [update.count for update in updates] for rank, updates in self.updates.items()
        }
        differ = any(len(set(numbers)) > 1 for numbers in zip(*counts.values(), strict=False))
        if not differ and len({len(numbers) for numbers in counts.values()}) == 1:
            return
        text = "; ".join(f"rank {rank}: {pattern(numbers)}" for rank, numbers in counts.items())
        drifting = self._drifting()
        if drifting and self._are_replicas():
            text = (
                f"backwards per update differ, {text}: {names(drifting)} end with different values"
            )
            yield self._accuse("ranks differ", text)
        elif all(self.drifts(leaf) is False for leaf in self._owned_names()):
            yield note(
                "ranks differ",
                f"{self.label}backwards per update differ, {text}; replicas stay the same",
            )
        else:
            yield self._say(
                "ranks differ",
                f"backwards per update differ, {text}; whether replicas drift is not visible",
            )

    def _drifting(self) -> list[str]:
        return [leaf for leaf in self._owned_names() if self.drifts(leaf)]

    def _owned_names(self) -> list[str]:
        return self._names(self.mine[0].step.owned)

    def _are_replicas(self) -> bool:
        """Whether gradients are reduced at all, so that ranks are meant to have the same."""
        return any(backward.reduced for update in self.mine for backward in update.backwards)

    # Events that coefficients or a changed gradient confirm

    def _of_repeats(self) -> Iterator[Finding]:
        again = [update for update in self.mine if update.num_steps > 1]
        if again:
            text = (
                f"step() runs {again[0].num_steps} times with one gradient ({len(again)} of "
                f"{len(self.mine)} updates)"
            )
            yield self._say("steps again", text)

    def _of_clipping(self) -> Iterator[Finding]:
        # In a longer window a step may have been skipped after clipping.
        early = [
            update for update in self.mine if update.changed_early() and update.count <= self.usual
        ]
        if early:
            share = f"{len(early)} of {len(self.mine)} updates"
            clipped = names(self._names(early[0].changed_early()))
            text = f"in {share} gradients are clipped before the last backward: {early[0].events} ({clipped})"
            yield self._accuse("clips too early", text)
        scaled = [found for update in self.mine if (found := self._clips_scaled(update))]
        if scaled:
            scale, bound = scaled[0]
            share = f"{len(scaled)} of {len(self.mine)} updates"
            text = (
                f"in {share} gradients are clipped at {bound:g} while they have the factor "
                f"{scale:g} of the loss scaler"
            )
            if bound < scale / 100:
                yield self._accuse("clips scaled gradients", f"{text}: unscale_ comes first")
            else:
                yield self._say("clips scaled gradients", text)

    def _clips_scaled(self, update: AuditedUpdate) -> tuple[float, float] | None:
        """The factor of a loss scaler that was in gradients when they were clipped, and the bound."""
        for _, clip in update.clips:
            if (
                clip.loss_scale is None
                or clip.before is None
                or clip.bound is None
                or clip.loss_scale < 2
            ):
                continue
            is_changed = any(factor is not None and factor > 1.0001 for factor in clip.factors)
            used = update.used.get(clip.before_leaf)
            if not is_changed or used is None or not np.isfinite(used).all() or not used.any():
                continue
            ratio = float(np.linalg.norm(clip.before) / np.linalg.norm(used))
            if abs(ratio / clip.loss_scale - 1) < SCALED:
                return clip.loss_scale, clip.bound
        return None

    def _of_rates(self) -> Iterator[Finding]:
        moving: list[int] = []
        changing = 0
        last: float | None = None
        for number, update in enumerate(self.mine, 1):
            rates = update.known_rates()
            within = sum(first != second for first, second in pairwise(rates))
            changing += within > 0 or (last is not None and rates[:1] not in ([], [last]))
            if update.count > 1 and within >= update.count - 1:
                moving.append(number)
            last = rates[-1] if rates else None
        # A schedule that has come to its end changes nothing any more.
        if len(moving) > 1 and len(moving) >= changing - 1:
            which = ", ".join(map(str, moving[:4]))
            more = f" and {len(moving) - 4} more" if len(moving) > 4 else ""
            text = f"the schedule steps {self.usual} times per update"
            where = f"the learning rate changes at every backward of updates {which}{more}"
            yield self._say("schedule", f"{text}: {where}")

    def _names(self, leaves: list[int]) -> list[str]:
        return [self.ranks[self.first].leaves[leaf].name for leaf in leaves]

    # Coefficients

    def _of_gradients(self) -> Iterator[Finding]:
        """What the coefficients show, and how far they are known."""
        found = Explained()
        for number in range(min(len(updates) for updates in self.updates.values())):
            updates = {rank: updates[number] for rank, updates in self.updates.items()}
            found.add(explain(self.ranks, updates, self.number))
        if self._is_without_gradient():
            yield self._accuse(
                "no gradient", "the gradients that the optimizer is given are None or 0"
            )
            return
        if found.unexplained:
            worst = max(found.unexplained.values())
            text = (
                f"up to {worst:.0%} of a gradient is no sum of the micro-gradients that were seen"
            )
            yield self._say("not judged", f"{text}: {names(sorted(found.unexplained))}")
        elif not found.gradients:
            reasons = found.reasons or ["no gradient that the optimizer used was found"]
            yield self._say("weights unknown", reasons[0])
        self.gradients = found.gradients
        if self.gradients:
            yield from self._of_weights(bool(found.unexplained))

    def _of_weights(self, is_in_part: bool) -> Iterator[Finding]:
        """Faults of presence; only without these it matters what weights sum to."""
        findings = [
            *self._of_alone(),
            *self._of_foreign(),
            *self._of_left(),
            *self._of_differences(),
        ]
        is_clipped_early = any(update.changed_early() for update in self.mine)
        if not is_clipped_early:
            findings += self._of_lost()
        yield from findings
        if is_clipped_early or any(found.level is Level.ERROR for found in findings):
            return
        self.status = "present"
        mixed, unequal = list(self._of_mixed_losses()), list(self._of_unequal())
        yield from [*mixed, *unequal]
        yield from self._of_rounding()
        self.scale = LossScale(
            self.gradients, self.ranks, self.updates, self.expect, bool(LOW & self.held), self.label
        )
        judged = list(self.scale.findings())
        if unequal:
            return
        if mixed:
            yield from (found for found in judged if found.level is not Level.GOOD)
            return
        yield from judged
        doubts = [
            found for found in findings if found.level is Level.WARNING and found.topic != "skipped"
        ]
        is_clear = not is_in_part and not doubts
        if is_clear and self.scale.status != "unknown":
            self.status = self.scale.status

    def _is_without_gradient(self) -> bool:
        """Whether all that is used is 0, although backwards add to it."""
        has_added = False
        seen = False
        for update in self.mine:
            for leaf, values in update.used.items():
                known = values[~np.isnan(values)]
                seen = seen or len(known) > 0
                if known.any():
                    return False
                for backward in update.backwards:
                    sample = added(backward, leaf)
                    has_added = has_added or (sample is not None and any(sample))
        return seen and has_added

    def _of_alone(self) -> Iterator[Finding]:
        """Ranks whose parameters have the same names, and other values, though they are no parts of one tensor."""
        if len(self.updates) < 2 or self.ranks[self.first].parallel:
            return
        for gradient in self.gradients[:1]:
            number = self._leaf(self.first, gradient.leaves[0])
            same = [
                rank
                for rank in self.updates
                if number is not None
                and (other := self._leaf(rank, gradient.leaves[0])) is not None
                and self.ranks[rank].leaves[other].shape
                == self.ranks[self.first].leaves[number].shape
            ]
            if len(same) > len(gradient.replicas):
                text = "ranks begin with different values of the same parameters: no replicas, or never made equal"
                yield self._say("not judged", f"{text}: {names(gradient.leaves)}")

    def _of_foreign(self) -> Iterator[Finding]:
        """Micro-batches of replicas that are missing in a gradient, though their own rank has them."""
        present: dict[tuple[int, str], set[tuple[int, int]]] = {}
        for gradient in self.gradients:
            for leaf in gradient.leaves:
                here = {
                    (found.rank, found.micro_batch)
                    for found in gradient.weights
                    if found.is_present
                }
                present.setdefault((gradient.update, leaf), set()).update(here)
        missing: dict[str, list[tuple[int, int, int, int]]] = {}
        for gradient in self.gradients:
            for found in gradient.weights:
                for leaf in gradient.leaves:
                    if (
                        not found.is_present
                        and (found.rank, found.micro_batch) in present[gradient.update, leaf]
                    ):
                        place = (
                            gradient.update,
                            gradient.gradient_of[0],
                            found.rank,
                            found.micro_batch,
                        )
                        missing.setdefault(leaf, []).append(place)
        if not missing:
            return
        leaves = list(missing)
        places = [place for found in missing.values() for place in found]
        numbers = sorted({number + 1 for *_, number in places})
        updates = {update for update, *_ in places}
        share = f"{len(updates)} of {len({gradient.update for gradient in self.gradients})} updates"
        which = self._which(leaves)
        ranks = sorted({rank for _, rank, *_ in places})
        if all(self.drifts(leaf) is False for leaf in leaves):
            text = f"gradients of {which} differ between ranks, whose parameters are the same later ({share})"
            yield self._say(
                "not reduced", f"{text}: parameters may be averaged or broadcast instead"
            )
            return
        text = (
            f"of rank {pattern(ranks)} missing on other ranks in the gradient of {which} ({share})"
        )
        if len(numbers) >= self.usual:
            yield self._accuse("not reduced", f"micro-batches {text}: replicas drift apart")
        else:
            text = f"micro-batches {numbers} of {self.usual} {text}"
            yield self._accuse("partly reduced", f"{text}: replicas drift apart")

    def _which(self, leaves: list[str]) -> str:
        """Names of parameters, or that it is all of them."""
        everything = {leaf for gradient in self.gradients for leaf in gradient.leaves}
        if everything <= set(leaves):
            return (
                f"all {len(everything)} sampled parameters"
                if len(everything) > 1
                else names(leaves)
            )
        return names(leaves)

    def _of_lost(self) -> Iterator[Finding]:
        """Micro-batches that are in no gradient, though they have one."""
        weights: dict[tuple[int, int, int], list[bool]] = {}
        for gradient in self.gradients:
            for found in gradient.weights:
                weights.setdefault((gradient.update, found.rank, found.micro_batch), []).append(
                    found.is_present
                )
        lost: dict[tuple[int, int], list[int]] = {}
        for (update, rank, number), present in sorted(weights.items()):
            if not any(present):
                lost.setdefault((update, rank), []).append(number)
        found_topics: set[str] = set()
        for (number, rank), places in lost.items():
            finding = self._of_lost_places(self.updates[rank][number], number, rank, places)
            if finding.topic not in found_topics:
                found_topics.add(finding.topic)
                yield finding

    def _of_lost_places(
        self, update: AuditedUpdate, number: int, rank: int, places: list[int]
    ) -> Finding:
        cleared = " (cleared at Z)" if "Z" in update.events else ""
        shown = [place + 1 for place in places]
        text = f"micro-batches {shown} of update {number + 1} have weight 0 on rank {rank}: {update.events}{cleared}"
        lost = [update.backwards[place] for place in places]
        rest = [backward for backward in update.backwards if backward not in lost]
        if all(self._is_used_elsewhere(backward, rank) for backward in lost):
            if {backward.place for backward in lost} & {backward.place for backward in rest}:
                return self._say("discarded", f"{text}: only another optimizer uses them")
            return good("other loss", f"{self.label}{text}: another optimizer uses them")
        why = self._why_discarded(lost, rest)
        if not why and len(places) % self.usual == 0 and update.count > self.usual:
            return self._say("skipped", f"{text}, as if an update was skipped")
        if not why and number == 0 and self._only_first(rank):
            why = "in the first update only"
        if why:
            return self._say("discarded", f"{text}: {why}")
        return self._accuse("lost", text)

    def _why_discarded(self, lost: list[Backward], rest: list[Backward]) -> str:
        """Why it may be right that these are in no gradient; empty if nothing speaks for it."""
        if any(not is_finite(backward) for backward in rest):
            return "micro-batches beside them are not finite"
        if rest and not {kind(backward) for backward in lost} <= {
            kind(backward) for backward in rest
        }:
            return "their loss is another one"
        return ""

    def _only_first(self, rank: int) -> bool:
        """Whether nothing is lost after the first update, as after a backward that only warms up."""
        lost = {
            gradient.update
            for gradient in self.gradients
            for found in gradient.weights
            if found.rank == rank and not found.is_present
        }
        return lost == {0} and len(self.mine) > 1

    def _is_used_elsewhere(self, backward: Backward, rank: int) -> bool:
        """Whether an optimizer of other parameters uses it."""
        if rank != self.first:
            return bool(self._others)
        return any(
            other is backward
            for updates in self._others.values()
            for update in updates
            for other in update.backwards
        )

    def _of_left(self) -> Iterator[Finding]:
        """What was left of an earlier gradient."""
        old = [gradient for gradient in self.gradients if gradient.left]
        if not old:
            return
        share = (
            f"{len({gradient.update for gradient in old})} of "
            f"{len({gradient.update for gradient in self.gradients})}"
        )
        leaves = sorted({leaf for gradient in old for leaf in gradient.left_in})
        text = f"{share} updates contain the gradient of the update before ({self._which(leaves)})"
        ratios = [gradient.left / gradient.level for gradient in old if gradient.level]
        is_whole = all(abs(ratio - 1) < EQUAL for ratio in ratios)
        if is_whole or all(abs(gradient.left - 1) < EQUAL for gradient in old):
            yield self._accuse("not cleared", text)
        else:
            yield self._say(
                "not cleared", f"{text}, with a weight of {old[0].left:.3g}: this may be meant"
            )

    def _of_differences(self) -> Iterator[Finding]:
        """Parameters whose coefficients are those of the others times a factor."""
        found: dict[str, float] = {}
        for gradient in self.gradients:
            groups = [
                other
                for other in self.gradients
                if (other.update, other.gradient_of, other.replicas)
                == (gradient.update, gradient.gradient_of, gradient.replicas)
            ]
            main = max(groups, key=lambda group: len(group.leaves))
            if gradient is not main and main.level:
                factor = _factor(gradient, main)
                if factor is not None and abs(factor - 1) > EQUAL:
                    found |= dict.fromkeys(gradient.leaves, factor)
        by_factor: dict[str, list[str]] = {}
        for leaf, factor in found.items():
            by_factor.setdefault(f"{factor:.3g}", []).append(leaf)
        for shown, leaves in list(by_factor.items())[:MOST_NAMES]:
            text = f"the gradient of {names(leaves)} is {shown} times what the others' weights make of it"
            yield self._say("other weights", f"{text}: this may be meant")

    def _of_mixed_losses(self) -> Iterator[Finding]:
        """A gradient with the backwards of a loss that trains other parameters, besides those of its own."""
        for other in self._others.values():
            theirs = {id(backward) for update in other for backward in update.backwards}
            for gradient in self.gradients:
                if self.first not in gradient.gradient_of:
                    continue
                update = self.mine[gradient.update]
                present = [
                    update.backwards[found.micro_batch]
                    for found in gradient.weights
                    if found.is_present and found.rank == self.first
                ]
                foreign = [backward for backward in present if id(backward) in theirs]
                if foreign and len(foreign) < len(present):
                    yield self._mixed(
                        gradient, foreign, len(present) - len(foreign), other[0].step.name
                    )
                    return

    def _mixed(
        self, gradient: ExplainedGradient, foreign: list[Backward], num_own: int, optimizer: str
    ) -> Finding:
        of_other = (
            f"{plural(len(foreign), 'backward')} of a loss ({foreign[0].place}) that trains "
            f"others by {optimizer}"
        )
        text = f"the gradient of {self._which(gradient.leaves)} has {of_other}, besides {num_own} of their own"
        return self._say("mixed losses", f"{text}: wrong if that loss is not meant to train them")

    def _of_rounding(self) -> Iterator[Finding]:
        residual = max(gradient.residual for gradient in self.gradients)
        reduced = {
            name
            for update in self.mine
            for backward in update.backwards
            for name in backward.reduced
        }
        is_low = LOW & self.held or any(dtype in name for dtype in LOW for name in reduced)
        if not is_low and ROUNDED < residual <= MOST_ROUNDED:
            text = f"gradients differ from the sum of micro-gradients by {residual:.1e}, as if they were rounded"
            yield self._say("rounded", text)

    def _of_unequal(self) -> Iterator[Finding]:
        """A sum that is divided before more is added to it."""
        shown: tuple[list[float], ExplainedGradient] | None = None
        divided = True
        for gradient in self.gradients:
            for rank in gradient.gradient_of:
                weights = _own_weights(gradient, rank)
                if (
                    len(weights) < 2
                    or not gradient.is_resolved
                    or not self._have_equal_losses(rank, gradient.update)
                ):
                    continue
                if max(weights) - min(weights) > 5 * EQUAL * max(map(abs, weights)):
                    shown = shown or (weights, gradient)
                    divided = divided and _is_divided_again(weights)
        if shown is None or any(update.changed_early() for update in self.mine):
            return
        weights, gradient = shown
        text = (
            f"micro-batches of update {gradient.update + 1} on rank {gradient.gradient_of[0]} weigh "
            f"{' '.join(f'{weight:.4g}' for weight in weights[:12])}"
        )
        if divided:
            yield self._accuse(
                "divided again", f"{text}: the sum so far is divided before more is added to it"
            )
        else:
            yield self._say("unequal weights", f"{text}: this may be meant")

    def _have_equal_losses(self, rank: int, number: int) -> bool:
        backwards = self.updates[rank][number].backwards
        seeds = {round(c.seed or 0.0, 12) for backward in backwards for c in backward.criteria[:1]}
        return len({kind(backward) for backward in backwards}) == 1 and len(seeds) <= 1


def _same(first: Values, second: Values) -> bool:
    return bool(np.allclose(first, second, rtol=SAME_VALUES, atol=1e-7, equal_nan=True))


def _factor(gradient: ExplainedGradient, main: ExplainedGradient) -> float | None:
    """By what all weights differ; None if not by one factor."""
    known = {
        (found.rank, found.micro_batch): found.weight for found in main.weights if found.is_present
    }
    found = {(weight.rank, weight.micro_batch): weight.weight for weight in gradient.weights}
    ratios = [found[place] / known[place] for place in found.keys() & known.keys()]
    if not ratios or max(ratios) - min(ratios) > EQUAL * max(map(abs, ratios)):
        return None
    return float(np.median(ratios))


def _own_weights(gradient: ExplainedGradient, rank: int) -> list[float]:
    """Of the micro-batches of a rank that are in the gradient, in order."""
    return [found.weight for found in gradient.weights if found.rank == rank and found.is_present]


def _is_divided_again(weights: list[float]) -> bool:
    """Whether each group of equal weights is the one before times the number of micro-batches in a group."""
    groups = [[weights[0]]]
    for weight in weights[1:]:
        if abs(weight - groups[-1][-1]) <= EQUAL * abs(weight):
            groups[-1].append(weight)
        else:
            groups.append([weight])
    sizes = {len(group) for group in groups}
    ratios = [second[0] / first[0] for first, second in pairwise(groups) if first[0]]
    if len(sizes) != 1 or len(groups) < 2 or not ratios:
        return False
    divisor = max(sizes.pop(), len(groups) if len(groups) == len(weights) else 0)
    return divisor > 1 and all(abs(ratio / divisor - 1) < EQUAL for ratio in ratios)


def pattern(counts: list[int]) -> str:
    """The first few numbers."""
    return " ".join(map(str, counts[:6])) + (" ..." if len(counts) > 6 else "")
