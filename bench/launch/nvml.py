"""NVML, what NVIDIA's driver reports of its GPUs: the only module that asks it, without torch.

Limits of NVML: power is an average over one second on Ampere (other than GA100) and later
(nvmlDeviceGetPowerUsage), so the energy counter describes short windows better; it counts since the
driver was loaded (nvmlDeviceGetTotalEnergyConsumption, Volta and later). With MIG on, power,
energy, clocks and processes are those of the whole GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NotRequired, Protocol, TypedDict

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
    found: list[str] = []
    for place in range(bits.bit_length()):
        bit = 1 << place
        if bits & bit:
            found.append(REASONS.get(bit, hex(bit)))
    return found


class _Process(Protocol):
    """A process on a GPU, as NVML lists it."""

    pid: int


def _pids(processes: Iterable[_Process]) -> list[int]:
    return sorted({int(process.pid) for process in processes})


def _thousandth(value: int) -> float:
    return value / 1e3


def _current(modes: Sequence[int]) -> bool:
    """The first of a current and a pending mode."""
    return bool(modes[0])


class NvmlQuery(NamedTuple):
    """A question to NVML about a GPU."""

    convert: Callable[[Any], object]
    """Makes SI units of the answer."""
    function: str
    """The rest of ``nvmlDeviceGet...``."""
    arguments: tuple[int, ...] = ()


SAMPLED = {
    "energy_j": NvmlQuery(_thousandth, "TotalEnergyConsumption"),
    "power_w": NvmlQuery(_thousandth, "PowerUsage"),
    "sm_clock_mhz": NvmlQuery(int, "ClockInfo", (_CLOCK_SM,)),
    "memory_clock_mhz": NvmlQuery(int, "ClockInfo", (_CLOCK_MEMORY,)),
    "temperature_c": NvmlQuery(int, "Temperature", (_SENSOR_GPU,)),
    "throttle": NvmlQuery(_reasons, "CurrentClocksEventReasons"),
}
SETTINGS = {
    "power_limit_w": NvmlQuery(_thousandth, "EnforcedPowerLimit"),
    "sm_clock_max_mhz": NvmlQuery(int, "MaxClockInfo", (_CLOCK_SM,)),
    "ecc": NvmlQuery(_current, "EccMode"),
    "mig": NvmlQuery(_current, "MigMode"),
    "pcie_generation": NvmlQuery(int, "MaxPcieLinkGeneration"),
    "pcie_lanes": NvmlQuery(int, "MaxPcieLinkWidth"),
}
QUERIES = {
    **SAMPLED,
    # Only these, so one that also does graphics is counted once.
    "pids": NvmlQuery(_pids, "ComputeRunningProcesses"),
    "mps_pids": NvmlQuery(_pids, "MPSComputeRunningProcesses"),
    **SETTINGS,
}


class DeviceIdentity(TypedDict):
    """What tells a GPU, or a MIG instance, from others."""

    name: str
    uuid: str
    memory_bytes: int


class NumberedDevice(DeviceIdentity):
    """The same of a GPU, with its index."""

    index: int


class MigInstance(TypedDict):
    """A part of a GPU that looks like one of its own."""

    name: str
    memory_bytes: int
    mig: str
    """Its own UUID."""


class GpuSample(TypedDict):
    """The state of a GPU at a time of ``time.monotonic()``; what is unknown is None."""

    uuid: str
    time: float
    energy_j: float | None
    power_w: float | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    throttle: list[str] | None
    pids: NotRequired[list[int] | None]


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
        count = self._library.nvmlDeviceGetCount()
        return [NvmlGpu(self._library, index) for index in range(count)]


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

    def _describe(self, handle: object) -> DeviceIdentity:
        return {
            "name": str(self._library.nvmlDeviceGetName(handle)),
            "uuid": str(self._library.nvmlDeviceGetUUID(handle)),
            "memory_bytes": int(self._library.nvmlDeviceGetMemoryInfo(handle).total),
        }

    def about(self) -> NumberedDevice:
        return {"index": self.index, **self._describe(self._handle)}

    def instances(self) -> list[MigInstance]:
        """Its MIG instances."""
        found: list[MigInstance] = []
        if not self.ask("mig"):
            return found
        num_places = self._call("MaxMigDeviceCount")
        if num_places is None:
            return found
        for place in range(num_places):
            handle = self._call("MigDeviceHandleByIndex", place)
            if handle is None:  # there may be none at this index
                continue
            about = self._describe(handle)
            name = about["name"]
            if "MIG" not in name:
                name += " MIG"
            found.append(
                {"name": name, "memory_bytes": about["memory_bytes"], "mig": about["uuid"]}
            )
        return found

    def settings(self, others: Sequence[NvmlGpu]) -> dict[str, object]:
        """What affects its speed: SETTINGS, active NVLinks, and the paths to other visible GPUs.

        Levels of paths are NVML's ``nvmlGpuTopologyLevel_t``; smaller is nearer. ``others``
        includes this one, which has None.
        """
        found: dict[str, object] = {}
        for name in SETTINGS:
            found[name] = self.ask(name)
        active = [link for link in range(_MAX_LINKS) if self._call("NvLinkState", link)]
        found["nvlinks_up"] = len(active)
        levels = []
        for gpu in others:
            level = None
            if gpu is not self:
                level = self._call("TopologyCommonAncestor", gpu._handle)
            levels.append(level)
        found["topology"], found["uuid"] = levels, self.uuid
        return found

    def sample(self, *, processes: bool) -> GpuSample:
        """What changes; with ``pids`` if processes are to be listed, the costliest query.

        Clients of an MPS server have a list of their own.
        """
        found: GpuSample = {
            "uuid": self.uuid,
            "time": time.monotonic(),
            "energy_j": self.ask("energy_j"),
            "power_w": self.ask("power_w"),
            "sm_clock_mhz": self.ask("sm_clock_mhz"),
            "memory_clock_mhz": self.ask("memory_clock_mhz"),
            "temperature_c": self.ask("temperature_c"),
            "throttle": self.ask("throttle"),
        }
        if processes:
            pids, clients = self.ask("pids"), self.ask("mps_pids")
            found["pids"] = None
            if pids is not None and clients is not None:
                found["pids"] = sorted({*pids, *clients})
            elif pids is not None:
                found["pids"] = sorted(set(pids))
        return found

    def ask(self, name: str) -> Any:
        """The answer to one of QUERIES."""
        query = QUERIES[name]
        if name in self._unsupported:
            return None
        try:
            ask = getattr(self._library, f"nvmlDeviceGet{query.function}")
            return query.convert(ask(self._handle, *query.arguments))
        except Exception as error:
            self.problems.setdefault(name, str(error))
            if isinstance(error, AttributeError) or getattr(error, "value", None) in _LASTING:
                self._unsupported.add(name)
            return None  # after any other error the next sample tries again

    def _call(self, function: str, *arguments: object) -> Any:
        try:
            return getattr(self._library, f"nvmlDeviceGet{function}")(self._handle, *arguments)
        except Exception:  # not supported
            return None
