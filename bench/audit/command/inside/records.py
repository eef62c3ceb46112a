"""What the recorder writes of a rank, as lines of JSON, and ``bench audit`` reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class MicroBatch:
    """One backward of an update that is sampled."""

    criteria: list[dict[str, Any]]
    """Of its loss; see ``criteria.watch``."""
    sample: Any = ()
    """Per leaf what it added to the gradient at each coordinate."""
    reduced: Counter[str] = field(default_factory=Counter)
    """Bytes by collective, until the next backward."""

    @property
    def criterion(self) -> dict[str, Any]:
        """The criterion with the largest factor in the loss; empty if there is none."""
        return max(self.criteria, key=lambda found: abs(found["seed"] or 0.0), default={})

    def loss_weight(self, weight: float) -> float | None:
        """What the mean of the loss weighs, by the weight of the micro-gradient; None if that is not visible."""
        found = self.criterion
        terms = 1.0 if found.get("reduction") == "mean" else found.get("terms")
        return weight * found["seed"] * terms if terms and found["reduction"] and found["seed"] else None


@dataclass
class AuditedUpdate:
    """One update: the backwards since the one before, and the steps that follow (ZeRO has several)."""

    number: int
    events: str = ""
    """``BBBBCS``: backwards, clipping, the step, and Z where the gradient was cleared before a backward."""
    micro_batches: list[MicroBatch] = field(default_factory=list)
    left: Any = ()
    """Per leaf the gradient at each coordinate before the first backward; NaN where this rank has none."""
    used: Any = ()
    """The same that the optimizer uses, as it was before it was scaled and clipped."""
    optimizer: str = ""
    """Name and id, which tells two optimizers of one class apart; empty while no step has been taken."""
    asked: int = 1
    """How many micro-batches a framework was asked for."""
    held: list[str] = field(default_factory=list)
    """Dtypes of the sums of micro-gradients."""
    clips_early: bool = False
    """Whether a backward has added to a gradient that was clipped."""
    doubts: list[str] = field(default_factory=list)
    """Why backwards may be parts of one loss instead of micro-batches."""
    obstacles: list[str] = field(default_factory=list)
    """Why backwards are no micro-batches, or gradients no sums of them."""

    @property
    def count(self) -> int:
        return self.events.count("B")


@dataclass
class Rank:
    """A process that trains."""

    job: str
    """Tells one training from another."""
    rank: int
    world: int
    facts: dict[str, str] = field(default_factory=dict)
    """What frameworks were asked for, by the name of a class."""
    leaves: list[Any] = field(default_factory=list)
    """Name, shape, and values at the coordinates of each that is sampled."""
    updates: list[AuditedUpdate] = field(default_factory=list)

    @property
    def sampled(self) -> list[AuditedUpdate]:
        """Updates that were made and sampled."""
        return [update for update in self.updates if update.optimizer and update.micro_batches]
