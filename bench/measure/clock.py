"""Clocks for the optimizer tap, and the step times between its marks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """A clock that is read without synchronizing a device."""

    def mark(self) -> Any:
        """Mark the current time."""

    def intervals(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between consecutive marks. May synchronize: call it after the pass."""

    def moments(self, marks: Sequence[Any]) -> list[float]:
        """The ``time.monotonic()`` of each mark. May synchronize: call it after the pass."""


class HostClock:
    """``time.perf_counter``, for devices whose calls return when the work is done, such as the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def intervals(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]

    def moments(self, marks: Sequence[float]) -> list[float]:
        since = time.monotonic() - time.perf_counter()  # on Linux both are one clock
        return [mark + since for mark in marks]


class CudaClock:
    """CUDA events on the current stream: device time, however far ahead the host runs."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def intervals(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]

    def moments(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        end = self.mark()
        torch.cuda.synchronize()
        now = time.monotonic()
        return [now - mark.elapsed_time(end) / 1e3 for mark in marks]


def clock_for(device: torch.device) -> Clock:
    """The clock for a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
