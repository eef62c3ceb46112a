"""The settings of ThroughputMonitor that are measured, and the verdicts on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

MICRO_BATCH_S, OPTIMIZER_S = 0.01, 0.08
"""Default seconds of a micro-batch and of an optimizer step: a slow step, as with offload, so that
bias shows."""

SAMPLES = 2
"""Default samples per micro-batch."""
VALIDATION_S = 0.05
"""Seconds of a validation."""
WANTED_RATES = 6
"""Rates that can be judged: a training is long enough for at least so many."""


class Epoch(StrEnum):
    """The number of micro-batches in an epoch, NB, in relation to N."""

    WHOLE = "whole"
    """One epoch of complete windows."""
    PARTIAL = "partial"
    """Epochs of two and a half windows."""
    SHORT = "short"
    """Epochs of half a window: NB < N."""

    def micro_batches(self, accumulate: int) -> int:
        """NB; for the one whole epoch, the length of a window."""
        half = accumulate // 2
        match self:
            case Epoch.WHOLE:
                return accumulate
            case Epoch.PARTIAL:
                return 2 * accumulate + half
            case Epoch.SHORT:
                return half


class Strategy(StrEnum):
    """What the Trainer trains with."""

    DDP = "ddp"
    DEEPSPEED = "deepspeed"
    """ZeRO-2."""


class RateVerdict(StrEnum):
    """The verdict on one point of the grid."""

    RIGHT = "right"
    """Every rate is within the tolerance of the truth."""
    BIASED = "biased"
    """The rates are wrong by the same ratio."""
    UNSTEADY = "unsteady"
    """The rates are wrong by different ratios."""
    UNRATED = "unrated"
    """The monitor logs, but no rate that can be judged."""
    SILENT = "silent"
    """The monitor never logs."""
    RAISED = "raised"
    """The monitor raised an error."""


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of the Trainer and its monitor, with the workload."""

    accumulate: int
    """``accumulate_grad_batches``, N."""
    log_every_n_steps: int
    """In optimizer steps."""
    window_size: int
    """The monitor's window in micro-batches, at least 2."""
    epoch: Epoch = Epoch.WHOLE
    micro_batch_s: float = MICRO_BATCH_S
    optimizer_s: float = OPTIMIZER_S
    samples: tuple[int, ...] = (SAMPLES,)
    """Samples of the micro-batches, in turn."""
    micro_batches: int | None = None
    """NB, instead of ``epoch``."""
    num_epochs: int | None = None
    """Only with NB. None: enough for WANTED_RATES."""
    strategy: Strategy = Strategy.DDP
    world_size: int = 1
    """Ranks, each with as many samples."""
    validate_every: int | None = None
    """Micro-batches between validations, of VALIDATION_S each; None for none."""

    @property
    def epoch_name(self) -> str:
        """The kind of epoch in tables; NB if that is given."""
        if self.micro_batches is None:
            return str(self.epoch)
        return f"NB = {self.micro_batches}"

    @property
    def is_alone(self) -> bool:
        """Whether one process is enough."""
        return self.world_size == 1 and self.strategy is Strategy.DDP

    @property
    def lengths(self) -> tuple[int, int]:
        """Micro-batches per epoch, and epochs."""
        per_epoch = self.micro_batches
        if per_epoch is None:
            per_epoch = self.epoch.micro_batches(self.accumulate)
        updates_per_epoch = math.ceil(per_epoch / self.accumulate)
        # A rate's span must begin after an update, so that whole windows cover it.
        filled = math.ceil((self.window_size + self.accumulate) * updates_per_epoch / per_epoch) + 1
        logs = math.ceil(filled / self.log_every_n_steps) + WANTED_RATES - 1
        epochs = math.ceil(logs * self.log_every_n_steps / updates_per_epoch)
        if self.num_epochs is not None:
            return per_epoch, self.num_epochs
        if self.micro_batches is None and self.epoch is Epoch.WHOLE:
            return per_epoch * epochs, 1
        return per_epoch, epochs
