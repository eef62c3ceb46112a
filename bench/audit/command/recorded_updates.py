"""The updates of each rank of an audited command, from the events that its processes wrote."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
LETTERS = {"backward": "B", "clip": "C", "zero_grad": "Z", "step": "S"}
"""Events of a window, for messages: ``BBBBCS``."""
LONG = 24
"""Of more events the first and the last are shown."""


@dataclass
class AuditedUpdate:
    """One optimizer update on one rank: the backwards since the one before, and its steps (ZeRO has several)."""

    events: str = ""
    micro_batches: list[Event] = field(default_factory=list)
    """The backwards; ``reduced`` is bytes by operation, dtype and number of ranks until the next one."""
    steps: list[Event] = field(default_factory=list)
    clips_early: bool = False
    """Whether a backward has added to a gradient that was clipped."""

    @property
    def used(self) -> list[Any]:
        """Per leaf its positions on this rank and their values, or nothing."""
        leaves = zip(*(step["used"] for step in self.steps if "used" in step), strict=True)
        return [next(filter(None, leaf), None) for leaf in leaves]

    def shown(self) -> str:
        """The events, for a message."""
        text = self.events
        return text if len(text) <= LONG else f"{text[: LONG // 2]}...{text[-LONG // 2 :]}"

    def add(self, event: Event, clipped: list[bool]) -> None:
        """Add an event; ``clipped`` are the leaves that are clipped, of which it may add more."""
        self.events += LETTERS.get(event["event"], "")
        if event["event"] == "backward":
            self.micro_batches.append({"samples": [], "reduced": Counter()} | event)
            leaves = zip(clipped, event.get("samples", ()), strict=False)
            self.clips_early |= any(is_clipped and added for is_clipped, added in leaves)
        if self.micro_batches:
            traffic = {(name, dtype, ranks): size for name, dtype, ranks, size in event["traffic"]}
            self.micro_batches[-1]["reduced"].update(traffic)


@dataclass
class RankRecord:
    """All that one rank did."""

    events: list[Event]
    updates: list[AuditedUpdate] = field(default_factory=list)
    left_open: AuditedUpdate = field(default_factory=AuditedUpdate)
    """What no update has followed."""

    def __post_init__(self) -> None:
        # Steps without a backward in between are one update; what follows a step belongs to the next window.
        clipped: list[bool] = []
        for event in self.events:
            kind, window = event["event"], self.left_open
            if kind in ("backward", "between", "clip") or (window.micro_batches and kind in LETTERS):
                window.add(event, clipped)
            if kind == "clip":
                clipped = event["leaves"]
            if kind == "step" and window.micro_batches:
                self.updates.append(window)
            if kind == "step" and self.updates:
                self.updates[-1].steps.append(event)
            if kind in ("step", "skip"):
                self.left_open, clipped = AuditedUpdate(), []

    def first(self, kind: str) -> Event:
        """The first event of a kind; empty if there is none."""
        return next((event for event in self.events if event["event"] == kind), {})


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
