"""One GPU as NVML tells of it: what is asked, in which units the answers come, and what throttle reasons mean.

nvidia-ml-py is handed in and not imported, so a machine without it can read this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

REASONS = {
    0x1: "GpuIdle",
    0x2: "ApplicationsClocksSetting",
    0x4: "SwPowerCap",
    0x8: "HwSlowdown",
    0x10: "SyncBoost",
    0x20: "SwThermalSlowdown",
    0x40: "HwThermalSlowdown",
    0x80: "HwPowerBrakeSlowdown",
    0x100: "DisplayClockSetting",
    0x200: "BoardLimit",
    0x400: "Reliability",
    0x8000000000000000: "Unknown",
}
"""Names of NVML's bits, less the prefix ``nvmlClocksEventReason`` (in older versions ``nvmlClocksThrottleReason``)."""
NO_SLOWDOWN = frozenset({"GpuIdle", "ApplicationsClocksSetting", "DisplayClockSetting"})
"""Reasons that are no slowdown: there is no work, or somebody has set the clocks and they are as they were set.

All others, by NVML's documentation, hold clocks below what was asked for: SwPowerCap (the power limit), HwSlowdown
(temperature, an external power brake, or a fast trigger: clocks at most half; also seen for a moment when the P-state
changes), SwThermalSlowdown and HwThermalSlowdown (GPU or memory too hot), HwPowerBrakeSlowdown (the power supply),
SyncBoost (another GPU of the group is slow), BoardLimit, Reliability, Unknown, and bits that are newer than this list.
SwPowerCap is common on a GPU that is well used; how much it matters is told by its share and the clocks.
"""

# Numbers of NVML's enumerations, which never change.
_CLOCK_SM, _CLOCK_MEMORY, _SENSOR_GPU = 1, 2, 0
_LASTING = frozenset({3, 4, 13})
"""Errors after which a question is not asked again: not supported, no permission, function not found."""


def _reasons(bits: int) -> list[str]:
    """Names of the bits that are set, in their order; one without a name as its number."""
    return [REASONS.get(1 << i, hex(1 << i)) for i in range(bits.bit_length()) if bits >> i & 1]


def _pids(processes: Iterable[Any]) -> list[int]:
    return sorted({int(process.pid) for process in processes})


QUESTIONS: dict[str, tuple[Callable[[Any], Any], tuple[tuple[Any, ...], ...]]] = {
    "energy_j": (lambda mj: mj / 1e3, (("TotalEnergyConsumption",),)),
    "power_w": (lambda mw: mw / 1e3, (("PowerUsage",),)),
    "sm_clock_mhz": (int, (("ClockInfo", _CLOCK_SM),)),
    "memory_clock_mhz": (int, (("ClockInfo", _CLOCK_MEMORY),)),
    "temperature_c": (int, (("Temperature", _SENSOR_GPU), ("TemperatureV", _SENSOR_GPU))),
    "throttle": (_reasons, (("CurrentClocksEventReasons",), ("CurrentClocksThrottleReasons",))),
    "pids": (_pids, (("ComputeRunningProcesses",), ("ComputeRunningProcesses_v2",))),
    "mps_pids": (_pids, (("MPSComputeRunningProcesses",), ("MPSComputeRunningProcesses_v2",))),
}
"""Fields of a sample: what makes SI units of the answer, and the ways to ask: ``nvmlDeviceGet...``, arguments.

The ways after the first are for other versions of the library or the driver. Only compute processes are listed, so one
that also draws is counted once; clients of an MPS server have a list of their own.
"""
PROCESS_FIELDS = ("pids", "mps_pids")


def note(notes: list[str], text: str) -> None:
    """Add a note unless it is there."""
    if text not in notes:
        notes.append(text)


class Gpu:
    """One GPU and what is known of what it cannot tell."""

    def __init__(self, nvml: Any, uuid: str, notes: list[str]) -> None:
        self.uuid = uuid
        self._nvml, self._notes = nvml, notes
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._ways = {name: list(ways) for name, (_, ways) in QUESTIONS.items()}

    def sample(self, *, processes: bool) -> dict[str, Any]:
        """Everything now. ``pids`` is missing where processes are not asked for, and None if they cannot be told."""
        found: dict[str, Any] = {"uuid": self.uuid, "time": time.monotonic()}
        for name in QUESTIONS:
            if name not in PROCESS_FIELDS:
                found[name] = self._ask(name)
        if processes:
            pids, clients = map(self._ask, PROCESS_FIELDS)
            found["pids"] = None if pids is None else sorted({*pids, *(clients or [])})
        return found

    def mig(self) -> bool:
        """Whether the GPU is cut into MIG instances."""
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(self._handle)[0])
        except Exception:  # most GPUs have no such mode
            return False

    def _ask(self, name: str) -> Any:
        """The answer to a question; None if there is none, with a note that says why."""
        ways = self._ways[name]
        error: Exception | None = None
        while ways:
            function, *arguments = ways[0]
            try:
                answer = getattr(self._nvml, f"nvmlDeviceGet{function}")(self._handle, *arguments)
                return QUESTIONS[name][0](answer)
            except Exception as problem:
                error = problem
                if not isinstance(error, AttributeError) and getattr(error, "value", None) not in _LASTING:
                    break  # a passing error: the next sample asks again
                ways.pop(0)
        if error is not None and name != "mps_pids":  # drivers need not know of MPS
            note(self._notes, f"{self.uuid}: no {name}: {error}")
        return None
