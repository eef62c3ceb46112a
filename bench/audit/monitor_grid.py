"""The settings of ThroughputMonitor that are tried, and what is judged of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

MICRO_BATCH_S, OPTIMIZER_S = 0.01, 0.08
"""Seconds of a micro-batch and of an optimizer step, unless told: a slow step, as with offload, so that bias shows."""

SAMPLES = 2
"""Per micro-batch, unless told."""
WANTED_RATES = 6
"""A run is so long that the monitor can log at least so many rates that can be judged."""


class Epoch(StrEnum):
    """How the number of micro-batches in an epoch, NB, stands to N."""

    WHOLE = "whole"
    """One epoch of whole windows."""
    PARTIAL = "partial"
    """Epochs of two windows and half a one."""
    SHORT = "short"
    """Epochs of half a window: NB < N."""

    def micro_batches(self, accumulate: int) -> int:
        """NB of the epochs that are repeated; of a single whole epoch, the length of one window."""
        half = accumulate // 2
        return {Epoch.WHOLE: accumulate, Epoch.PARTIAL: 2 * accumulate + half, Epoch.SHORT: half}[self]


class RateVerdict(StrEnum):
    """What a point of the grid came to."""

    RIGHT = "right"
    """Every rate is within the tolerance of the truth."""
    BIASED = "biased"
    """The rates are off, all alike."""
    UNSTEADY = "unsteady"
    """The rates are off, and differently from one another though the truth is known for each."""
    UNRATED = "unrated"
    """It logs, but never a rate that can be judged."""
    SILENT = "silent"
    """It never logs."""
    RAISED = "raised"
    """The monitor raised an error."""


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of the Trainer and its monitor, and the workload that it watches."""

    accumulate: int
    """``accumulate_grad_batches``, N."""
    log_every_n_steps: int
    """In optimizer steps."""
    window_size: int
    """Of the monitor, in micro-batches; at least 2."""
    epoch: Epoch = Epoch.WHOLE
    micro_batch_s: float = MICRO_BATCH_S
    optimizer_s: float = OPTIMIZER_S
    samples: tuple[int, ...] = (SAMPLES,)
    """Samples of the micro-batches, in turn."""
    micro_batches: int | None = None
    """NB, instead of what ``epoch`` says."""
    num_epochs: int | None = None
    """If NB is given. None: enough for the rates that are wanted, or for ``max_steps``."""
    max_steps: int | None = None
    """Optimizer steps to stop after, if NB is given and the epochs are not over before."""

    @property
    def lengths(self) -> tuple[int, int]:
        """Micro-batches per epoch, and epochs: enough for the rates that are wanted, unless told."""
        per_epoch = self.micro_batches or self.epoch.micro_batches(self.accumulate)
        updates_per_epoch = math.ceil(per_epoch / self.accumulate)
        # The span of a rate must begin after an update, so that whole windows cover it.
        filled = math.ceil((self.window_size + self.accumulate) * updates_per_epoch / per_epoch) + 1
        logs = math.ceil(filled / self.log_every_n_steps) + WANTED_RATES - 1
        epochs = math.ceil((self.max_steps or logs * self.log_every_n_steps) / updates_per_epoch)
        if self.micro_batches:
            return per_epoch, self.num_epochs or epochs
        return (per_epoch * epochs, 1) if self.epoch is Epoch.WHOLE else (per_epoch, epochs)

    @property
    def seconds(self) -> float:
        """How long the workload takes, by its clock."""
        per_epoch, epochs = self.lengths
        updates_per_epoch = math.ceil(per_epoch / self.accumulate)
        updates = min(epochs * updates_per_epoch, self.max_steps or math.inf)
        whole, rest = divmod(updates, updates_per_epoch)
        return (whole * per_epoch + rest * self.accumulate) * self.micro_batch_s + updates * self.optimizer_s
