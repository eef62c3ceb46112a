"""The rates that ThroughputMonitor logs, calculated without training.

At the end of an optimizer step the monitor divides the samples of the last ``window_size - 1`` micro-batches by their
time. That is right if as many optimizer steps fall into that time as these micro-batches deserve. The truth is, as in
``bench.audit.monitor``, the rate over the fewest whole windows that cover them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bench.audit.lint.lint_options import windows_of
from bench.audit.monitor import TOLERANCE
from bench.audit.monitor_grid import MICRO_BATCH_S, OPTIMIZER_S
from bench.audit.training_plan import TrainingPlan

STEP = OPTIMIZER_S / MICRO_BATCH_S
"""Duration of an optimizer step in micro-batches, as the command measures by default."""
MAX_LOGS = 5000
"""Logs that are looked at."""


class Ratios(NamedTuple):
    """Logged rates divided by the true ones; none is above 1."""

    low: float
    high: float
    limit: float
    """The lowest, however long a step takes."""

    @property
    def is_right(self) -> bool:
        """Whether ``bench throughput`` calls them right."""
        return 1 - self.low <= TOLERANCE


@dataclass(frozen=True)
class Rates:
    """The logs of a training whose optimizer steps at the end of every window and of every epoch."""

    accumulate: int
    """N."""
    num_batches: int
    """NB; N, or a multiple of it, if it is unknown."""
    every: int = 1
    """``log_every_n_steps``."""
    last: float = math.inf
    """Steps of the whole training."""

    @cached_property
    def plan(self) -> TrainingPlan:
        return windows_of(self.num_batches, self.accumulate)

    @property
    def tail(self) -> int:
        """Micro-batches of a partial window after complete ones; 0 if there is none."""
        return self.plan.partial_window if self.plan.full_windows else 0

    @property
    def period(self) -> int:
        """Micro-batches after which the steps repeat. A ``window_size`` of k x period + 1 is exact."""
        return self.num_batches if self.tail else min(self.accumulate, self.num_batches)

    @property
    def safe(self) -> int:
        """A ``window_size`` from which on every rate is within the tolerance, however long a step takes.

        A span of s micro-batches lacks at most N - 1 to complete windows, so the ratio is at least s / (s + N - 1).
        """
        return math.ceil((1 - TOLERANCE) / TOLERANCE * (self.accumulate - 1)) + 1

    def ratios(self, window: int) -> Ratios | None:
        """The rates logged with this ``window_size``; None if there are none."""
        spans, windows = window - 1, self.plan.windows
        found: set[tuple[int, int]] = set()
        first = max(spans // self.num_batches * windows // self.every, 1)
        for log in range(first, first + MAX_LOGS):
            if log * self.every > self.last:
                break
            epochs, steps = divmod(log * self.every - 1, windows)
            end = epochs * self.num_batches + min((steps + 1) * self.accumulate, self.num_batches)
            if end >= window:
                epochs, rest = divmod(end - spans, self.num_batches)
                steps_before = epochs * windows + rest // self.accumulate
                # Complete windows begin at the end of the step before.
                found.add((spans + rest % self.accumulate, log * self.every - steps_before))
        ratios = [spans * (whole + n * STEP) / (whole * (spans + n * STEP)) for whole, n in found]
        return Ratios(min(ratios), max(ratios), min(spans / whole for whole, _ in found)) if ratios else None

    def right(self, window: int, most: float) -> list[int]:
        """The nearest values of ``window_size`` up to ``most`` that are exact."""
        k = (window - 1) // self.period
        return [size * self.period + 1 for size in (k, k + 1) if size and size * self.period + 1 <= most]

    def shortened(self, window: int) -> Rates:
        """A shorter training, which logs every step, whose rates are wrong with the same ``window_size``."""
        if not self.tail:
            return Rates(self.accumulate, self.period)
        # Of an epoch longer than the window, only the remainder matters.
        spans = window - 1
        batches = spans + self.accumulate + (self.num_batches - spans) % self.accumulate
        return Rates(self.accumulate, min(self.num_batches, batches))
