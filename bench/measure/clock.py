"""The clock that the optimizer tap reads, and the step times that follow from its marks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Reads the time without synchronizing anything."""

    def mark(self) -> Any:
        """Now."""

    def intervals(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between each mark and the next; one fewer than marks. May synchronize: call it after the pass."""

    def moments(self, marks: Sequence[Any]) -> list[float]:
        """When each mark was reached, by ``time.monotonic()``. May synchronize: call it after the pass."""


class HostClock:
    """``time.perf_counter``: right where the work is done when the call returns, as on the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def intervals(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]

    def moments(self, marks: Sequence[float]) -> list[float]:
        since = time.monotonic() - time.perf_counter()  # on Linux both are one clock
        return [mark + since for mark in marks]


class CudaClock:
    """CUDA events recorded on the current stream: the device's own time, however far ahead the host runs."""

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
    """The clock of a device type."""
    return CudaClock() if device.type == "cuda" else HostClock()
