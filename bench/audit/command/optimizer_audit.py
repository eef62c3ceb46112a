"""What is wrong with the updates of one optimizer, as far as its coefficients show it."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from statistics import mode

import numpy as np

from bench.audit.command.gradient_weights import (
    Explained,
    ExplainedGradient,
    Place,
    explain,
    largest_residual,
    leaves_of,
    replica_groups,
    updates_with,
)
from bench.audit.command.inside.records import NOT_SCALAR
from bench.audit.command.loss_scale import LossScale, at
from bench.audit.command.recorded_events import RecordedBackward, RecordedRank, Vector
from bench.audit.command.update_windows import (
    AuditedUpdate,
    added,
    batches_per_backward,
    changed_leaves,
    counts_of,
    data_of,
    is_finite,
    kind,
    micro_batches,
    places_of,
)
from bench.findings import Finding, Level, error, good, note, warning
from bench.formatting import plural, some

LOW = {"bfloat16", "float16"}
ROUNDED = 1e-4
"""Larger relative residuals of gradients in float32 come from rounding to fewer bits."""
MOST_ROUNDED = 1e-2
SAME_VALUES = 1e-5
"""Relative distance of parameters that are the same on two ranks."""
EQUAL = 0.01
MANY = 4
"""Micro-batches whose sum in 16 bits is wrong; the sum of fewer is doubtful."""
MOST_NAMES = 3
"""Parameters that a finding names."""
WRAPPERS = {"DistributedDataParallel", "FSDPParam", "DeepSpeedEngine"}
"""Names of facts: what reduces gradients."""
SCALED = 0.1
"""How near a ratio of gradients is to the factor of a loss scaler, relative to it."""


def names(leaves: list[str]) -> str:
    """The first few parameters."""
    more = len(leaves) - MOST_NAMES
    text = ", ".join(leaves[:MOST_NAMES])
    if more > 0:
        text += f" and {more} more"
    return text


class OptimizerAudit:
    """The findings of one optimizer: errors are certain, warnings are not, the rest are facts."""

    def __init__(
        self,
        number: int,
        ranks: Mapping[int, RecordedRank],
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
        self.usual = mode(counts_of(self.mine))
        """Backwards of most updates."""
        self.backwards = list(_backwards_of(self.mine))
        self._is_clipped_early = any(update.changed_early() for update in self.mine)
        self.held = self._held_dtypes()
        """Dtypes in which its gradients are held between backwards."""
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
        if not trained:
            return self.name
        if len(trained) > 1:
            shared = posixpath.commonpath([name.replace(".", "/") for name in trained])
            if shared:
                return f"{self.name} of {shared.replace('/', '.')}"
        return f"{self.name} of {names(trained)}"

    def _say(self, topic: str, text: str) -> Finding:
        return warning(topic, f"{self.label}{text}")

    def _accuse(self, topic: str, text: str, *lines: str) -> Finding:
        """``lines``: of the script, with what is accused."""
        return error(topic, f"{self.label}{text}{at(list(lines))}")

    def _all(self) -> Iterator[Finding]:
        obstacle = self._obstacle()
        if obstacle:
            yield self._say("not judged", obstacle)
            return
        differences = list(self._of_numbers())
        yield from differences
        if self._is_idle_elsewhere or _has_error(differences):
            return
        yield from self._of_repeats()
        yield from self._of_clipping()
        yield from self._of_rates()
        yield from self._of_gradients()
        yield from self._of_low_precision()

    def _held_dtypes(self) -> set[str]:
        """Empty for ZeRO, which adds them to sums of its own after each backward."""
        if self.ranks[self.first].is_zero:
            return set()
        owned: set[int] = set()
        for update in self.mine:
            owned.update(update.step.owned)
        dtypes = set()
        for backward in self.backwards:
            for dtype, leaves in backward.held.items():
                if not owned.isdisjoint(leaves):
                    dtypes.add(dtype)
        return dtypes

    def _of_low_precision(self) -> Iterator[Finding]:
        """Sums in 16 bits: of few, each rounding is no more than that of a gradient itself."""
        low = "/".join(sorted(LOW & self.held))
        ratio = batches_per_backward(self.mine)
        counts = []
        for update in self.mine:
            count = micro_batches(update, ratio)
            if count is None:
                count = update.count
            counts.append(count)
        usual = mode(counts)
        if usual < 2 or not low or not self.gradients:
            return
        text = f"gradients of {usual} micro-batches are summed in {low}"
        if usual < MANY:
            yield self._say("low precision", text)
        else:
            yield self._accuse("low precision", text)

    def _obstacle(self) -> str:
        """Why its updates are not judged; empty if nothing speaks against it."""
        for update in self.mine:
            for obstacle in update.step.obstacles:
                return obstacle
        if any(update.moves for update in self.mine):
            return "parameters are moved between the backwards of an update, as by SAM"
        return ""

    # What ranks do differently

    def drifts(self, name: str) -> bool | None:
        """Whether replicas of a parameter end with different values.

        None if that cannot be seen.
        """
        numbers = self._leaf_numbers(name)
        result: bool | None = None
        for group in replica_groups(leaves_of(self.ranks, numbers)):
            values = []
            for rank in group:
                last = self._last_values(rank, numbers[rank])
                if last is not None:
                    values.append(last)
            lengths = set(map(len, values))
            if len(group) < 2 or len(values) < len(group) or len(lengths) > 1:
                continue
            is_same = all(_same(values[0], value) for value in values[1:])
            result = bool(result) or not is_same
        return result

    def _leaf_numbers(self, name: str) -> dict[int, int]:
        """Of a parameter, by rank that samples it."""
        numbers = {}
        for rank in self.updates:
            number = self.ranks[rank].leaf_number(name)
            if number is not None:
                numbers[rank] = number
        return numbers

    def _last_values(self, rank: int, leaf: int) -> Vector | None:
        """Of a parameter: when the process ended, or else before the last step that is sampled."""
        end = self.ranks[rank].end
        if end is not None and leaf < len(end.end):
            values = end.end[leaf]
            if values is not None:
                return values
        updates = self.updates.get(rank, [])
        if len(updates) > 1 and leaf < len(updates[-1].step.start):
            return updates[-1].step.start[leaf]
        return None

    def _of_numbers(self) -> Iterator[Finding]:
        """Ranks with the same parameters and other updates, or other numbers of micro-batches."""
        usual = counts_of(self.mine)
        is_same = True
        shown = []
        for rank, updates in self.updates.items():
            counts = counts_of(updates)
            is_same = is_same and counts == usual
            shown.append(f"rank {rank}: {pattern(counts)}")
        if is_same:
            return
        text = f"backwards per update differ, {'; '.join(shown)}"
        drifting = list(filter(self.drifts, self._owned_names()))
        if drifting and self._are_replicas():
            line = self.mine[0].step.place
            text = f"{text}: {names(drifting)} end with different values"
            yield self._accuse("ranks differ", text, line)
        elif self._stay_the_same(self._owned_names()):
            yield note("ranks differ", f"{self.label}{text}; replicas stay the same")
        else:
            yield self._say("ranks differ", f"{text}; whether replicas drift is not visible")

    def _stay_the_same(self, leaves: Iterable[str]) -> bool:
        """Whether replicas of all of these are seen to end with the same values."""
        return all(self.drifts(leaf) is False for leaf in leaves)

    def _owned_names(self) -> list[str]:
        return self._names(self.mine[0].step.owned)

    def _are_replicas(self) -> bool:
        """Whether gradients are reduced at all, so that ranks are meant to have the same."""
        return any(backward.reduced for backward in self.backwards)

    # Events that coefficients or a changed gradient confirm

    def _of_repeats(self) -> Iterator[Finding]:
        again = []
        for update in self.mine:
            if update.num_steps > 1:
                again.append(update)
        if again:
            share = f"{len(again)} of {len(self.mine)} updates"
            text = f"step() runs {again[0].num_steps} times with one gradient ({share})"
            yield self._say("steps again", f"{text}{at([again[0].step.place])}")

    def _of_clipping(self) -> Iterator[Finding]:
        # In a longer window a step may have been skipped after clipping.
        early = []
        for update in self.mine:
            if update.changed_early() and update.count <= self.usual:
                early.append(update)
        if early:
            share = f"{len(early)} of {len(self.mine)} updates"
            clipped = names(self._names(early[0].changed_early()))
            text = (
                f"in {share} gradients are clipped before the last backward: {early[0].events} "
                f"({clipped})"
            )
            yield self._accuse("clips too early", text, early[0].early_clip().place)
        yield from self._of_scaled_clipping()

    def _of_scaled_clipping(self) -> Iterator[Finding]:
        scaled = []
        for update in self.mine:
            found = self._clips_scaled(update)
            if found is not None:
                scaled.append(found)
        if not scaled:
            return
        scale, bound, line = scaled[0]
        text = (
            f"in {len(scaled)} of {len(self.mine)} updates gradients are clipped at {bound:g} "
            "while they have the "
            f"factor {scale:g} of the loss scaler"
        )
        if bound < scale / 100:
            yield self._accuse("clips scaled gradients", f"{text}: unscale_ comes first", line)
        else:
            yield self._say("clips scaled gradients", text)

    def _clips_scaled(self, update: AuditedUpdate) -> tuple[float, float, str] | None:
        """The loss scaler's factor in gradients when they were clipped, the bound, and the line."""
        for _, clip in update.clips:
            scale, bound, before = clip.loss_scale, clip.bound, clip.before
            if scale is None or bound is None or before is None or scale < 2:
                continue
            used = update.used.get(clip.before_leaf)
            if not changed_leaves(clip) or used is None:
                continue
            if not np.isfinite(used).all() or not used.any():
                continue
            ratio = float(np.linalg.norm(before) / np.linalg.norm(used))
            if abs(ratio / scale - 1) < SCALED:
                return scale, bound, clip.place
        return None

    def _of_rates(self) -> Iterator[Finding]:
        moving: list[int] = []
        changing = 0
        last: float | None = None
        for number, update in enumerate(self.mine, 1):
            rates = update.known_rates()
            within = 0
            for first, second in pairwise(rates):
                within += first != second
            changing += within > 0 or (last is not None and rates[:1] not in ([], [last]))
            if update.count > 1 and within >= update.count - 1:
                moving.append(number)
            last = None
            if rates:
                last = rates[-1]
        # A schedule that has come to its end changes nothing any more.
        if len(moving) > 1 and len(moving) >= changing - 1:
            which = ", ".join(map(str, moving[:4]))
            if len(moving) > 4:
                which += f" and {len(moving) - 4} more"
            text = f"the schedule steps {self.usual} times per update"
            where = f"the learning rate changes at every backward of updates {which}"
            yield self._say("schedule", f"{text}: {where}")

    def _names(self, leaves: list[int]) -> list[str]:
        return [self.ranks[self.first].leaves[leaf].name for leaf in leaves]

    # Coefficients

    def _of_gradients(self) -> Iterator[Finding]:
        """What the coefficients show, and how far they are known."""
        found = Explained()
        for number in range(min(map(len, self.updates.values()))):
            updates = {rank: updates[number] for rank, updates in self.updates.items()}
            found.add(explain(self.ranks, updates, self.number))
        if self._is_without_gradient():
            text = "the gradients that the optimizer is given are None or 0"
            yield self._accuse("no gradient", text, self.mine[0].step.place)
            return
        if found.unexplained:
            worst = max(found.unexplained.values())
            text = (
                f"up to {worst:.0%} of a gradient is no sum of the micro-gradients that were seen"
            )
            yield self._say("not judged", f"{text}: {names(sorted(found.unexplained))}")
        elif not found.gradients:
            reason = "no gradient that the optimizer used was found"
            if found.reasons:
                reason = found.reasons[0]
            yield self._say("weights unknown", reason)
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
        if not self._is_clipped_early:
            findings += self._of_lost()
        yield from findings
        if self._is_clipped_early or _has_error(findings):
            return
        self.status = "present"
        mixed, unequal = list(self._of_mixed_losses()), list(self._of_unequal())
        yield from mixed
        yield from unequal
        yield from self._of_rounding()
        self.scale = LossScale(
            self.gradients,
            self.ranks,
            self.updates,
            self.expect,
            is_low=self._has_low_precision(),
            label=self.label,
        )
        judged = list(self.scale.findings())
        if unequal:
            return
        for finding in judged:
            if not mixed or finding.level is not Level.GOOD:
                yield finding
        is_doubtful = is_in_part or bool(mixed)
        for finding in findings:
            is_doubtful |= finding.level is Level.WARNING and finding.topic != "skipped"
        if not is_doubtful and self.scale.status != "unknown":
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
                    has_added = has_added or (sample is not None and bool(sample.any()))
        return seen and has_added

    def _of_alone(self) -> Iterator[Finding]:
        """Ranks whose parameters have the same names and other values, and are whole tensors."""
        if self.ranks[self.first].parallel:
            return
        unlike = self._unlike()
        if unlike:
            text = (
                "ranks begin with different values of the same parameters: no replicas, or "
                "never made equal"
            )
            yield self._say("not judged", f"{text}: {names(unlike)}")

    def _unlike(self) -> list[str]:
        """Parameters that begin with different values on ranks where they have one shape."""
        unlike: dict[str, None] = {}
        for gradient in self.gradients:
            for leaf in gradient.leaves:
                if len(self._with_same_shape(leaf)) > len(gradient.replicas):
                    unlike[leaf] = None
        return list(unlike)

    def _with_same_shape(self, name: str) -> list[int]:
        """Ranks on which a parameter has the shape that it has on the first one.

        None if that one has none.
        """
        numbers = self._leaf_numbers(name)
        if self.first not in numbers:
            return []
        shape = self.ranks[self.first].leaves[numbers[self.first]].shape
        same = []
        for rank, number in numbers.items():
            if self.ranks[rank].leaves[number].shape == shape:
                same.append(rank)
        return same

    def _of_foreign(self) -> Iterator[Finding]:
        """Replicas' micro-batches that a gradient lacks, though their own rank has them."""
        missing = _Missing(self.gradients)
        if not missing.leaves:
            return
        which = self._which(missing.leaves)
        share = f"{len(missing.updates)} of {self._num_updates()} updates"
        if self._stay_the_same(missing.leaves):
            text = (
                f"gradients of {which} differ between ranks, whose parameters are the same later "
                f"({share})"
            )
            yield self._say(
                "not reduced", f"{text}: parameters may be averaged or broadcast instead"
            )
            return
        ranks, numbers = sorted(missing.ranks), sorted(missing.numbers)
        text = (
            f"of {_ranks_in_words(ranks)} are missing on other ranks in the gradient of {which} "
            f"({share})"
        )
        topic = "not reduced"
        if len(numbers) < self.usual:
            topic = "partly reduced"
            text = f"{numbers} of {self.usual} {text}"
        why = self._why_ranks_may_differ(missing.leaves)
        if why:
            yield self._say(topic, f"micro-batches {text}: right if {why}")
            return
        text = f"micro-batches {text}: replicas drift apart"
        yield self._accuse(topic, text, *places_of(self.backwards))

    def _why_ranks_may_differ(self, leaves: Iterable[str]) -> str:
        """Why gradients of these need not be reduced; empty if nothing speaks for that."""
        why = ""
        if not any(map(self.drifts, leaves)):
            why = "replicas stay the same, which is not visible"
        elif self.ranks[self.first].parallel or self._is_in_stages():
            why = "ranks hold parts of a model"
        elif self._unlike() or any(map(self._is_own, leaves)):
            why = "ranks train models of their own"
        elif self._have_same_data():
            why = "ranks hold parts of a model, since they are given the same data"
        elif not self._is_meant_to_reduce():
            why = "ranks train alone, or average parameters later, as local SGD does"
        return why

    def _is_meant_to_reduce(self) -> bool:
        """Whether any gradient is reduced, or a wrapper that does so is there."""
        return self._are_replicas() or not WRAPPERS.isdisjoint(self.ranks[self.first].facts)

    def _is_in_stages(self) -> bool:
        """Whether a rank's backwards begin at activations, as those of a pipeline do."""
        for updates in self.updates.values():
            if any(NOT_SCALAR in backward.doubts for backward in _backwards_of(updates)):
                return True
        return False

    def _have_same_data(self) -> bool:
        """Whether all ranks have the same inputs at every backward that is sampled."""
        data = set()
        for updates in self.updates.values():
            data.add(tuple(map(data_of, _backwards_of(updates))))
        return len(data) == 1 and () not in data.pop()

    def _is_own(self, name: str) -> bool:
        """Whether a framework says that other ranks may have another one under its name."""
        numbers = self._leaf_numbers(name)
        return any(self.ranks[rank].leaves[leaf].is_own for rank, leaf in numbers.items())

    def _num_updates(self) -> int:
        return len(updates_with(self.gradients))

    def _which(self, leaves: Iterable[str]) -> str:
        """Names of parameters, or that it is all of them."""
        everything: set[str] = set()
        for gradient in self.gradients:
            everything.update(gradient.leaves)
        shown = list(leaves)
        if len(everything) > 1 and everything <= set(shown):
            return f"all {len(everything)} sampled parameters"
        return names(shown)

    def _of_lost(self) -> Iterator[Finding]:
        """Micro-batches that are in no gradient, though they have one."""
        topics = set()
        for (number, rank), places in self._lost_places().items():
            finding = self._of_lost_places(self.updates[rank][number], number, rank, places)
            if finding.topic not in topics:
                topics.add(finding.topic)
                yield finding

    def _lost_places(self) -> dict[tuple[int, int], list[int]]:
        """By update and rank the micro-batches that no gradient has."""
        known: set[tuple[int, int, int]] = set()
        present: set[tuple[int, int, int]] = set()
        for gradient in self.gradients:
            for found in gradient.weights:
                known.add((gradient.update, *found.place))
                if found.is_present:
                    present.add((gradient.update, *found.place))
        lost: dict[tuple[int, int], list[int]] = {}
        for update, rank, number in sorted(known - present):
            lost.setdefault((update, rank), []).append(number)
        return lost

    def _of_lost_places(
        self, update: AuditedUpdate, number: int, rank: int, places: list[int]
    ) -> Finding:
        shown = [place + 1 for place in places]
        text = f"micro-batches {shown} of update {number + 1} have weight 0 on rank {rank}"
        text += f": {update.events}"
        if "Z" in update.events:
            text += " (cleared at Z)"
        lost, rest = [], []
        for place, backward in enumerate(update.backwards):
            if place in places:
                lost.append(backward)
            else:
                rest.append(backward)
        lost_lines = places_of(lost)
        if all(self._is_used_elsewhere(backward, rank) for backward in lost):
            if places_of(rest) & lost_lines:
                return self._say("discarded", f"{text}: only another optimizer uses them")
            return good("other loss", f"{self.label}{text}: another optimizer uses them")
        why = self._why_discarded(lost, rest)
        if not why and not _are_micro_batches(lost, rest):
            why = "they may be no micro-batches, but attacks or probes of the model"
        if not why and len(places) % self.usual == 0 and update.count > self.usual:
            return self._say("skipped", f"{text}, as if an update was skipped")
        if not why and number == 0 and self._only_first(rank):
            why = "in the first update only"
        if why:
            return self._say("discarded", f"{text}: {why}")
        return self._accuse("lost", text, *lost_lines)

    def _why_discarded(self, lost: list[RecordedBackward], rest: list[RecordedBackward]) -> str:
        """Why it may be right that these are in no gradient; empty if nothing speaks for it."""
        if not all(map(is_finite, rest)):
            return "micro-batches beside them are not finite"
        if rest and not set(map(kind, lost)) <= set(map(kind, rest)):
            return "their loss is another one"
        return ""

    def _only_first(self, rank: int) -> bool:
        """Whether nothing is lost after update 1, as after a backward that only warms up."""
        for gradient in self.gradients:
            for found in gradient.weights:
                if gradient.update > 0 and found.rank == rank and not found.is_present:
                    return False
        return len(self.mine) > 1

    def _is_used_elsewhere(self, backward: RecordedBackward, rank: int) -> bool:
        """Whether an optimizer of other parameters uses it."""
        if rank != self.first:
            return bool(self._others)
        others = chain.from_iterable(map(_backwards_of, self._others.values()))
        return any(other is backward for other in others)

    def _of_left(self) -> Iterator[Finding]:
        """What was left of an earlier gradient."""
        old = [gradient for gradient in self.gradients if gradient.left]
        if not old:
            return
        updates = updates_with(old)
        leaves: set[str] = set()
        is_whole = is_one = True
        for gradient in old:
            leaves.update(gradient.left_in)
            is_one = is_one and abs(gradient.left - 1) < EQUAL
            if gradient.level:
                is_whole = is_whole and abs(gradient.left / gradient.level - 1) < EQUAL
        share = f"{len(updates)} of {self._num_updates()}"
        which = self._which(sorted(leaves))
        text = f"{share} updates contain the gradient of the update before ({which})"
        if is_whole or is_one:
            line = self.mine[min(updates)].step.place
            yield self._accuse("not cleared", text, line)
        else:
            text = f"{text}, with a weight of {old[0].left:.3g}: this may be meant"
            yield self._say("not cleared", text)

    def _of_differences(self) -> Iterator[Finding]:
        """Parameters whose coefficients are those of the others times a factor."""
        factors: dict[str, float] = {}
        for gradient in self.gradients:
            same = [other for other in self.gradients if other.owner == gradient.owner]
            main = max(same, key=lambda other: len(other.leaves))
            if gradient is not main and main.level:
                factor = _factor(gradient, main)
                if factor is not None and abs(factor - 1) > EQUAL:
                    factors |= dict.fromkeys(gradient.leaves, factor)
        by_factor: dict[str, list[str]] = {}
        for leaf, factor in factors.items():
            by_factor.setdefault(f"{factor:.3g}", []).append(leaf)
        for shown, leaves in list(by_factor.items())[:MOST_NAMES]:
            text = (
                f"the gradient of {names(leaves)} is {shown} times what the others' weights make "
                "of it"
            )
            yield self._say("other weights", f"{text}: this may be meant")

    def _of_mixed_losses(self) -> Iterator[Finding]:
        """A gradient with backwards of a loss that trains other parameters, besides its own."""
        for other in self._others.values():
            theirs = set(map(id, _backwards_of(other)))
            for gradient in self.gradients:
                if self.first not in gradient.gradient_of:
                    continue
                backwards = self.mine[gradient.update].backwards
                foreign = []
                num_own = 0
                for found in gradient.present(self.first):
                    backward = backwards[found.micro_batch]
                    if id(backward) in theirs:
                        foreign.append(backward)
                    else:
                        num_own += 1
                if foreign and num_own:
                    yield self._mixed(gradient, foreign, num_own, other[0].step.name)
                    return

    def _mixed(
        self,
        gradient: ExplainedGradient,
        foreign: list[RecordedBackward],
        num_own: int,
        optimizer: str,
    ) -> Finding:
        of_other = (
            f"{plural(len(foreign), 'backward')} of a loss ({foreign[0].place}) that trains "
            f"others by {optimizer}"
        )
        text = (
            f"the gradient of {self._which(gradient.leaves)} has {of_other}, besides {num_own} "
            "of their own"
        )
        return self._say("mixed losses", f"{text}: wrong if that loss is not meant to train them")

    def _of_rounding(self) -> Iterator[Finding]:
        residual = largest_residual(self.gradients)
        if not self._has_low_precision() and ROUNDED < residual <= MOST_ROUNDED:
            text = (
                f"gradients differ from the sum of micro-gradients by {residual:.1e}, as if they "
                "were rounded"
            )
            yield self._say("rounded", text)

    def _has_low_precision(self) -> bool:
        """Whether gradients are held or reduced in 16 bits."""
        if LOW & self.held:
            return True
        for backward in self.backwards:
            reduced = " ".join(backward.reduced)
            if "bfloat16" in reduced or "float16" in reduced:
                return True
        return False

    def _of_unequal(self) -> Iterator[Finding]:
        """A sum that is divided before more is added to it."""
        if self._is_clipped_early:
            return
        found = list(self._unequal_weights())
        if not found:
            return
        gradient, rank, weights = found[0]
        shown = " ".join(f"{weight:.4g}" for weight in weights[:12])
        text = f"micro-batches of update {gradient.update + 1} on rank {rank} weigh {shown}"
        if all(_is_divided_again(weights) for _, _, weights in found):
            text = f"{text}: the sum so far is divided before more is added to it"
            lines = self.mine[gradient.update].places()
            yield self._accuse("divided again", text, *lines)
        else:
            yield self._say("unequal weights", f"{text}: this may be meant")

    def _unequal_weights(self) -> Iterator[tuple[ExplainedGradient, int, list[float]]]:
        """Gradients in which a rank's micro-batches weigh differently, though losses are alike."""
        for gradient in self.gradients:
            for rank in gradient.gradient_of:
                weights = [found.weight for found in gradient.present(rank)]
                if len(weights) < 2 or not gradient.is_resolved:
                    continue
                spread = max(weights) - min(weights)
                is_unequal = spread > 5 * EQUAL * max(map(abs, weights))
                if is_unequal and self._have_equal_losses(rank, gradient.update):
                    yield gradient, rank, weights

    def _have_equal_losses(self, rank: int, number: int) -> bool:
        backwards = self.updates[rank][number].backwards
        factors = set()
        for backward in backwards:
            for criterion in backward.criteria[:1]:
                factors.add(round(criterion.factor, 12))
        return len(set(map(kind, backwards))) == 1 and len(factors) <= 1


class _Missing:
    """Micro-batches that a rank's gradient of a parameter has, and that of a replica lacks."""

    def __init__(self, gradients: list[ExplainedGradient]) -> None:
        self.leaves: dict[str, None] = {}
        """In the order in which they are found."""
        self.updates: set[int] = set()
        self.ranks: set[int] = set()
        self.numbers: set[int] = set()
        """Micro-batches, from 1."""
        present: dict[tuple[int, str], set[Place]] = {}
        for gradient in gradients:
            for leaf in gradient.leaves:
                here = present.setdefault((gradient.update, leaf), set())
                here.update(gradient.coefficients())
        for gradient in gradients:
            for leaf in gradient.leaves:
                elsewhere = present[gradient.update, leaf]
                for found in gradient.weights:
                    if not found.is_present and found.place in elsewhere:
                        self._add(gradient.update, leaf, found.place)

    def _add(self, update: int, leaf: str, place: Place) -> None:
        rank, number = place
        self.leaves[leaf] = None
        self.updates.add(update)
        self.ranks.add(rank)
        self.numbers.add(number + 1)


def _backwards_of(updates: Iterable[AuditedUpdate]) -> Iterator[RecordedBackward]:
    for update in updates:
        yield from update.backwards


def _are_micro_batches(lost: list[RecordedBackward], rest: list[RecordedBackward]) -> bool:
    """Whether all that is lost is certainly such as what is kept.

    It has data of its own, is called where some of these are, and is differentiated by no further
    inputs, as adversarial training does.
    """
    kept_lines, kept_data = places_of(rest), set(map(data_of, rest))
    inputs = max((backward.untrained for backward in rest), default=0)
    for backward in lost:
        data = data_of(backward)
        if backward.place not in kept_lines or not data or data in kept_data:
            return False
        if backward.untrained > inputs:
            return False
    return True


def _has_error(findings: Iterable[Finding]) -> bool:
    return any(found.level is Level.ERROR for found in findings)


def _same(first: Vector, second: Vector) -> bool:
    return bool(np.allclose(first, second, rtol=SAME_VALUES, atol=1e-7, equal_nan=True))


def _factor(gradient: ExplainedGradient, main: ExplainedGradient) -> float | None:
    """By what all weights differ; None if not by one factor."""
    known = main.coefficients()
    ratios = []
    for found in gradient.weights:
        if found.place in known:
            ratios.append(found.weight / known[found.place])
    if not ratios or max(ratios) - min(ratios) > EQUAL * max(map(abs, ratios)):
        return None
    return float(np.median(ratios))


def _is_divided_again(weights: list[float]) -> bool:
    """Whether each group of equal weights is the one before times the size of a group."""
    groups = [[weights[0]]]
    for weight in weights[1:]:
        if abs(weight - groups[-1][-1]) <= EQUAL * abs(weight):
            groups[-1].append(weight)
        else:
            groups.append([weight])
    sizes = set(map(len, groups))
    if len(sizes) != 1 or len(groups) < 2:
        return False
    divisor = sizes.pop()
    if len(groups) == len(weights):
        divisor = max(divisor, len(groups))
    ratios = []
    for before, after in pairwise(groups):
        if before[0]:
            ratios.append(after[0] / before[0])
    if divisor < 2 or not ratios:
        return False
    return all(abs(ratio / divisor - 1) < EQUAL for ratio in ratios)


def _ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks as a sentence names them: ``rank 0``, ``ranks 0 and 1``."""
    names = some(list(map(str, ranks)))
    if len(ranks) == 1:
        return f"rank {names}"
    return f"ranks {names}"


def pattern(counts: list[int]) -> str:
    """The first few numbers."""
    shown = list(map(str, counts[:6]))
    if len(counts) > 6:
        shown.append("...")
    return " ".join(shown)
