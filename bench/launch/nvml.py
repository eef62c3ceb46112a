"""NVML, what NVIDIA's driver reports of its GPUs. The only module that asks it; does not import torch.

Limits of NVML: power is an average over one second on Ampere (other than GA100) and later
(nvmlDeviceGetPowerUsage), so the energy counter describes short windows better; it counts since the
driver was loaded (nvmlDeviceGetTotalEnergyConsumption, Volta and later). With MIG on, power,
energy, clocks and processes are those of the whole GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
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
"""Names of NVML's bits, less the prefix ``nvmlClocksEventReason`` (in older versions
``nvmlClocksThrottleReason``)."""
# Values of NVML's enumerations.
_CLOCK_SM, _CLOCK_MEMORY, _SENSOR_GPU, _MAX_LINKS = 1, 2, 0, 18
_LASTING = frozenset({3, 4, 13})
"""Permanent errors, after which a query is not repeated: not supported, no permission, function not
found."""


def _reasons(bits: int) -> list[str]:
    """Names of the set bits, in order; an unknown bit as a hex number."""
    return [REASONS.get(1 << i, hex(1 << i)) for i in range(bits.bit_length()) if bits >> i & 1]


def _pids(processes: Iterable[Any]) -> list[int]:
    return sorted({int(process.pid) for process in processes})


def _thousandth(value: int) -> float:
    return value / 1e3


def _current(modes: Sequence[int]) -> bool:
    """The first of a current and a pending mode."""
    return bool(modes[0])


Query = tuple[Callable[[Any], Any], str, *tuple[int, ...]]
"""Conversion to SI units, the rest of ``nvmlDeviceGet...``, and its arguments."""
SAMPLED: dict[str, Query] = {
    "energy_j": (_thousandth, "TotalEnergyConsumption"),
    "power_w": (_thousandth, "PowerUsage"),
    "sm_clock_mhz": (int, "ClockInfo", _CLOCK_SM),
    "memory_clock_mhz": (int, "ClockInfo", _CLOCK_MEMORY),
    "temperature_c": (int, "Temperature", _SENSOR_GPU),
    "throttle": (_reasons, "CurrentClocksEventReasons"),
}
SETTINGS: dict[str, Query] = {
    "power_limit_w": (_thousandth, "EnforcedPowerLimit"),
    "sm_clock_max_mhz": (int, "MaxClockInfo", _CLOCK_SM),
    "ecc": (_current, "EccMode"),
    "mig": (_current, "MigMode"),
    "pcie_generation": (int, "MaxPcieLinkGeneration"),
    "pcie_lanes": (int, "MaxPcieLinkWidth"),
}
QUERIES: dict[str, Query] = {
    **SAMPLED,
    "pids": (
        _pids,
        "ComputeRunningProcesses",
    ),  # only these, so one that also does graphics is counted once
    "mps_pids": (_pids, "MPSComputeRunningProcesses"),
    **SETTINGS,
}


class NvmlUnavailableError(Exception):
    """There is no nvidia-ml-py, no driver, or no permission; the message says which."""


class Nvml(contextlib.AbstractContextManager["Nvml"]):
    """A connection to the driver. Raises NvmlUnavailableError."""

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:
            raise NvmlUnavailableError(f"{type(error).__name__}: {error}") from error
        self._library: Any = pynvml

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._library.nvmlShutdown()

    @property
    def driver(self) -> str:
        return str(self._library.nvmlSystemGetDriverVersion())

    @property
    def cuda(self) -> tuple[int, int]:
        """The newest CUDA that the driver can run."""
        version = int(self._library.nvmlSystemGetCudaDriverVersion())
        return version // 1000, version % 1000 // 10

    @property
    def gpus(self) -> list[NvmlGpu]:
        """All GPUs, whether visible to CUDA or not."""
        return [
            NvmlGpu(self._library, index) for index in range(self._library.nvmlDeviceGetCount())
        ]


class NvmlGpu:
    """One GPU. What it, the driver or the library does not support is None, and in ``problems``."""

    def __init__(self, library: Any, index: int) -> None:
        self.index = index
        self.problems: dict[str, str] = {}
        """The first error of each query that failed."""
        self._library = library
        self._handle = library.nvmlDeviceGetHandleByIndex(index)
        self._unsupported: set[str] = set()
        self.uuid = self._describe(self._handle)["uuid"]

    def _describe(self, handle: Any) -> dict[str, Any]:
        return {
            "name": str(self._library.nvmlDeviceGetName(handle)),
            "uuid": str(self._library.nvmlDeviceGetUUID(handle)),
            "memory_bytes": int(self._library.nvmlDeviceGetMemoryInfo(handle).total),
        }

    def about(self) -> dict[str, Any]:
        """Index, name, uuid and memory_bytes."""
        return {"index": self.index, **self._describe(self._handle)}

    def instances(self) -> list[dict[str, Any]]:
        """Its MIG instances: name, memory_bytes, and their own UUID as ``mig``."""
        found: list[dict[str, Any]] = []
        if not self.ask("mig"):
            return found
        for place in range(self._call("MaxMigDeviceCount") or 0):
            if (
                handle := self._call("MigDeviceHandleByIndex", place)
            ) is not None:  # there may be none at this index
                about = self._describe(handle)
                name = f"{about['name']} MIG"
                if "MIG" in about["name"]:
                    name = about["name"]
                found.append(
                    {"name": name, "memory_bytes": about["memory_bytes"], "mig": about["uuid"]}
                )
        return found

    def settings(self, others: Sequence[NvmlGpu]) -> dict[str, Any]:
        """What affects its speed, number of active NVLinks, and levels of the paths to the other visible GPUs.

        Levels are NVML's ``nvmlGpuTopologyLevel_t``; smaller is nearer. ``others`` includes this
        one, which has None.
        """
        levels = []
        for gpu in others:
            level = None
            if gpu is not self:
                level = self._call("TopologyCommonAncestor", gpu._handle)
            levels.append(level)
        return {name: self.ask(name) for name in SETTINGS} | {
            "nvlinks_up": sum(bool(self._call("NvLinkState", link)) for link in range(_MAX_LINKS)),
            "topology": levels,
            "uuid": self.uuid,
        }

    def sample(self, *, processes: bool) -> dict[str, Any]:
        """What changes, at one ``time.monotonic()``; with ``pids`` if processes are to be listed, the costliest query.

        Clients of an MPS server have a list of their own.
        """
        found: dict[str, Any] = {"uuid": self.uuid, "time": time.monotonic()}
        found |= {name: self.ask(name) for name in SAMPLED}
        if processes:
            pids, clients = self.ask("pids"), self.ask("mps_pids")
            found["pids"] = None
            if pids is not None:
                found["pids"] = sorted({*pids, *(clients or [])})
        return found

    def ask(self, name: str) -> Any:
        """The answer to one of QUERIES."""
        convert, function, *arguments = QUERIES[name]
        if name in self._unsupported:
            return None
        try:
            return convert(
                getattr(self._library, f"nvmlDeviceGet{function}")(self._handle, *arguments)
            )
        except Exception as error:
            self.problems.setdefault(name, str(error))
            if isinstance(error, AttributeError) or getattr(error, "value", None) in _LASTING:
                self._unsupported.add(name)
            return None  # after any other error the next sample tries again

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, f"nvmlDeviceGet{function}")(self._handle, *arguments)
        except Exception:  # not supported
            return None
