"""A made-up NVML in place of ``pynvml``: three GPUs at work, of which every answer can be replaced or removed."""

from __future__ import annotations

import os
import time
import types
from collections.abc import Callable
from typing import Any

NOT_SUPPORTED, TIMEOUT = 3, 10


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({NOT_SUPPORTED: "Not Supported", TIMEOUT: "Timeout"}[value])
        self.value = value


def failing(value: int = NOT_SUPPORTED) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise NVMLError(value)

    return fail


class FakeNvml(types.ModuleType):
    """Handles are indices."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0
        self.pids = [os.getpid()]
        self.asked: list[str] = []
        started = time.monotonic()
        answers: dict[str, Callable[..., Any]] = {
            "Count": lambda: 3,
            "HandleByIndex": lambda index: index,
            "Name": lambda handle: "NVIDIA H200",
            "UUID": lambda handle: f"GPU-{handle}{handle}",
            "MemoryInfo": lambda handle: types.SimpleNamespace(total=1000 + handle),
            "TotalEnergyConsumption": lambda handle: int(1000 * 700 * (time.monotonic() - started)),
            "PowerUsage": lambda handle: 650_000,
            "ClockInfo": lambda handle, kind: {1: 1980, 2: 3201}[kind],
            "Temperature": lambda handle, sensor: 61 + handle,
            "CurrentClocksEventReasons": lambda handle: 0x4,
            "ComputeRunningProcesses": lambda handle: [
                types.SimpleNamespace(pid=pid) for pid in self.pids
            ],
            "MPSComputeRunningProcesses": lambda handle: [],
            "MigMode": failing(),
        }
        for name, answer in answers.items():
            self.set(name, answer)

    def set(self, name: str, answer: Callable[..., Any]) -> None:
        def ask(*arguments: Any) -> Any:
            self.asked.append(name)
            return answer(*arguments)

        setattr(self, f"nvmlDeviceGet{name}", ask)

    def remove(self, name: str) -> None:
        delattr(self, f"nvmlDeviceGet{name}")

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:
        return "570.1"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010
