"""The updates of each rank of an audited command, from the events that its processes wrote."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Reductions = Counter[tuple[str, str, int]]
"""Bytes by operation, dtype and number of ranks."""
LETTERS = {"backward": "B", "clip": "C", "zero_grad": "Z", "step": "S", "skip": "K"}
"""Events of a window, for messages: ``BBBBCS``."""

MANY = 12
"""As many events of a kind in a row are counted instead of listed."""


@dataclass
class MicroBatch:
    """One backward: its event, and what was reduced from then on to the next."""

    event: Event
    reductions: Reductions

    @property
    def samples(self) -> list[list[float] | None]:
        """The micro-gradient, per leaf; empty when sampling has ended."""
        return self.event.get("samples", [])  # type: ignore[no-any-return]


@dataclass
class AuditedUpdate:
    """One optimizer update on one rank: the backwards since the one before, and its steps (ZeRO has several)."""

    events: str = ""
    micro_batches: list[MicroBatch] = field(default_factory=list)
    clipped: list[Any] = field(default_factory=list)
    """The gradient at the last clipping, before it."""
    clips_early: bool = False
    """Whether a backward has added to a gradient that was clipped."""
    steps: list[Event] = field(default_factory=list)

    @property
    def used(self) -> list[Any]:
        """Per leaf its positions on this rank and their values, or nothing."""
        if self.clipped and "B" not in self.events[self.events.rfind("C") :]:
            return self.clipped
        leaves = zip(*(step["used"] for step in self.steps if "used" in step), strict=True)
        return [next(filter(None, leaf), None) for leaf in leaves]

    def shown(self) -> str:
        """The events for a message, runs of many in short: ``B*40 S``."""
        runs = [(letter, len(list(run))) for letter, run in groupby(self.events)]
        return "".join(letter * count if count < MANY else f"{letter}*{count} " for letter, count in runs)

    def add(self, event: Event) -> None:
        """Add an event that belongs to this update."""
        kind = event["event"]
        reductions = Counter({(name, dtype, n): size for name, dtype, n, size in event["traffic"] if "float" in dtype})
        if kind == "backward":
            self.micro_batches.append(MicroBatch(event, reductions))
            leaves = zip(self.clipped, event.get("samples", ()), strict=False)
            self.clips_early |= any(clipped and added for clipped, added in leaves)
        elif self.micro_batches:
            self.micro_batches[-1].reductions.update(reductions)
        self.events += LETTERS.get(kind, "")
        if kind == "clip" and any(event.get("used", ())):
            self.clipped = event["used"]


@dataclass
class RankRecord:
    """All that one rank did."""

    events: list[Event]
    updates: list[AuditedUpdate] = field(default_factory=list)
    left_open: AuditedUpdate = field(default_factory=AuditedUpdate)
    """What no update has followed."""

    def __post_init__(self) -> None:
        # Steps without a backward in between are one update; what follows a step belongs to the next window.
        for event in self.events:
            kind, window = event["event"], self.left_open
            if kind in ("backward", "clip", "between") or (window.micro_batches and kind in LETTERS):
                window.add(event)
            if kind == "step" and (window.micro_batches or self.updates):
                if window.micro_batches:
                    self.updates.append(window)
                self.updates[-1].steps.append(event)
            if kind in ("step", "skip"):
                self.left_open = AuditedUpdate()

    def first(self, kind: str) -> Event:
        """The first event of a kind; empty if there is none."""
        return next((event for event in self.events if event["event"] == kind), {})

    @property
    def facts(self) -> Event:
        """What frameworks were asked for."""
        return self.first("probes").get("facts", {})  # type: ignore[no-any-return]


def read(folder: Path) -> tuple[dict[int, RankRecord], int]:
    """The ranks of the training with the most updates, and how many processes trained apart from it.

    A command may train several times, and a launcher may restart its ranks: the last of equals is taken.
    """
    trainings: dict[tuple[str, int], dict[int, RankRecord]] = {}
    processes = 0
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        # A process that was killed may have cut off its last line.
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        record = RankRecord([json.loads(line) for line in lines])
        if not record.events:
            continue
        processes += 1
        # In its group: a spawned process knows nothing of it any more when it ends.
        place = max(record.events, key=lambda event: event["world"])
        rank, ranks = place["rank"], trainings.setdefault((place["job"], place["world"]), {})
        if rank not in ranks or len(record.updates) >= len(ranks[rank].updates):
            ranks[rank] = record
    sizes = [sum(len(record.updates) for record in ranks.values()) for ranks in trainings.values()]
    chosen = [ranks for ranks, size in zip(trainings.values(), sizes, strict=True) if size == max(sizes)]
    ranks = dict(sorted(chosen[-1].items())) if chosen else {}
    return ranks, processes - len(ranks)
