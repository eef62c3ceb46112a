"""Time in collectives, and how much of it is exposed: not hidden behind computation on the same device.

Only on CUDA, from the kernels that torch's profiler saw in one window. Communication that runs beside a kernel of
computation costs that kernel bandwidth but no waiting; only what runs alone makes a step longer. NCCL's kernels run
while they wait for other ranks, so their time includes waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLLECTIVE_PREFIXES = ("nccl",)
"""How the names of NCCL's kernels begin: ``ncclDevKernel_AllGather_RING_LL(...)``, ``ncclSymkDevKernel_...`` on
symmetric memory, and older ``ncclKernel_...``."""
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's categories of what runs on the device (``libkineto``'s ``ActivityType.h``). Left out are, of the device's
timeline, ``gpu_user_annotation``, a range as long as what lies in it, and ``cuda_sync``, in which a stream waits."""
WAITING = (" Sync", "Stream Wait Event")
"""How Kineto's names of ``cuda_sync`` end."""


@dataclass(frozen=True, slots=True)
class Activity:
    """One thing that ran on the device. Times are seconds, from any origin."""

    name: str
    start: float
    duration: float
    category: str = "kernel"
    """Kineto's: ``kernel``, ``gpu_memcpy``, ``gpu_memset``; everything else runs on the host and is left out."""

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.duration

    @property
    def is_collective(self) -> bool:
        """Whether it is one of NCCL's kernels."""
        return self.name.startswith(COLLECTIVE_PREFIXES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """Seconds of one window on one device. Overlapping collectives are counted once."""

    collective_s: float
    """In which at least one collective ran."""
    exposed_s: float
    """Of those, in which nothing else ran."""
    compute_s: float
    """In which at least one kernel or copy of another kind ran."""
    num_collectives: int
    """Kernels of collectives."""

    @property
    def exposed_share(self) -> float:
        """Part of the time in collectives that is exposed, 0 to 1; 0 without collectives."""
        return self.exposed_s / self.collective_s if self.collective_s else 0.0


def exposure(activities: Iterable[Activity]) -> Exposure:
    """How long collectives ran, and how long of that alone; activities in any order and on any streams.

    A copy or memset by the device counts as computation: it too is work that communication hides behind.
    """
    on_device = [a for a in activities if a.category in DEVICE_CATEGORIES and a.duration > 0]
    collectives = [a for a in on_device if a.is_collective]
    busy = union((a.start, a.end) for a in collectives)
    compute = union((a.start, a.end) for a in on_device if not a.is_collective)
    collective_s = length(busy)
    return Exposure(
        collective_s=collective_s,
        exposed_s=max(0.0, collective_s - length(intersection(busy, compute))),
        compute_s=length(compute),
        num_collectives=len(collectives),
    )


Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same points."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What two unions have in common."""
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def from_chrome(trace: dict[str, Any]) -> list[Activity]:
    """The device's activities of a trace that ``export_chrome_trace`` wrote, whose times are microseconds."""
    mine = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in DEVICE_CATEGORIES]
    origin = min((event["ts"] for event in mine), default=0.0)
    return [Activity(e["name"], (e["ts"] - origin) * 1e-6, e["dur"] * 1e-6, e["cat"]) for e in mine]


def merge(ranks: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """One trial's times from its ranks': those of the rank that waited most for communication alone.

    None if a rank's profiler saw nothing: it may have been the one.
    """
    seen = [found for found in ranks if found is not None]
    return dict(max(seen, key=lambda found: found["exposed_s"])) if len(seen) == len(ranks) else None


class WindowProfiler:
    """Profiles one window on CUDA: ``start`` and ``stop`` at its two updates, then ask for ``result``.

    The device is synchronized at both ends, so that the window's kernels and no others are seen: times of the whole
    window are not to be taken from such a run.
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self.events: list[Any] = []
        """Kineto's, of the window that was stopped last."""

    def start(self) -> None:
        """The window opens."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._profiler.start()

    def stop(self) -> None:
        """The window closes; nothing if none is open."""
        import torch

        if self._profiler is None:
            return
        torch.cuda.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self.events = list(profiler.profiler.kineto_results.events())

    def result(self) -> Exposure | None:
        """Of the window that was stopped last; None if nothing was seen on the device, as no window can be.

        The profiler does not fail where CUPTI may not be used or is used by another: it sees nothing, which is not to
        be taken for communication that costs no time.
        """
        activities = from_kineto(self.events)
        return exposure(activities) if activities else None

    def see(self, is_open: bool) -> None:
        """Call after every event of a pass: starts when the window opens and stops when it closes."""
        if is_open and self._profiler is None:
            self.start()
        elif not is_open:
            self.stop()


def from_kineto(events: Iterable[Any]) -> list[Activity]:
    """The device's activities among Kineto's events, whose times are nanoseconds; the first of them is the origin.

    ``events`` are ``torch._C._autograd._KinetoEvent``.
    """
    mine = [(event, category) for event in events if (category := _category(event)) in DEVICE_CATEGORIES]
    origin = min((event.start_ns() for event, _ in mine), default=0)
    return [Activity(e.name(), (e.start_ns() - origin) * 1e-9, e.duration_ns() * 1e-9, cat) for e, cat in mine]


def _category(event: Any) -> str:
    """Kineto's category of an event. Older torch does not hand it on: there it is told by device and by name."""
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    name = event.name()
    if event.device_type().name != "CUDA" or event.is_user_annotation() or name.endswith(WAITING):
        return ""
    return {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name.split(" ")[0], "kernel")
