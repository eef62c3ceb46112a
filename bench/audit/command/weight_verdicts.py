"""What is wrong with an audited training, as far as that is certain; everything else is a warning or not judged.

The scale is accused at few values only, since a loss may have any factor on purpose. With N micro-batches on each of W
ranks, a criterion that is a mean of the micro-batch, and reductions that average, weights of 1 / (N W) sum to 1. They
sum to N if the loss is not divided, to 1 / N if it is divided twice, to n / N in a window of only n micro-batches, and
to W or 1 / W if ranks are summed or averaged once too often. These values are the arithmetic of the loops themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from statistics import median

from bench.audit.command.gradient_weights import LOW, TOLERANCE, PartWeights, Use, Weights, solve
from bench.audit.command.recorded_updates import Event, RankRecord, Update
from bench.findings import Finding, error, good, warning
from bench.formatting import plural

NEAR = 0.05
"""Largest relative distance of a scale from the value that it is taken for."""
DIVIDING = ("TrainingArguments", "Trainer", "Accelerator", "DeepSpeedEngine")
"""Frameworks that divide the loss by N."""
NOT_JUDGED = {
    "FullyShardedDataParallel": "FSDP1 keeps gradients in flat parameters",
    "PipelineModule": "a pipeline schedule: its ranks hold different layers",
    "_PipelineStageBase": "a pipeline schedule: its ranks hold different layers",
    "main_grad": "Megatron keeps gradients in main_grad",
}
"""Why the weights of some trainings are not judged."""


class TrainingAudit:
    """The findings of one training: errors are certain, warnings are not, the rest are facts."""

    def __init__(self, ranks: Mapping[int, RankRecord], expect: int | None = None) -> None:
        self.ranks, self.expect = ranks, expect
        self.first = next(iter(ranks.values()))
        self.updates = self.first.updates
        self.world = max(event["world"] for record in ranks.values() for event in record.events)
        self.facts: Event = {name: fact for record in ranks.values() for name, fact in record.facts.items()}
        counts = Counter(len(update.micro_batches) for update in self.updates)
        self.usual = counts.most_common(1)[0][0] if counts else 0
        """Micro-batches of most updates."""

    @cached_property
    def weights(self) -> Weights:
        return solve(self.ranks)

    @cached_property
    def findings(self) -> list[Finding]:
        """All findings, errors first."""
        return sorted(self._all(), key=lambda found: ("error", "warning", "good").index(found.level))

    def _all(self) -> Iterator[Finding]:
        yield from self._of_recording()
        if not self.updates:
            count = sum(event["event"] == "backward" for event in self.first.events)
            yield warning("no update", f"{plural(count, 'backward')} led to no update")
            return
        yield from self._of_request()
        if any(step.get("midway") for update in self.updates for step in update.steps):
            yield warning("not judged", "the optimizer steps inside of the backward")
            return
        if any(step["inside"] > 1 for update in self.updates for step in update.steps):
            name = self.updates[0].steps[0]["optimizer"]
            yield warning(
                "not judged", f"{name} calls its closure several times per step: backwards are no micro-batches"
            )
            return
        yield from self._of_clipping()
        if self.first.left_open and self.first.ended:
            left = plural(len(self.first.left_open.micro_batches), "micro-batch", "es")
            yield warning("left open", f"the last {left} of the run reach no update")
        weighed = list(self._of_weights())
        yield from weighed
        yield from self._of_reduction()
        held = {dtype for update in self.updates for mb in update.micro_batches for dtype in mb.event.get("held", ())}
        if self.usual > 1 and held & LOW:
            deviation = f"; sums deviate from exact ones by {self.weights.residual:.0e}" if self.weights.parts else ""
            dtypes = "/".join(sorted(held & LOW))
            yield error("low precision", f"gradients of {self.usual} micro-batches are summed in {dtypes}{deviation}")
        if self.usual == 1 and not self.wanted:
            yield good("no accumulation", "an update has one backward")

    @property
    def wanted(self) -> int:
        """Micro-batches per update that were asked for; 0 if nothing asks for more than one."""
        asked = Counter(max(update.asked.values()) for update in self.updates if update.asked)
        return self.expect or (asked.most_common(1)[0][0] if asked else 0)

    def _of_recording(self) -> Iterator[Finding]:
        if len(self.ranks) < self.world:
            yield warning("ranks missing", f"{len(self.ranks)} of {self.world} ranks ran a backward")
        for rank, record in self.ranks.items():
            if failed := record.first("error"):
                yield warning("recording failed", f"on rank {rank}: {failed['text']}")

    def _of_request(self) -> Iterator[Finding]:
        if "FullyShardedDataParallelPlugin" in self.facts and not {"FSDPParam", "FullyShardedDataParallel"} & {
            *self.facts
        }:
            wrapper = "DistributedDataParallel" if "DistributedDataParallel" in self.facts else "no wrapper at all"
            text = f"a FullyShardedDataParallelPlugin was given, but no parameter is sharded: {wrapper} trains"
            yield error("not sharded", text)
        others = [update for update in self.updates if self.expect or update.asked]
        wrong = [u for u in others if len(u.micro_batches) != (self.expect or max(u.asked.values()))]
        if len(wrong) > len(others) / 2:
            who = "--expect" if self.expect else ", ".join(wrong[0].asked)
            text = f"{self.wanted} micro-batches per update were asked for ({who}); an update has {self.usual}"
            yield error("other N", text)
        counts = {rank: [len(update.micro_batches) for update in record.updates] for rank, record in self.ranks.items()}
        least = min(map(len, counts.values()))
        if len({tuple(numbers[:least]) for numbers in counts.values()}) > 1:
            text = "; ".join(f"rank {rank}: {pattern(numbers)}" for rank, numbers in counts.items())
            yield error("ranks differ", f"micro-batches per update differ: {text}")

    def _early(self) -> list[Update]:
        return [update for update in self.updates if "C" in update.events and "B" in update.events.split("C", 1)[1]]

    def _of_clipping(self) -> Iterator[Finding]:
        if early := self._early():
            share = f"{len(early)} of {len(self.updates)} updates"
            text = f"in {share} gradients are clipped before the last backward: {early[0].events}"
            yield error("clips too early", text)

    def _not_judged(self) -> str:
        """Why weights mean nothing here, or cannot be known."""
        probes = [record.first("probes") or {} for record in self.ranks.values()]
        for name, reason in NOT_JUDGED.items():
            if name in self.facts:
                return reason
        if any(mb.event.get("tensor_parallel") for update in self.updates for mb in update.micro_batches):
            return "tensor parallelism: gradients are distributed tensors"
        if len({str(found.get("leaves")) for found in probes}) > 1:
            return "ranks train different parameters"
        if len({str(found.get("parameters")) for found in probes}) > 1:
            return (
                "ranks begin with different values of the parameters: they are no replicas, or never were synchronized"
            )
        return ""

    def _of_weights(self) -> Iterator[Finding]:
        if reason := self._not_judged():
            yield warning("not judged", reason)
            return
        if self._early():
            return
        steps = [step for record in self.ranks.values() for update in record.updates for step in update.steps]
        sampled = [step for step in steps if "used" in step]
        if sampled and all(step["absent"] and not any(step["used"]) for step in sampled):
            yield error("no gradient", "the optimizer steps although no watched parameter has a gradient")
            return
        weights = self.weights
        if not weights.parts:
            reason = "; ".join(sorted(weights.reasons)) or "no gradient that the optimizer used was found"
            yield warning("weights unknown", reason)
            return
        if weights.residual > weights.explained:
            text = f"up to {weights.residual:.0%} of a gradient is no sum of micro-gradients that were seen"
            yield warning("not judged", text)
            return
        faults = list(self._of_presence())
        yield from faults or self._of_scale()

    def _of_presence(self) -> Iterator[Finding]:
        """Which micro-batches are in the gradients of their own ranks, of others, and of later updates."""
        parts = self.weights.parts
        zero = {id(part): part.zero(self.weights.tolerance) for part in parts}
        present = {use for part in parts for use in part.weights if use[1] == part.update and use not in zero[id(part)]}
        foreign = [(part, zero[id(part)] & present) for part in parts if zero[id(part)] & present]
        if foreign:
            numbers = sorted({use[2] + 1 for _, gone in foreign for use in gone})
            share = f"{len({part.update for part, _ in foreign})} of {len({part.update for part in parts})} updates"
            others = "another rank" if len(foreign[0][0].ranks) == 1 else "other replicas"
            if len(numbers) >= self.usual:
                yield error("not reduced", f"no micro-batch of {others} is in a rank's gradient ({share})")
            else:
                text = f"micro-batches {numbers} of {self.usual} of {others} are missing in a rank's gradient ({share})"
                yield error("partly reduced", f"{text}: replicas drift apart")
        if lost := sorted(set().union(*zero.values()) - present):
            yield self._lost(lost)
        old = [
            part for part in parts if abs(part.previous) > NEAR or any(self._is_old(part, use) for use in part.weights)
        ]
        if old:
            yield error("not cleared", f"{len(old)} of {len(parts)} gradients contain that of the update before")

    def _is_old(self, part: PartWeights, use: Use) -> bool:
        largest = max(map(abs, part.weights.values()))
        return use[1] < part.update and abs(part.weights[use]) > self.weights.tolerance * largest

    def _lost(self, lost: list[Use]) -> Finding:
        rank, number, _ = lost[0]
        update = self.ranks[rank].updates[number]
        if self.facts.get("DeepSpeedEngine", {}).get("fp16") and not len(update.micro_batches) % self.usual:
            return warning("not judged", "DeepSpeed's loss scaler may have skipped an update")
        cleared = " after a zero_grad between backwards" if "Z" in update.events[: update.events.rfind("B")] else ""
        numbers = [use[2] + 1 for use in lost if use[:2] == (rank, number)]
        return error("lost", f"micro-batches {numbers} of update {number + 1} have weight 0{cleared}: {update.events}")

    def criterion(self, use: Use) -> Event:
        """The criterion with the largest factor in the loss of a micro-batch."""
        rank, number, place = use
        losses = self.ranks[rank].updates[number].micro_batches[place].event.get("losses", ())
        return max((loss for loss in losses if loss.get("seed")), key=lambda loss: abs(loss["seed"]), default={})

    def loss_weight(self, use: Use, c: float) -> float | None:
        """The weight of a micro-batch's mean loss: its coefficient times the factor, and the terms, of the criterion."""
        loss = self.criterion(use)
        terms = {"mean": 1.0, "sum": loss.get("terms")}.get(loss.get("reduction") or "")
        return c * loss["seed"] * terms if terms else None

    def _sums(self) -> dict[tuple[int, tuple[int, ...]], float | None]:
        """The sum of weights per gradient in which all micro-batches are resolved; None if a weight is unknown."""
        sums: dict[tuple[int, tuple[int, ...]], float | None] = {}
        for part in self.weights.parts:
            if not part.unresolved:
                values = [self.loss_weight(use, c) for use, c in part.weights.items() if use[1] == part.update]
                known = [value for value in values if value is not None]
                sums[part.update, part.ranks] = sum(known) if len(known) == len(values) else None
        return sums

    def _of_scale(self) -> Iterator[Finding]:
        sums = self._sums()
        if not sums:
            yield warning("not judged", "micro-gradients are too alike to be told apart")
            return
        known = {key: value for key, value in sums.items() if value is not None}
        if len(known) < len(sums):
            yield warning("scale not judged", f"the number of terms of the loss is not visible: {self.loss_line()}")
            return
        allowed = NEAR if self.weights.is_low else TOLERANCE
        wrong = {key[0]: value for key, value in known.items() if abs(value - 1) > allowed}
        if not wrong:
            yield good("scale 1", f"the weights of micro-batches sum to {median(known.values()):.4g}: a mean")
        else:
            yield self._scale(wrong, f"{len(wrong)} of {len({update for update, _ in known})} updates")
        yield from self._of_tokens()

    def _scale(self, wrong: Mapping[int, float], share: str) -> Finding:
        """What the sums of the weights are equal to, by update."""
        usual, world = self.usual, self.world
        counts = {number: len(self.updates[number].micro_batches) for number in wrong}
        example = f"weights sum to {next(iter(wrong.values())):.4g} ({share})"

        def all_are(*expected: dict[int, float] | float) -> bool:
            return any(
                all(abs(value / (e[n] if isinstance(e, dict) else e) - 1) < NEAR for n, value in wrong.items())
                for e in expected
            )

        if doubt := self._several_losses():
            return warning("scale not judged", f"{example}; {doubt}")
        shares = {number: count / usual for number, count in counts.items()}
        if all(count < usual for count in counts.values()) and all_are(shares):
            sizes = ", ".join(map(str, sorted(set(counts.values()))))
            return error("partial window", f"windows of {sizes} instead of {usual} micro-batches: {example}")
        ambiguous = f"; or ranks are counted wrongly, since W is {world} too" if world == usual else ""
        if usual > 1 and all_are({number: float(count) for number, count in counts.items()}):
            return error("not divided", f"the loss is not divided by N: {example}{ambiguous}")
        divides = any(isinstance(fact := self.facts.get(name), dict) and fact.get("N") == usual for name in DIVIDING)
        if usual > 1 and all_are({number: count / usual**2 for number, count in counts.items()}):
            if usual > 2 or divides:
                return error("divided twice", f"the loss is divided by N twice: {example}{ambiguous}")
            return warning("scale", f"{example}: divided by N twice, or a factor of the loss")
        # With a mean over the micro-batch and an average over ranks, 1 / W is the user's own factor.
        averaged = self.criterion((next(iter(self.ranks)), 0, 0)).get("reduction") == "mean"
        if world > 1 and (all_are(world) or (not averaged and all_are(1 / world))):
            return error("scaled by ranks", f"{example}, with {plural(world, 'rank')}")
        return warning("scale", f"{example}: neither 1, N nor 1 / N; this may be meant")

    def _several_losses(self) -> str:
        """Why backwards of an update may be different losses instead of micro-batches of one."""
        sampled = [[mb.event for mb in update.micro_batches if mb.samples] for update in self.updates]
        if len({step["id"] for update in self.updates for step in update.steps[:1]}) > 1:
            return "several optimizers step in turn"
        if any(event["keeps_graph"] for events in sampled for event in events):
            return "backwards share a graph"
        if any(not event["scalar"] for events in sampled for event in events):
            return "backward does not begin at a scalar"
        names = [[sorted(loss["node"] for loss in event["losses"]) for event in events] for events in sampled]
        if any(kinds != window[0] for window in names for kinds in window):
            return "its micro-batches have different losses"
        for events in sampled:
            for event in events:
                seeds = [abs(loss["seed"]) for loss in event["losses"] if loss.get("seed")]
                if sum(seeds) > (1 + NEAR) * max(seeds, default=0.0):
                    return "the loss has several terms"
        return ""

    def _of_tokens(self) -> Iterator[Finding]:
        """Whether all terms of a window weigh the same, where their numbers differ."""
        spread, sizes = 0.0, set()
        for part in self.weights.parts:
            per_term = []
            for use, c in part.weights.items():
                terms, weight = self.criterion(use).get("terms"), self.loss_weight(use, c)
                if use[1] == part.update and terms and weight:
                    per_term.append(weight / terms)
                    sizes.add(terms)
            if per_term:
                spread = max(spread, 1 - min(per_term) / max(per_term))
        if len(sizes) > 1 and spread < self.weights.tolerance:
            yield good("token-exact", "all tokens of an update have the same weight")
        elif len(sizes) > 1:
            yield warning("mean of means", f"tokens of one update differ in weight by up to {spread:.0%}")

    def big_reductions(self) -> list[list[Counter[tuple[str, str, int]]]]:
        """Reductions per backward of the full windows; those below 1 % of the largest carry metrics or norms."""
        batches = [update.micro_batches for update in self.updates if len(update.micro_batches) == self.usual]
        largest = max((size for window in batches for mb in window for size in mb.reductions.values()), default=0)
        return [
            [Counter({key: size for key, size in mb.reductions.items() if size > largest / 100}) for mb in window]
            for window in batches
        ]

    def sent(self) -> list[int]:
        """Bytes that are reduced at each backward of a window in the middle of the run."""
        windows = self.big_reductions()
        return [reductions.total() for reductions in windows[len(windows) // 2]] if windows else []

    def _of_reduction(self) -> Iterator[Finding]:
        sent = self.sent()
        if self.world > 1 and not any(sent):
            yield warning("no reduction seen", "no reduction of a floating-point tensor was seen in any update")
        elif all(sent) and len(sent) > 1:
            text = f"reduces at each of {len(sent)} backwards: {sum(sent):,} bytes per rank; once would be {sent[-1]:,}"
            yield good("eager", text)
        elif any(sent) and len(sent) > 1:
            yield good(
                "deferred", f"reduces {sum(sent):,} bytes per rank and update; eager would be {len(sent)} times that"
            )

    def loss_line(self) -> str:
        """The criterion of the first micro-batch and the gradient that it receives."""
        loss = self.criterion((next(iter(self.ranks)), 0, 0))
        if not loss:
            return "no criterion found"
        return f"{loss['node']} ({loss['reduction'] or 'unknown reduction'}) receives {loss['seed']:.4g}"


def pattern(counts: list[int]) -> str:
    """The first few numbers of micro-batches per update."""
    return " ".join(map(str, counts[:6])) + (" ..." if len(counts) > 6 else "")
