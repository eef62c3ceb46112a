"""What is wrong with an audited training, as far as that is certain; everything else is a warning or not judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import mode
from typing import Any

import numpy as np

from bench.audit.command.gradient_weights import EXPLAINED, ExplainedGradient, explain, flat
from bench.audit.command.inside.records import Rank
from bench.audit.command.loss_scale import LossScale, described
from bench.findings import Finding, Level, error, good, warning
from bench.formatting import plural
from bench.grouping import grouped


class TrainingAudit:
    """The findings of one training: errors are certain, warnings are not, the rest are facts."""

    def __init__(self, ranks: Mapping[int, Rank], expect: int | None = None) -> None:
        self.ranks, self.expect = ranks, expect
        self.first = next(iter(ranks.values()))
        """The rank of which most is said."""
        self.updates = self.first.sampled
        self.usual = mode([update.count for update in self.updates] or [0])
        """Micro-batches of most updates."""
        self.held = {dtype for update in self.updates for dtype in update.held}
        """Dtypes in which gradients are held between micro-batches."""
        self.gradients: list[ExplainedGradient] = []
        """Where their weights mean something."""
        self.findings = sorted(self._all(), key=lambda found: [*Level].index(found.level))
        """Errors first."""

    @property
    def verdict(self) -> str:
        """The faults, or how far the training was judged."""
        faults = [found.topic for found in self.findings if found.level is Level.ERROR]
        judged = any(found.topic == "scale 1" for found in self.findings)
        return ", ".join(faults) or ("right" if judged else "nothing wrong seen, not all judged")

    def _all(self) -> Iterator[Finding]:
        if len(self.ranks) < self.first.world:
            yield warning("ranks missing", f"{len(self.ranks)} of {self.first.world} ranks ran a backward")
        yield from self._of_request()
        # Why backwards are no micro-batches, or gradients no sums of them.
        reasons = [why for rank in self.ranks.values() for update in rank.updates for why in update.obstacles]
        if any(rank.leaves != self.first.leaves for rank in self.ranks.values()):
            why = "ranks are no replicas, never were made equal, or run different layers"
            reasons.append(f"sampled parameters differ: {why}")
        if reasons:
            yield warning("not judged", reasons[0])
        elif self.updates:
            yield from list(self._of_windows()) or self._of_weights()
            yield from self._of_reduction()
            if self.usual > 1 and (low := {"bfloat16", "float16"} & self.held):
                yield error("low precision", f"gradients of {self.usual} micro-batches are summed in {'/'.join(low)}")

    def _of_request(self) -> Iterator[Finding]:
        facts = self.first.facts
        if "FullyShardedDataParallelPlugin" in facts and not {"FSDPParam", "FullyShardedDataParallel"} & facts.keys():
            wrapper = "DistributedDataParallel" if "DistributedDataParallel" in facts else "no wrapper at all"
            text = f"a FullyShardedDataParallelPlugin was given, but no parameter is sharded: {wrapper} trains"
            yield error("not sharded", text)
        wanted = [(update.count, self.expect or update.asked) for update in self.updates]
        others = [(count, number) for count, number in wanted if count != number > 1]
        if len(others) > len(wanted) / 2:
            text = f"{others[0][1]} micro-batches per update were asked for, an update has {others[0][0]}"
            yield error("other N", text)
        for update in (update for update in self.first.updates if not update.obstacles):
            if not update.optimizer:
                yield warning("no update", f"{plural(update.count, 'micro-batch')} at the end led to no update")
            elif not update.micro_batches and update.count < self.usual:
                text = f"has fewer micro-batches than others; --updates {update.number} would sample it"
                yield warning("not sampled", f"update {update.number} {text}")

    def _of_windows(self) -> Iterator[Finding]:
        """Faults with which weights mean nothing."""
        counts = {number: [update.count for update in rank.sampled] for number, rank in self.ranks.items()}
        if any(len(set(numbers)) > 1 for numbers in zip(*counts.values(), strict=False)):
            text = "; ".join(f"rank {rank}: {pattern(numbers)}" for rank, numbers in counts.items())
            yield error("ranks differ", f"micro-batches per update differ: {text}")
        # In a longer window a step may have been skipped after clipping.
        if early := [update.events for update in self.updates if update.clips_early and update.count <= self.usual]:
            share = f"{len(early)} of {len(self.updates)} updates"
            text = f"in {share} gradients are clipped before the last backward: {early[0]}"
            yield error("clips too early", text)
        used = flat(values for update in self.updates for values in update.used)
        adds = any(flat(batch.sample).any() for update in self.updates for batch in update.micro_batches)
        if adds and (used == 0).any() and not np.nan_to_num(used).any():
            yield error("no gradient", "the gradients that the optimizer is given are None or 0")

    def _of_weights(self) -> Iterator[Finding]:
        gradients, reason = explain(self.ranks)
        residual = max((gradient.residual for gradient in gradients), default=0.0)
        if not gradients:
            yield warning("weights unknown", reason)
        elif residual > EXPLAINED:
            text = f"up to {residual:.0%} of a gradient is no sum of the micro-gradients that were seen"
            yield warning("not judged", text)
        else:
            self.gradients = gradients
            presence = list(self._of_presence())
            yield from presence
            if not any(found.level is Level.ERROR for found in presence):
                yield from LossScale(gradients, self.first, self.usual).findings()

    def _of_presence(self) -> Iterator[Finding]:
        """Which micro-batches are in the gradients of their own ranks and of others, and what else is."""
        weights = [(gradient.update, found) for gradient in self.gradients for found in gradient.weights]
        presence = grouped(((update, found.rank, found.micro_batch), found.is_present) for update, found in weights)
        if foreign := [place for place, present in presence.items() if len({*present}) > 1]:
            numbers = sorted({number + 1 for _, _, number in foreign})
            share = f"{len({update for update, _, _ in foreign})} of {len({update for update, _ in weights})} updates"
            if len(numbers) >= self.usual:
                yield error("not reduced", f"no micro-batch of other ranks is in a rank's gradient ({share})")
            else:
                which = f"micro-batches {numbers} of {self.usual} of other ranks"
                text = f"{which} are missing in a rank's gradient ({share}): replicas drift apart"
                yield error("partly reduced", text)
        lost = grouped((place[:2], place[2] + 1) for place in sorted(presence) if not any(presence[place]))
        found: dict[str, Finding] = {}
        for (update, rank), numbers in lost.items():
            text = f"micro-batches {numbers} of update {update + 1} have weight 0"
            events = self.ranks[rank].sampled[update].events
            events += " (cleared at Z)" if "Z" in events else ""
            if len(numbers) % self.usual:
                found.setdefault("lost", error("lost", f"{text}: {events}"))
            else:
                found.setdefault("skipped", warning("skipped", f"{text}, as if an update was skipped: {events}"))
        yield from found.values()
        if old := [gradient for gradient in self.gradients if gradient.has_left]:
            share = f"{len(old)} of {len(self.gradients)}"
            yield error("not cleared", f"{share} gradients contain that of the update before")

    def _of_reduction(self) -> Iterator[Finding]:
        """What is reduced at each backward of a full window in the middle."""
        windows = [update.micro_batches for update in self.updates if update.count == self.usual]
        reductions = [found.reduced for found in windows[len(windows) // 2]]
        sent = [sum(reduced.values()) for reduced in reductions]
        names = ", ".join(sorted({name for reduced in reductions for name in reduced}))
        places = ", ".join(str(place) for place, size in enumerate(sent, 1) if size)
        text = f"{names} at backward {places} of {len(sent)}: {sum(sent):,} bytes per rank and update"
        if self.first.world > 1 and not any(sent):
            yield warning("no reduction seen", "no reduction of a floating-point tensor was seen in a window")
        elif all(sent) and len(sent) > 1:
            yield good("eager", f"{text}; once would be {sent[-1]:,}")
        elif any(sent) and len(sent) > 1:
            yield good("deferred", f"{text}; at each backward it would be {len(sent) * max(sent):,}")


def pattern(counts: list[int]) -> str:
    """The first few numbers of micro-batches per update."""
    return " ".join(map(str, counts[:6])) + (" ..." if len(counts) > 6 else "")


MARKS = {Level.ERROR: "x", Level.WARNING: "!", Level.GOOD: "-"}
MOST_RANKS = 3
"""Ranks whose weights are shown."""


def evidence(audit: TrainingAudit) -> dict[str, str]:
    """What was seen, by name."""
    facts = [f"{name} {fact}".strip() for name, fact in audit.first.facts.items()]
    shown = {"ranks": f"{len(audit.ranks)} of {audit.first.world}", "wrappers": ", ".join(facts) or "none"}
    if audit.updates:
        counts = pattern([update.count for update in audit.updates])
        update = audit.updates[:2][-1]  # the first may be a special one
        shown["updates"] = f"{counts} micro-batches; events {update.events}; {update.optimizer.split()[0]}"
        shown["loss"] = described(update.micro_batches[0])
    if audit.gradients:
        gradient = min(audit.gradients, key=lambda gradient: (abs(gradient.update - 1), gradient.gradient_of))
        place = f"update {gradient.update + 1} of rank {gradient.gradient_of[0]}"
        for rank in [*audit.ranks][:MOST_RANKS]:
            row = [w.weight if w.loss_weight is None else w.loss_weight for w in gradient.weights if w.rank == rank]
            numbers = " ".join(f"{weight:.4f}" for weight in row) or "cannot be told apart"
            shown[f"rank {rank}"] = f"weights in {place}: {numbers}"
        residual = max(gradient.residual for gradient in audit.gradients)
        shown["residual"] = f"{residual:.0e} of the gradients is not explained by weights"
        shown["held in"] = ", ".join(sorted(audit.held)) or "unknown"
    return shown


def screen(audit: TrainingAudit) -> list[str]:
    """The screen: the verdict first, then the evidence."""
    findings = [f"  {MARKS[found.level]} {found.topic}: {found.text}" for found in audit.findings]
    shown = [f"{name:9} {text}" for name, text in evidence(audit).items()]
    return [f"{'verdict':9} {audit.verdict}", *findings, *shown]


def document(audit: TrainingAudit, status: int) -> dict[str, Any]:
    """The same as data."""
    return {
        "verdict": audit.verdict,
        "findings": [found.to_dict() for found in audit.findings],
        "exit_status": status,
        "evidence": evidence(audit),
        "weights": [
            {"update": gradient.update, "gradient_of": gradient.gradient_of, **vars(weight)}
            for gradient in audit.gradients
            for weight in gradient.weights
        ],
    }
