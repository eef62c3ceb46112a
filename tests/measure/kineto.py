"""A made-up profiler: events as Kineto hands them to torch, and a device that notes what was asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "overhead")


class Event:
    """One event, as torch hands it on since it tells categories. Times are nanoseconds."""

    def __init__(
        self,
        name: str,
        start: int = 0,
        duration: int = 0,
        category: str = "kernel",
        correlation: int = 0,
    ) -> None:
        self.category = category
        answers: dict[str, Any] = {
            "name": name,
            "start_ns": start,
            "duration_ns": duration,
            "correlation_id": correlation,
            "device_type": SimpleNamespace(name="CPU" if category in ON_HOST else "CUDA"),
            "is_user_annotation": "annotation" in category,
        }
        self.older = SimpleNamespace(
            **{name: lambda answer=answer: answer for name, answer in answers.items()}
        )
        """As torch 2.11 hands it on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.older, name)

    def activity_type(self) -> str:
        return self.category


def profile(monkeypatch: pytest.MonkeyPatch, trace: Sequence[Event]) -> list[str]:
    """Make torch's profiler return the trace; the list of what is done with the profiler and the device."""
    calls: list[str] = []

    class Profile:
        def __init__(self, activities: list[Any]) -> None:
            assert [activity.name for activity in activities] == ["CUDA"]
            self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: trace))

        def start(self) -> None:
            calls.append("start")

        def stop(self) -> None:
            calls.append("stop")

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append("synchronize"))
    return calls
