"""What is wrong with an audited training, as far as that is certain; everything else is a warning or not judged."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from statistics import mode

from bench.audit.command.inside.records import Backward, End, Rank, Step
from bench.audit.command.optimizer_audit import OptimizerAudit
from bench.audit.command.update_windows import (
    batches_per_backward,
    micro_batches,
    unused,
    updates_of,
)
from bench.findings import Finding, Level, error, good, note, warning
from bench.formatting import plural

RIGHT = "weights right"
RIGHT_FOR_MAIN = "weights right for the main loss"
IN_PART = "weights judged in part"
NOT_JUDGED = "not judged"


UNCLEAR = {
    "clips scaled gradients",
    "discarded",
    "mean of means",
    "mixed losses",
    "not cleared",
    "not judged",
    "not reduced",
    "other N",
    "other weights",
    "ranks differ",
    "ranks missing",
    "record cut",
    "reduced less",
    "rounded",
    "steps again",
    "unequal weights",
}
"""Topics of warnings with which a training is not called right."""


class TrainingAudit:
    """The findings of one training: errors are certain, warnings are not, the rest are facts."""

    def __init__(self, ranks: Mapping[int, Rank], expect: int | None = None) -> None:
        self.ranks, self.expect = dict(ranks), expect
        self.first = next(iter(self.ranks.values()))
        """The rank of which most is said."""
        self._updates = {number: updates_of(rank) for number, rank in self.ranks.items()}
        self.optimizers: list[OptimizerAudit] = []
        """Those whose updates are judged."""
        self.findings = sorted(self._all(), key=lambda found: [*Level].index(found.level))
        """Errors first."""

    @property
    def verdict(self) -> str:
        """The faults, or how far the training was judged."""
        faults = list(
            dict.fromkeys(found.topic for found in self.findings if found.level is Level.ERROR)
        )
        if faults:
            return ", ".join(faults)
        states = {optimizer.status for optimizer in self.optimizers}
        warnings = {found.topic for found in self.findings if found.level is Level.WARNING}
        doubtful = bool(warnings & UNCLEAR)
        if not states or states == {"unknown"}:
            return NOT_JUDGED
        if states == {"right"} and not doubtful:
            return RIGHT
        if states <= {"right", "main"} and not doubtful:
            return RIGHT_FOR_MAIN
        return IN_PART

    def num_updates(self, optimizer: int) -> int | None:
        """All that an optimizer made on the first rank; None if the process was killed."""
        ends = [event.updates for event in self.first.events if isinstance(event, End)]
        if ends and optimizer < len(ends[-1]):
            return ends[-1][optimizer]
        return None

    @property
    def is_judged(self) -> bool:
        """Whether anything was."""
        return self.verdict != NOT_JUDGED

    def _all(self) -> Iterator[Finding]:
        if len(self.ranks) < self.first.world:
            yield warning(
                "ranks missing", f"{len(self.ranks)} of {self.first.world} ranks ran a backward"
            )
        if any(rank.is_cut for rank in self.ranks.values()):
            yield warning(
                "record cut",
                "the record of a rank ends within a line: its process was killed, or TMPDIR is full",
            )
        yield from self._of_facts()
        obstacles = list(self._obstacles())
        if obstacles:
            yield warning("not judged", obstacles[0])
            return
        numbers = sorted(
            {
                number
                for updates in self._updates.values()
                for number, found in updates.items()
                if found
            }
        )
        for number in numbers:
            updates = {
                rank: found[number] for rank, found in self._updates.items() if found.get(number)
            }
            first = next(iter(updates))
            others = {
                other: found
                for other, found in self._updates[first].items()
                if other != number and found
            }
            is_idle = bool(self._idle(updates.keys()))
            self.optimizers.append(
                OptimizerAudit(number, self.ranks, updates, others, self.expect, is_idle)
            )
        for optimizer in self.optimizers:
            yield from optimizer.findings
        yield from self._of_idle_ranks()
        if not self.optimizers:
            yield from self._of_nothing()
            return
        yield from self._of_request()
        yield from self._of_rest()
        yield from self._of_models()
        yield from self._of_reduction()

    def _obstacles(self) -> Iterator[str]:
        """Why nothing is judged."""
        for rank in self.ranks.values():
            for event in rank.events:
                if isinstance(event, End) and event.failure:
                    yield event.failure
            yield from rank.obstacles

    def _of_facts(self) -> Iterator[Finding]:
        facts = self.first.facts
        if (
            "FullyShardedDataParallelPlugin" in facts
            and not {"FSDPParam", "FullyShardedDataParallel"} & facts.keys()
        ):
            wrapper = (
                "DistributedDataParallel"
                if "DistributedDataParallel" in facts
                else "no wrapper at all"
            )
            text = f"a FullyShardedDataParallelPlugin was given, but no parameter is sharded: {wrapper} trains"
            yield error("not sharded", text)

    def _of_idle_ranks(self) -> Iterator[Finding]:
        """Ranks that run backwards, and whose optimizer never steps, though that of others does."""
        for optimizer in self.optimizers:
            idle = self._idle(optimizer.updates.keys())
            if not idle:
                continue
            which = ", ".join(map(str, idle))
            times = f"{len(optimizer.mine)} times on rank {optimizer.first}"
            text = f"{optimizer.title()} never steps on rank {which}, and {times}"
            drifting = self._drifting(optimizer, idle)
            if drifting:
                yield error("ranks differ", f"{text}: {drifting} ends with different values")
            else:
                yield warning("ranks differ", f"{text}: whether they are replicas is not visible")

    def _idle(self, ranks: Collection[int]) -> list[int]:
        """Other ranks that run backwards, and are no parts of a model."""
        return [
            number
            for number, rank in self.ranks.items()
            if number not in ranks
            and not rank.parallel
            and any(isinstance(event, Backward) for event in rank.events)
        ]

    def _drifting(self, optimizer: OptimizerAudit, idle: list[int]) -> str:
        """A parameter that was the same on these ranks, is reduced, and ends with different values."""
        leaves = {leaf.name: number for number, leaf in enumerate(self.ranks[idle[0]].leaves)}
        ends = {}
        for number in (idle[0], optimizer.first):
            found = [event.end for event in self.ranks[number].events if isinstance(event, End)]
            ends[number] = found[-1] if found else []
        is_reduced = all(
            any(
                isinstance(event, Backward) and event.reduced for event in self.ranks[number].events
            )
            for number in ends
        )
        for mine in optimizer.mine[0].step.owned:
            leaf = self.ranks[optimizer.first].leaves[mine]
            other = leaves.get(leaf.name)
            if (
                other is None
                or not is_reduced
                or mine >= len(ends[optimizer.first])
                or other >= len(ends[idle[0]])
            ):
                continue
            start = self.ranks[idle[0]].leaves[other].start
            last = ends[optimizer.first][mine], ends[idle[0]][other]
            if (
                leaf.start is not None
                and leaf.start == start
                and None not in last
                and last[0] != last[1]
            ):
                return leaf.name
        return ""

    def _of_nothing(self) -> Iterator[Finding]:
        count = max((unused(rank) for rank in self.ranks.values()), default=0)
        steps = [event for event in self.first.events if isinstance(event, Step)]
        if not steps:
            yield warning(
                "no update", f"{plural(count, 'backward')} led to no step of an optimizer of torch"
            )
        elif not self.first.leaves:
            yield warning("weights unknown", "no parameter was found in the graphs of the losses")
        else:
            yield warning(
                "weights unknown",
                "no optimizer that stepped updates a parameter that backwards add to",
            )

    def _of_request(self) -> Iterator[Finding]:
        """Whether updates have the micro-batches that --expect or a framework asks for."""
        wrong = []
        fitting = 0
        for optimizer in self.optimizers:
            ratio = batches_per_backward(optimizer.mine)
            for update in optimizer.mine:
                count = micro_batches(update, ratio)
                wanted = self.expect or update.step.asked
                if wanted <= 1:
                    continue
                if count is None or wanted in (count, update.count):
                    fitting += 1
                else:
                    wrong.append((optimizer, count, wanted))
        if len(wrong) <= fitting or not wrong:
            return
        optimizer, count, wanted = wrong[0]
        text = f"{optimizer.label}{wanted} micro-batches per update were asked for, an update has {count}"
        weights = optimizer.scale.total if optimizer.scale else None
        is_right = weights is not None and abs(weights - 1) < 0.02
        if not fitting and (self.expect or (weights is not None and not is_right)):
            yield error("other N", text)
        else:
            yield warning("other N", text)

    def _of_rest(self) -> Iterator[Finding]:
        """Backwards at the end without a step, and windows of another length that are not sampled."""
        count = unused(self.first)
        if count:
            yield warning(
                "no update", f"{plural(count, 'micro-batch')} at the end led to no update"
            )
        for optimizer in self.optimizers:
            usual = mode([update.step.backwards for update in optimizer.mine])
            for step in self._unsampled(optimizer.number):
                if step.backwards != usual:
                    text = (
                        f"update {step.update} has {step.backwards} backwards, others have {usual}"
                    )
                    yield warning(
                        "not sampled",
                        f"{optimizer.label}{text}; --updates {step.update} would sample it",
                    )
                    break

    def _unsampled(self, optimizer: int) -> list[Step]:
        steps = [event for event in self.first.events if isinstance(event, Step)]
        return [step for step in steps if step.optimizer == optimizer and not step.is_sampled]

    def _of_models(self) -> Iterator[Finding]:
        """What models do at each micro-batch."""
        usual = max(optimizer.usual for optimizer in self.optimizers)
        if self.first.batch_norms and usual > 1:
            text = f"{plural(self.first.batch_norms, 'BatchNorm module')} normalize each micro-batch by itself"
            yield note("batch norm", f"{text}: not what a batch of {usual} micro-batches gives")
        for optimizer in self.optimizers:
            if self._copies_move(optimizer):
                text = (
                    "a copy of the parameters changes at every backward of an update, as if "
                    "an average was moved then"
                )
                yield warning("moving average", f"{optimizer.label}{text}")
                break
        backwards = [event for event in self.first.events if isinstance(event, Backward)]
        contrasting = [
            event for event in backwards if any(criterion.in_batch for criterion in event.criteria)
        ]
        if usual > 1 and len(contrasting) > len(backwards) / 2:
            text = "the rows of a micro-batch are contrasted with each other"
            yield note(
                "contrastive",
                f"{text}: it has fewer negatives than a batch of {usual} micro-batches",
            )

    def _copies_move(self, optimizer: OptimizerAudit) -> bool:
        moving = 0
        longer = [update for update in optimizer.mine if update.count > 1]
        for update in longer:
            pairs = zip(update.backwards, update.backwards[1:], strict=False)
            moving += all(first.copies and first.copies != second.copies for first, second in pairs)
        return bool(longer) and moving > len(longer) / 2

    def _of_reduction(self) -> Iterator[Finding]:
        """What is reduced at each backward of a full window in the middle."""
        optimizer = self.optimizers[0]
        windows = [update.backwards for update in optimizer.mine if update.count == optimizer.usual]
        reductions = [found.reduced for found in windows[len(windows) // 2]]
        sent = [sum(reduced.values()) for reduced in reductions]
        names = ", ".join(sorted({name for reduced in reductions for name in reduced}))
        places = ", ".join(str(place) for place, size in enumerate(sent, 1) if size)
        text = (
            f"{names} at backward {places} of {len(sent)}: {sum(sent):,} bytes per rank and update"
        )
        if self.first.world > 1 and not any(sent) and not self.first.parallel:
            yield warning(
                "no reduction seen", "no reduction of a floating-point tensor was seen in a window"
            )
        elif all(sent) and len(sent) > 1:
            yield good("eager", f"{text}; once would be {sent[-1]:,}")
        elif any(sent) and len(sent) > 1:
            yield good(
                "deferred", f"{text}; at each backward it would be {len(sent) * max(sent):,}"
            )
        yield from self._of_bytes(reductions)

    def _of_bytes(self, reductions: list[dict[str, int]]) -> Iterator[Finding]:
        """Less is reduced than the gradients have."""
        is_whole = len(self.optimizers) == 1 and len(self.first.gradient_bytes) == 1
        if not is_whole or "DistributedDataParallel" not in self.first.facts:
            return
        ((dtype, size),) = self.first.gradient_bytes.items()
        most = 0
        for reduced in reductions:
            most = max(
                most, sum(bytes_ for name, bytes_ in reduced.items() if f" of {dtype} " in name)
            )
        if 0 < most < size:
            text = f"{size - most:,} of the {size:,} bytes of gradients are never reduced"
            yield warning(
                "reduced less", f"{text}: a parameter that is not, or one without a gradient"
            )
