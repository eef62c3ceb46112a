"""What is wrong with an audited training, as far as that is certain.

Everything else is a warning or not judged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from statistics import mode

import numpy as np

from bench.audit.command.known_bad import known_bad
from bench.audit.command.optimizer_audit import OptimizerAudit
from bench.audit.command.recorded_events import (
    RecordedBackward,
    RecordedRank,
    RecordedStep,
    Vector,
)
from bench.audit.command.update_windows import (
    AuditedUpdate,
    backwards_per_batch,
    batches_per_backward,
    contrast,
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
    "low precision",
    "mean of means",
    "mixed losses",
    "not cleared",
    "not judged",
    "not reduced",
    "other N",
    "other weights",
    "partly reduced",
    "ranks differ",
    "ranks missing",
    "record cut",
    "reduced less",
    "rounded",
    "steps again",
    "unequal weights",
}
"""Topics of warnings with which a training is not called right."""
PLUGIN = "FullyShardedDataParallelPlugin"
SHARDED = {"FSDPParam", "FullyShardedDataParallel"}
DDP = "DistributedDataParallel"
"""Names of facts."""
SEVERAL_RANKS = ("FSDP", "MULTI_")
"""Parts of what Accelerate calls the ways to train on several ranks that the plugin is for."""


class TrainingAudit:
    """The findings of one training: errors are certain, warnings are not, the rest are facts."""

    def __init__(self, ranks: Mapping[int, RecordedRank], expect: int | None = None) -> None:
        self.ranks, self.expect = dict(ranks), expect
        self.first = next(iter(self.ranks.values()))
        """The rank of which most is said."""
        self._updates: dict[int, dict[int, list[AuditedUpdate]]] = {}
        """By rank and number of the optimizer."""
        for number, rank in self.ranks.items():
            self._updates[number] = updates_of(rank)
        self.optimizers: list[OptimizerAudit] = []
        """Those whose updates are judged."""
        self.findings = sorted(self._all(), key=lambda found: found.level.rank)
        """Errors first."""

    @property
    def verdict(self) -> str:
        """The faults, or how far the training was judged."""
        faults = self._topics(Level.ERROR)
        if faults:
            return ", ".join(faults)
        is_doubtful = not UNCLEAR.isdisjoint(self.warnings)
        states = {optimizer.status for optimizer in self.optimizers}
        if states <= {"unknown"}:
            return NOT_JUDGED
        if states == {"right"} and not is_doubtful:
            return RIGHT
        if states <= {"right", "main"} and not is_doubtful:
            return RIGHT_FOR_MAIN
        return IN_PART

    def _topics(self, level: Level) -> list[str]:
        topics: dict[str, None] = {}
        for found in self.findings:
            if found.level is level:
                topics[found.topic] = None
        return list(topics)

    @property
    def warnings(self) -> list[str]:
        """Topics of what may be wrong, or is not judged."""
        return self._topics(Level.WARNING)

    def num_updates(self, optimizer: int) -> int | None:
        """All that an optimizer made on the first rank; None if the process was killed."""
        end = self.first.end
        if end is None or optimizer >= len(end.updates):
            return None
        return end.updates[optimizer]

    @property
    def is_right(self) -> bool:
        """Whether weights are, at least those of the main loss."""
        return self.verdict in (RIGHT, RIGHT_FOR_MAIN)

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
                "the record of a rank ends within a line: its process was killed, or TMPDIR is "
                "full",
            )
        yield from self._of_facts()
        yield from known_bad(self.first)
        for obstacle in self._obstacles():
            yield warning("not judged", obstacle)
            return
        for number in self._numbers():
            self.optimizers.append(self._judge(number))
        for optimizer in self.optimizers:
            yield from optimizer.findings
        yield from self._of_idle_ranks()
        if not self.optimizers:
            yield self._of_nothing()
            return
        yield from self._of_request()
        yield from self._of_rest()
        yield from self._of_schedules()
        yield from self._of_models()
        yield from self._of_reduction()

    def _numbers(self) -> list[int]:
        """Of the optimizers with sampled updates."""
        numbers = set()
        for updates in self._updates.values():
            for number, found in updates.items():
                if found:
                    numbers.add(number)
        return sorted(numbers)

    def _judge(self, number: int) -> OptimizerAudit:
        updates: dict[int, list[AuditedUpdate]] = {}
        for rank, found in self._updates.items():
            if found.get(number):
                updates[rank] = found[number]
        mine = self._updates[next(iter(updates))]
        others = {other: found for other, found in mine.items() if found}
        others.pop(number, None)
        is_idle = bool(self._idle(updates.keys()))
        return OptimizerAudit(number, self.ranks, updates, others, self.expect, is_idle)

    def _window(self) -> int:
        """The most backwards that updates of an optimizer usually have.

        0 if no update is judged.
        """
        longest = 0
        for optimizer in self.optimizers:
            longest = max(longest, optimizer.usual)
        return longest

    def _obstacles(self) -> Iterator[str]:
        """Why nothing is judged."""
        for rank in self.ranks.values():
            if rank.end is not None and rank.end.failure:
                yield rank.end.failure
            yield from rank.obstacles

    def _of_facts(self) -> Iterator[Finding]:
        facts = self.first.facts
        if PLUGIN not in facts or not SHARDED.isdisjoint(facts):
            return
        wrapper = "no wrapper at all"
        if DDP in facts:
            wrapper = DDP
        text = f"a {PLUGIN} was given, but no parameter is sharded: {wrapper} trains"
        kind = facts.get("Accelerator", "")
        if self.first.world > 1 and any(name in kind for name in SEVERAL_RANKS):
            yield error("not sharded", text)
        else:
            yield note("not sharded", f"{text}, on {plural(self.first.world, 'rank')}")

    # Ranks that take no part

    def _of_idle_ranks(self) -> Iterator[Finding]:
        """Ranks that run backwards, and whose optimizer never steps, though that of others does."""
        for optimizer in self.optimizers:
            idle = self._idle(optimizer.updates.keys())
            if not idle:
                continue
            which = ", ".join(map(str, idle))
            times = f"{len(optimizer.mine)} times on rank {optimizer.first}"
            text = f"{optimizer.title()} never steps on rank {which}, and {times}"
            drifting = self._drifting(optimizer, idle[0])
            if drifting:
                yield error("ranks differ", f"{text}: {drifting} ends with different values")
            else:
                yield warning("ranks differ", f"{text}: whether they are replicas is not visible")

    def _idle(self, ranks: Collection[int]) -> list[int]:
        """Other ranks that run backwards, and are no parts of a model."""
        idle = []
        for number, rank in self.ranks.items():
            if number not in ranks and not rank.parallel and rank.backwards:
                idle.append(number)
        return idle

    def _drifting(self, optimizer: OptimizerAudit, idle: int) -> str:
        """A parameter that began the same on these ranks, is reduced, and ends different."""
        mine, other = self.ranks[optimizer.first], self.ranks[idle]
        if not _reduces(mine) or not _reduces(other):
            return ""
        for number in optimizer.mine[0].step.owned:
            name = mine.leaves[number].name
            there = other.leaf_number(name)
            if there is None or not _equal(mine.leaves[number].start, other.leaves[there].start):
                continue
            first, second = _last(mine, number), _last(other, there)
            if first is not None and second is not None and not _equal(first, second):
                return name
        return ""

    def _of_nothing(self) -> Finding:
        """Why there is no optimizer to judge."""
        if not self.first.steps:
            count = max(map(unused, self.ranks.values()))
            text = f"{plural(count, 'backward')} led to no step of an optimizer of torch"
            return warning("no update", text)
        if not self.first.leaves:
            text = "no parameter was found in the graphs of the losses"
            return warning("weights unknown", text)
        text = "no optimizer that stepped updates a parameter that backwards add to"
        return warning("weights unknown", text)

    # Windows

    def _of_request(self) -> Iterator[Finding]:
        """Whether updates have the micro-batches that --expect or a framework asks for."""
        wrong: list[tuple[OptimizerAudit, int, int]] = []
        num_fitting = 0
        for optimizer in self.optimizers:
            ratio = batches_per_backward(optimizer.mine)
            for update in optimizer.mine:
                count = micro_batches(update, ratio)
                wanted = update.step.asked
                if self.expect is not None:
                    wanted = self.expect
                if wanted <= 1:
                    continue
                if count is None or wanted in (count, update.count):
                    num_fitting += 1
                else:
                    wrong.append((optimizer, count, wanted))
        if len(wrong) <= num_fitting or not wrong:
            return
        optimizer, count, wanted = wrong[0]
        text = (
            f"{optimizer.label}{wanted} micro-batches per update were asked for, an update has "
            f"{count}"
        )
        total = None
        if optimizer.scale is not None:
            total = optimizer.scale.total
        is_off = total is not None and abs(total - 1) >= 0.02
        if not num_fitting and (self.expect or is_off):
            yield error("other N", text)
        else:
            yield warning("other N", text)

    def _of_rest(self) -> Iterator[Finding]:
        """Backwards at the end without a step, and unsampled windows of another length."""
        count = unused(self.first)
        if count:
            yield warning(
                "no update", f"{plural(count, 'micro-batch')} at the end led to no update"
            )
        yield from self._of_later_optimizers()
        for optimizer in self.optimizers:
            usual = _usual_distance(optimizer)
            step = self._other_length(optimizer.number, usual)
            if step is not None:
                text = f"update {step.update} has {step.backwards} backwards, others have {usual}"
                advice = f"--updates {step.update} would sample it"
                yield warning("not sampled", f"{optimizer.label}{text}; {advice}")

    def _of_later_optimizers(self) -> Iterator[Finding]:
        """Those that made their first step when sampling had ended."""
        sampled, later = set(), {}
        for step in self.first.steps:
            if step.is_sampled:
                sampled.add(step.optimizer)
            else:
                later[step.optimizer] = step.name
        for number, name in later.items():
            if number in sampled:
                continue
            count = self.num_updates(number)
            made = "made updates"
            if count is not None:
                made = f"made {plural(count, 'update')}"
            text = f"a further {name} {made} after sampling had ended"
            yield warning("not judged", f"{text}; a larger --updates samples some")

    def _other_length(self, optimizer: int, usual: int) -> RecordedStep | None:
        """The first step that is not sampled of a window of another length."""
        for step in self.first.steps:
            if step.optimizer == optimizer and not step.is_sampled and step.backwards != usual:
                return step
        return None

    def _of_schedules(self) -> Iterator[Finding]:
        """Schedules that were told the number of micro-batches, and step once per update.

        Only where the data came to their end: a training that is cut short ends before its
        schedule, too.
        """
        end = self.first.end
        if end is None or not end.is_end_of_data or len(self.optimizers) != 1:
            return
        (optimizer,) = self.optimizers
        ratio = batches_per_backward(optimizer.mine)
        if any(micro_batches(update, ratio) != update.count for update in optimizer.mine):
            return
        num_updates = self.num_updates(optimizer.number)
        if num_updates is None:
            return
        for schedule in end.schedules:
            is_of_batches = abs(schedule.length - end.all_backwards) <= 1
            is_of_updates = abs(schedule.position - num_updates) <= 1
            if is_of_batches and is_of_updates and schedule.length > num_updates + optimizer.usual:
                text = (
                    f"{schedule.name} ends at step {num_updates} of {schedule.length}: "
                    f"{schedule.length_name} is the number of micro-batches, and it steps once "
                    "per update"
                )
                yield warning("schedule", f"{text}; wrong unless training was stopped early")

    # Models

    def _of_models(self) -> Iterator[Finding]:
        """What models do at each micro-batch."""
        usual = self._window()
        if self.first.batch_norms and usual > 1:
            text = (
                f"{plural(self.first.batch_norms, 'BatchNorm module')} normalize each "
                "micro-batch by itself"
            )
            yield note("batch norm", f"{text}: not what a batch of {usual} micro-batches gives")
        for optimizer in self.optimizers:
            if _copies_move(optimizer):
                text = (
                    "a copy of the parameters changes at every backward of an update, as if "
                    "an average was moved then"
                )
                yield warning("moving average", f"{optimizer.label}{text}")
                break
        if usual > 1 and contrast(self.first.backwards):
            text = "the rows of a micro-batch are contrasted with each other"
            yield note(
                "contrastive",
                f"{text}: it has fewer negatives than a batch of {usual} micro-batches",
            )

    # Reduction

    def _of_reduction(self) -> Iterator[Finding]:
        """What is reduced at each backward of a full window in the middle."""
        optimizer = self.optimizers[0]
        full = [update for update in optimizer.mine if update.count == optimizer.usual]
        backwards = full[len(full) // 2].backwards
        sent = [sum(backward.reduced.values()) for backward in backwards]
        if self.first.world == 1:
            return
        if not any(sent):
            if not self.first.parallel:
                text = "no reduction of a floating-point tensor was seen in a window"
                yield warning("no reduction seen", text)
        elif len(sent) > 1:
            yield from self._of_sent(backwards, sent, backwards_per_batch(optimizer.mine))
        yield from self._of_bytes(backwards)

    def _of_sent(
        self, backwards: list[RecordedBackward], sent: list[int], per_batch: int | None
    ) -> Iterator[Finding]:
        """At which backwards of a window bytes are sent."""
        by_batch = _by_micro_batch(sent, per_batch)
        names: set[str] = set()
        for backward in backwards:
            names.update(backward.reduced)
        places = ", ".join(map(str, np.flatnonzero(sent) + 1))
        text = (
            f"{', '.join(sorted(names))} at backward {places} of {len(sent)}: "
            f"{sum(sent):,} bytes per rank and update"
        )
        if all(by_batch):
            yield good("eager", f"{text}; once would be {by_batch[-1]:,}{self._advice()}")
        else:
            each = f"at each backward it would be {len(sent) * max(sent):,}"
            yield good("deferred", f"{text}; {each}")

    def _advice(self) -> str:
        """How to reduce once per update; empty where that is not to be had, or costs memory."""
        if DDP not in self.first.facts:
            return ""
        return ", with DDP's no_sync around forward and backward of all micro-batches but the last"

    def _of_bytes(self, backwards: list[RecordedBackward]) -> Iterator[Finding]:
        """Less is reduced than the gradients have."""
        is_whole = len(self.optimizers) == 1 and len(self.first.gradient_bytes) == 1
        if not is_whole or DDP not in self.first.facts:
            return
        ((dtype, size),) = self.first.gradient_bytes.items()
        most = 0
        for backward in backwards:
            reduced = 0
            for name, num_bytes in backward.reduced.items():
                if f" of {dtype} " in name:
                    reduced += num_bytes
            most = max(most, reduced)
        if 0 < most < size:
            text = f"{size - most:,} of the {size:,} bytes of gradients are never reduced"
            yield warning(
                "reduced less", f"{text}: a parameter that is not, or one without a gradient"
            )


def _reduces(rank: RecordedRank) -> bool:
    """Whether gradients are reduced during a backward."""
    return any(backward.reduced for backward in rank.backwards)


def _last(rank: RecordedRank, leaf: int) -> Vector | None:
    """A few values of a parameter when the process ended; None if they are not known."""
    if rank.end is None or leaf >= len(rank.end.end):
        return None
    return rank.end.end[leaf]


def _equal(first: Vector | None, second: Vector | None) -> bool:
    """Whether both are known, and the same bit for bit."""
    return first is not None and second is not None and np.array_equal(first, second)


def _copies_move(optimizer: OptimizerAudit) -> bool:
    """Whether copies of parameters change between the backwards of most updates."""
    num_longer, num_moving = 0, 0
    for update in optimizer.mine:
        if update.count > 1:
            num_longer += 1
            num_moving += all(map(_moves_copies, pairwise(update.backwards)))
    return num_moving > num_longer / 2


def _moves_copies(backwards: tuple[RecordedBackward, RecordedBackward]) -> bool:
    """Whether copies of parameters differ between two backwards."""
    before, after = backwards
    are_equal = map(np.array_equal, before.copies, after.copies)
    return not all(are_equal)


def _usual_distance(optimizer: OptimizerAudit) -> int:
    """Of all backwards between two of its steps."""
    return mode([update.step.backwards for update in optimizer.mine])


def _by_micro_batch(sent: list[int], per_batch: int | None) -> list[int]:
    """What each micro-batch of a window sends; by backward where these cannot be told apart.

    A chunked loss has a backward for each chunk, of which the last sends for its micro-batch.
    """
    if per_batch is None or all(sent):
        return sent
    if len(sent) <= per_batch or len(sent) % per_batch != 0:
        return sent
    starts = range(0, len(sent), per_batch)
    return [sum(sent[start : start + per_batch]) for start in starts]
