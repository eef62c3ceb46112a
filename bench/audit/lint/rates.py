"""The rates that ThroughputMonitor logs, by counting, without training.

The monitor divides the samples of ``window_size - 1`` micro-batches by their time, at the end of an optimizer step.
That is right if the time has as many steps as these micro-batches deserve. The truth is, as in ``bench.audit.monitor``,
the rate over the fewest whole windows that cover them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.audit.monitor import TOLERANCE
from bench.audit.monitor_grid import MICRO_BATCH_S, OPTIMIZER_S, WANTED_RATES

STEP = OPTIMIZER_S / MICRO_BATCH_S
"""Micro-batches that an optimizer step is as long as, where it is measured and nothing else is said."""
LOOKED_AT = 5000
"""Logs, at most."""
KEPT, SMALL = 64, 8
"""An N up to the first is kept where it is shown in small; a larger one becomes the second."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """Rates that are logged, over the truth."""

    low: float
    high: float
    limit: float
    """The lowest, however long a step takes."""

    @property
    def is_right(self) -> bool:
        """Whether ``bench throughput`` calls them right. None of them is above 1."""
        return 1 - self.low <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Rates:
    """A training whose optimizer steps at the end of every window, and of every epoch, and the logs of its monitor."""

    accumulate: int
    """N."""
    num_batches: int
    """NB; N, or a multiple, if it is not known."""
    every: int = 1
    """``log_every_n_steps``."""
    last: float = math.inf
    """Steps of the whole training."""

    @property
    def tail(self) -> int:
        """Micro-batches of the partial window after whole ones; 0 if there is none, or no whole one."""
        return self.num_batches % self.accumulate if self.num_batches > self.accumulate else 0

    @property
    def period(self) -> int:
        """Micro-batches after which the steps repeat: ``window_size - 1`` must be a multiple of it to be right."""
        return self.num_batches if self.tail else min(self.accumulate, self.num_batches)

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return -(-self.num_batches // self.accumulate)

    @property
    def safe(self) -> int:
        """A ``window_size`` from which on every rate is within the tolerance, however long a step takes.

        What a window of s micro-batches lacks to whole ones is at most N - 1, and the ratio at least s / (s + N - 1).
        """
        return math.ceil((1 - TOLERANCE) / TOLERANCE * (self.accumulate - 1)) + 1

    def _steps(self, micro_batches: int) -> int:
        epochs, begun = divmod(micro_batches, self.num_batches)
        return epochs * self.per_epoch + begun // self.accumulate

    def _end(self, step: int) -> int:
        """Micro-batches up to the end of a step, counted from 1."""
        epochs, steps = divmod(step - 1, self.per_epoch)
        return epochs * self.num_batches + min((steps + 1) * self.accumulate, self.num_batches)

    def ratios(self, window: int) -> Ratios | None:
        """The rates that are logged with a ``window_size``; None if none is."""
        spans = window - 1
        found: set[tuple[int, int]] = set()
        first = max(spans // self.num_batches * self.per_epoch // self.every, 1)
        for log in range(first, first + LOOKED_AT):
            if log * self.every > self.last:
                break
            end = self._end(log * self.every)
            if end >= window:
                begin = end - spans
                # Whole windows begin at the end of the step before.
                found.add((spans + begin % self.num_batches % self.accumulate, self._steps(end) - self._steps(begin)))
        ratios = [spans * (whole + n * STEP) / (whole * (spans + n * STEP)) for whole, n in found]
        if not ratios:
            return None
        return Ratios(min(ratios), max(ratios), min(spans / whole for whole, _ in found))

    def right(self, window: int, most: float) -> list[int]:
        """The nearest values of ``window_size`` up to ``most`` that are exact."""
        k = (window - 1) // self.period
        return [size * self.period + 1 for size in (k, k + 1) if size and size * self.period + 1 <= most]

    def shown(self, window: int) -> tuple[Rates, int]:
        """A training and a ``window_size`` that soon show rates which are off as with this one's."""
        spans = window - 1
        if not self.tail:
            if self.period <= KEPT:
                return Rates(self.accumulate, self.period), window
            small = Rates(SMALL if self.accumulate == self.period else 2 * SMALL, SMALL)
            return small, _scaled(spans, self.period) + 1
        if self.accumulate > KEPT:
            size = _scaled(spans % self.num_batches, self.accumulate)
            return Rates(SMALL, (size // SMALL + 2) * SMALL + _share(self.tail, self.accumulate)), size + 1
        # The epoch's length matters by its remainder alone if it is longer than the window.
        batches = min(self.num_batches, spans + self.accumulate + (self.num_batches - spans) % self.accumulate)
        kept = Rates(self.accumulate, batches)
        every = math.gcd(self.every, self.per_epoch) if batches == self.num_batches else 1
        return (Rates(self.accumulate, batches, every) if kept.per_epoch <= WANTED_RATES else kept), window


def _share(rest: int, whole: int) -> int:
    """The same share of SMALL; none and all only if it is none."""
    return min(max(round(rest * SMALL / whole), 1), SMALL - 1) if rest else 0


def _scaled(spans: int, whole: int) -> int:
    """As many whole windows, but three at most, and the same share of one more."""
    return min(spans // whole, 3) * SMALL + _share(spans % whole, whole)
