"""Time in collectives, and the exposed part: not hidden behind computation on the same device.

Only on CUDA, from the kernels that torch's profiler saw in one window. Communication that overlaps
with computation costs bandwidth but no waiting; only exposed communication makes a step longer.
NCCL's kernels run while they wait for other ranks, so their time includes waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._autograd import _KinetoEvent
    from torch.profiler import profile

COLLECTIVE_PREFIXES = ("nccl",)
"""Prefixes of NCCL's kernels: ``ncclDevKernel_AllGather_RING_LL(...)``, ``ncclSymkDevKernel_...``
on symmetric memory, and older ``ncclKernel_...``."""
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's categories of work on the device (``libkineto``'s ``ActivityType.h``). Excluded are
``gpu_user_annotation``, a range around other work, and ``cuda_sync``, in which a stream waits."""
WAITING = (" Sync", "Stream Wait Event")
"""Suffixes of Kineto's ``cuda_sync`` names."""


def exposure(events: Iterable[_KinetoEvent]) -> dict[str, float] | None:
    """Seconds of one window on one device, from events in any order; None if it had no work.

    ``collective_s``: in which at least one collective ran; ``exposed_s``: the part in which nothing
    else ran; ``compute_s``: in which at least one kernel or copy of another kind ran, since
    communication can hide behind copies too; ``num_collectives``, the number of their kernels.
    """
    collectives: list[_KinetoEvent] = []
    others: list[_KinetoEvent] = []
    for event in events:
        if category(event) not in DEVICE_CATEGORIES:
            continue
        if event.name().startswith(COLLECTIVE_PREFIXES):
            collectives.append(event)
        else:
            others.append(event)
    if not collectives and not others:
        return None
    compute_s = _covered_s(others)
    return {
        "collective_s": _covered_s(collectives),
        "exposed_s": max(0.0, _covered_s([*collectives, *others]) - compute_s),
        "compute_s": compute_s,
        "num_collectives": len(collectives),
    }


def _covered_s(events: Iterable[_KinetoEvent]) -> float:
    """Seconds in which at least one of the events ran."""
    covered, until = 0, 0
    spans = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in events]
    for start, end in sorted(spans):
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered * 1e-9


def merge(ranks: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    """Merge the ranks' times: those of the rank with the most exposed communication.

    None if a rank's profiler saw nothing, because it may be that rank.
    """
    seen = [found for found in ranks if found is not None]
    if len(seen) < len(ranks):
        return None
    return dict(max(seen, key=lambda found: found["exposed_s"]))


class WindowProfiler:
    """Profiles one window on CUDA: call ``start`` and ``stop`` at its two updates.

    The device is synchronized at both ends, so that exactly the window's kernels are seen. Step
    times of such a run are not valid. The profiler does not fail if CUPTI is unavailable or in use;
    it sees nothing, which must not count as free communication.
    """

    def __init__(self) -> None:
        self._profiler: profile
        self.events: list[_KinetoEvent] = []
        """Kineto's events of the last window."""

    def start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        torch.accelerator.synchronize()
        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._profiler.start()

    def stop(self) -> None:
        import torch

        torch.accelerator.synchronize()
        self._profiler.stop()
        inner = self._profiler.profiler
        assert inner is not None and inner.kineto_results is not None, "it has been stopped"
        self.events = list(inner.kineto_results.events())


def category(event: _KinetoEvent) -> str:
    """Kineto's category of an event. Older torch does not tell it, but device and name do."""
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    name = event.name()
    if event.device_type().name != "CUDA" or event.is_user_annotation() or name.endswith(WAITING):
        return ""
    return {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name.split(" ")[0], "kernel")
