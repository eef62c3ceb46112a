"""What is wrong with an audited training, as far as that is certain; everything else is a warning or not judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property

from bench.audit.command.gradient_weights import LOW, GradientWeights, PartWeights, Use
from bench.audit.command.loss_scale import LossScale
from bench.audit.command.recorded_updates import Event, RankRecord
from bench.findings import Finding, Level, error, good, warning
from bench.formatting import plural

NOT_JUDGED = {
    "FullyShardedDataParallel": "FSDP1 keeps gradients in flat parameters",
    "PipelineModule": "in a pipeline ranks hold different layers",
    "_PipelineStageBase": "in a pipeline ranks hold different layers",
    "LocalSGD": "local SGD averages parameters instead of gradients",
    "main_grad": "Megatron keeps gradients in main_grad",
}
"""Why trainings with such objects are not judged."""


class TrainingAudit:
    """The findings of one training: errors are certain, warnings are not, the rest are facts."""

    def __init__(self, ranks: Mapping[int, RankRecord], expect: int | None = None) -> None:
        self.ranks, self.expect = ranks, expect
        self.updates = next(iter(ranks.values())).updates
        """Of the first rank."""
        self.world = max(event["world"] for record in ranks.values() for event in record.events)
        self.facts: Event = {}
        """What frameworks were asked for."""
        for record in ranks.values():
            self.facts |= record.first("probes").get("facts", {})
        counts = Counter(len(update.micro_batches) for update in self.updates)
        self.usual = counts.most_common(1)[0][0] if counts else 0
        """Micro-batches of most updates."""
        self.held = {dtype for u in self.updates for event in u.micro_batches for dtype in event.get("held", ())}
        """Dtypes in which gradients are held between micro-batches."""
        self.weights = GradientWeights(ranks)
        self.asked = [_asked(update.steps[0]["facts"]) for update in self.updates if "facts" in update.steps[0]]
        """How many micro-batches were asked for in each update that was sampled."""
        self.scale = LossScale(self.weights, self.usual, self.world, self.usual in self.asked)

    @property
    def parts(self) -> list[PartWeights]:
        """The weights where they mean something."""
        return [] if any(found.topic == "not judged" for found in self.findings) else self.weights.parts

    @cached_property
    def findings(self) -> list[Finding]:
        """All findings, errors first."""
        return sorted(self._all(), key=lambda found: [*Level].index(found.level))

    def _all(self) -> Iterator[Finding]:
        record = next(iter(self.ranks.values()))
        if len(self.ranks) < self.world:
            yield warning("ranks missing", f"{len(self.ranks)} of {self.world} ranks ran a backward")
        for rank, other in self.ranks.items():
            if failed := other.first("error"):
                yield warning("recording failed", f"on rank {rank}: {failed['text']}")
                return
        left = len(record.left_open.micro_batches)
        if left and (record.events[-1]["event"] == "end" or not self.updates):
            yield warning("no update", f"{plural(left, 'micro-batch')} at the end led to no update")
        if not self.updates:
            return
        yield from self._of_request()
        if reason := self._not_judged():
            yield warning("not judged", reason)
            return
        yield from self._of_windows() or self._of_weights()
        yield from self._of_reduction()
        if self.usual > 1 and self.held & LOW:
            dtypes = "/".join(self.held & LOW)
            yield error("low precision", f"gradients of {self.usual} micro-batches are summed in {dtypes}")

    def _of_request(self) -> Iterator[Finding]:
        asks_for_shards = "FullyShardedDataParallelPlugin" in self.facts
        if asks_for_shards and not {"FSDPParam", "FullyShardedDataParallel"} & self.facts.keys():
            wrapper = "DistributedDataParallel" if "DistributedDataParallel" in self.facts else "no wrapper at all"
            text = f"a FullyShardedDataParallelPlugin was given, but no parameter is sharded: {wrapper} trains"
            yield error("not sharded", text)
        found = [len(update.micro_batches) for update in self.updates]
        wanted = [self.expect] * len(found) if self.expect else self.asked
        others = [(count, number) for count, number in zip(found, wanted, strict=False) if count != number > 1]
        if len(others) > len(wanted) / 2:
            text = f"{others[0][1]} micro-batches per update were asked for, an update has {others[0][0]}"
            yield error("other N", text)
        for number, update in enumerate(self.updates, 1):
            if not update.micro_batches[0]["samples"] and len(update.micro_batches) < self.usual:
                text = f"update {number} has fewer micro-batches than others; --updates {number} would sample it"
                yield warning("not sampled", text)
                break

    def _not_judged(self) -> str:
        """Why backwards are no micro-batches, or gradients no sums of them."""
        steps = [step for update in self.updates for step in update.steps]
        probes = [record.first("probes") for record in self.ranks.values()]
        reasons = [reason for name, reason in NOT_JUDGED.items() if name in self.facts]
        if any(step["midway"] for step in steps):
            reasons.append("the optimizer steps inside of the backward")
        if any(step["inside"] > 1 for step in steps):
            reasons.append(f"{steps[0]['optimizer']} runs several backwards per step, which are no micro-batches")
        if any(event.get("distributed") for update in self.updates for event in update.micro_batches):
            reasons.append("gradients are distributed tensors, as in tensor parallelism")
        if any(found["leaves"] != probes[0]["leaves"] for found in probes):
            reasons.append("ranks train different parameters")
        elif any(found["parameters"] != probes[0]["parameters"] for found in probes):
            why = "ranks are no replicas, never were made equal, or run different layers"
            reasons.append(f"sampled parameters differ: {why}")
        return reasons[0] if reasons else ""

    def _of_windows(self) -> list[Finding]:
        """Faults with which weights mean nothing."""
        found = []
        counts = {rank: [len(update.micro_batches) for update in record.updates] for rank, record in self.ranks.items()}
        least = min(map(len, counts.values()))
        if len({tuple(numbers[:least]) for numbers in counts.values()}) > 1:
            text = "; ".join(f"rank {rank}: {pattern(numbers)}" for rank, numbers in counts.items())
            found.append(error("ranks differ", f"micro-batches per update differ: {text}"))
        if early := [update.shown() for update in self.updates if update.clips_early]:
            share = f"{len(early)} of {len(self.updates)} updates"
            text = f"in {share} gradients are clipped before the last backward: {early[0]}"
            found.append(error("clips too early", text))
        used = [step["used"] for update in self.updates for step in update.steps if "used" in step]
        if used and not any(map(any, used)) and any([] in leaves for leaves in used):
            found.append(error("no gradient", "the optimizer steps although no watched parameter has a gradient"))
        return found

    def _of_weights(self) -> Iterator[Finding]:
        parts = self.weights.parts
        if not parts:
            yield warning("weights unknown", self.weights.reason)
            return
        residual = max(part.residual for part in parts)
        if residual > self.weights.explained:
            text = f"up to {residual:.0%} of a gradient is no sum of the micro-gradients that were seen"
            yield warning("not judged", text)
            return
        yield from list(self._of_presence()) or self.scale.findings()

    def _of_presence(self) -> Iterator[Finding]:
        """Which micro-batches are in the gradients of their own ranks, of others, and of later updates."""
        parts, tolerance = self.weights.parts, self.weights.tolerance
        present: set[Use] = set()
        gone: list[set[Use]] = []
        for part in parts:
            largest = max(map(abs, part.weights.values()), default=0.0)
            seen = {use for use, weight in part.weights.items() if abs(weight) > tolerance * largest}
            gone.append(part.weights.keys() - seen)
            present |= seen
        if foreign := [(part.update, uses & present) for part, uses in zip(parts, gone, strict=True) if uses & present]:
            numbers = sorted({use[2] + 1 for _, uses in foreign for use in uses})
            share = f"{len({number for number, _ in foreign})} of {len({part.update for part in parts})} updates"
            if len(numbers) >= self.usual:
                yield error("not reduced", f"no micro-batch of other ranks is in a rank's gradient ({share})")
            else:
                which = f"micro-batches {numbers} of {self.usual} of other ranks"
                text = f"{which} are missing in a rank's gradient ({share}): replicas drift apart"
                yield error("partly reduced", text)
        if lost := sorted(set().union(*gone) - present):
            yield self._lost(lost)
        if old := [part for part in parts if abs(part.previous) > tolerance]:
            yield error("not cleared", f"{len(old)} of {len(parts)} gradients contain that of the update before")

    def _lost(self, lost: list[Use]) -> Finding:
        rank, number, _ = lost[0]
        update = self.ranks[rank].updates[number]
        if self.facts.get("DeepSpeedEngine", {}).get("fp16"):
            return warning("not judged", "DeepSpeed's loss scaler may have skipped an update")
        cleared = " after a zero_grad between backwards" if "Z" in update.events[: update.events.rfind("B")] else ""
        numbers = [use[2] + 1 for use in lost if use[:2] == (rank, number)]
        return error("lost", f"micro-batches {numbers} of update {number + 1} have weight 0{cleared}: {update.shown()}")

    def reductions(self) -> list[Counter[tuple[str, str, int]]]:
        """What is reduced at each backward of a full window; less than 1 % of the largest are metrics and norms."""
        windows = [update.micro_batches for update in self.updates if len(update.micro_batches) == self.usual]
        window = [event["reduced"] for event in windows[len(windows) // 2]] if windows else []
        largest = max((size for found in window for size in found.values()), default=0)
        return [Counter({key: size for key, size in found.items() if size > largest / 100}) for found in window]

    def _of_reduction(self) -> Iterator[Finding]:
        reductions = self.reductions()
        sent = [found.total() for found in reductions]
        kinds = sorted({kind for found in reductions for kind in found})
        names = ", ".join(f"{operation} of {dtype} over {ranks} ranks" for operation, dtype, ranks in kinds)
        places = ", ".join(str(place) for place, size in enumerate(sent, 1) if size)
        text = f"{names} at backward {places} of {len(sent)}: {sum(sent):,} bytes per rank and update"
        if self.world > 1 and not any(sent):
            yield warning("no reduction seen", "no reduction of a floating-point tensor was seen in a window")
        elif all(sent) and len(sent) > 1:
            yield good("eager", f"{text}; once would be {sent[-1]:,}")
        elif any(sent) and len(sent) > 1:
            yield good("deferred", f"{text}; at each backward it would be {len(sent) * max(sent):,}")


def _asked(facts: Event) -> int:
    """The most micro-batches per update that an object asks for, or 1."""
    counts = (fact.get("N") for fact in facts.values() if isinstance(fact, dict))
    return max((count for count in counts if isinstance(count, int)), default=1)


def pattern(counts: list[int]) -> str:
    """The first few numbers of micro-batches per update."""
    return " ".join(map(str, counts[:6])) + (" ..." if len(counts) > 6 else "")
