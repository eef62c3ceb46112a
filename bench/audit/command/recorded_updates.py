"""The updates of each rank of an audited command, from the events that its processes wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
LETTERS = {"backward": "B", "clip": "C", "zero_grad": "Z", "step": "S", "skip": "K"}
"""Events of a window, for messages: ``BBBBCS``."""


@dataclass
class MicroBatch:
    """One backward: its criteria, the sampled micro-gradient (a list or None per leaf), and what was reduced in it."""

    event: Event
    reductions: Counter[tuple[str, str, int]]
    """Bytes of reductions by operation, dtype and number of ranks."""

    @property
    def samples(self) -> list[list[float] | None] | None:
        return self.event.get("samples")


@dataclass
class Update:
    """One optimizer update on one rank: the backwards since the one before, and the gradient that was used."""

    events: str = ""
    micro_batches: list[MicroBatch] = field(default_factory=list)
    clipped: list[Any] | None = None
    """The gradient at the last clipping, before it."""
    steps: list[Event] = field(default_factory=list)
    """Of the inner optimizers: ZeRO and torchtitan have several."""

    @property
    def used(self) -> list[Any]:
        """Per leaf its positions on this rank and their values, or None."""
        if self.clipped and "B" not in self.events[self.events.rfind("C") :]:
            return self.clipped
        leaves = zip(*(step["used"] for step in self.steps if "used" in step), strict=True)
        return [next((found for found in leaf if found is not None), None) for leaf in leaves]

    @property
    def asked(self) -> dict[str, int]:
        return self.steps[0].get("asked", {})


@dataclass
class RankRecord:
    """All that one rank did."""

    events: list[Event]
    updates: list[Update] = field(default_factory=list)
    left_open: Update | None = None
    """What no update followed."""

    def __post_init__(self) -> None:
        current = Update()
        closed = False
        for event in self.events:
            kind = event["event"]
            if closed and kind in ("backward", "clip"):
                current, closed = Update(), False
            if kind == "backward":
                current.micro_batches.append(MicroBatch(event, _reductions(event)))
            elif current.micro_batches and not closed:
                current.micro_batches[-1].reductions += _reductions(event)
            if not closed and (kind == "backward" or current.micro_batches):
                current.events += LETTERS.get(kind, "")
            if kind == "clip" and any(event.get("used", ())):
                current.clipped = event["used"]
            if kind == "step" and current.micro_batches:
                current.steps.append(event)
                if not closed:
                    self.updates.append(current)
                closed = True
            if kind == "skip":
                closed = True
        self.left_open = current if current.micro_batches and not closed else None

    def first(self, kind: str) -> Event | None:
        """The first event of a kind."""
        return next((event for event in self.events if event["event"] == kind), None)

    @property
    def facts(self) -> Event:
        """What frameworks were asked for."""
        return (self.first("probes") or {}).get("facts", {})

    @property
    def ended(self) -> bool:
        """Whether the process ended by itself."""
        return self.events[-1]["event"] == "end"


def _reductions(event: Event) -> Counter[tuple[str, str, int]]:
    """Reductions of floating-point tensors; gathers carry parameters."""
    return Counter(
        {
            (operation, dtype, ranks): size
            for operation, dtype, ranks, size in event.get("traffic", ())
            if operation != "all_gather" and "float" in dtype
        }
    )


def read(folder: Path) -> tuple[dict[int, RankRecord], int]:
    """The ranks of the training with the most updates, and how many processes trained apart from it.

    A command may train several times, and a launcher may restart its ranks: the last of equals is taken.
    """
    trainings: dict[tuple[str, int], dict[int, RankRecord]] = {}
    processes = 0
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        if events := list(_complete(path.read_text(encoding="utf-8").splitlines())):
            last, record = events[-1], RankRecord(events)
            processes += record.first("backward") is not None
            ranks = trainings.setdefault((last["job"], last["world"]), {})
            if last["rank"] not in ranks or len(record.updates) >= len(ranks[last["rank"]].updates):
                ranks[last["rank"]] = record
    if not trainings:
        return {}, 0
    chosen = max(reversed(trainings.values()), key=lambda ranks: sum(len(record.updates) for record in ranks.values()))
    return dict(sorted(chosen.items())), processes - len(chosen)


def _complete(lines: Iterable[str]) -> Iterable[Event]:
    """The events; a process that was killed may have cut off its last line."""
    for line in lines:
        if line.endswith("}"):
            yield json.loads(line)
