"""GPU telemetry from NVML, recorded by the bench's own process during training: clocks, power, throttling, energy.

The ranks are not disturbed: one thread of the bench queries the driver ten times a second for each GPU, by UUID.
Without a GPU nothing happens. Values that NVML cannot give are None with a note, and no NVML error ends a run.

Times are ``time.monotonic()``, which on Linux is one clock for all processes, so that ranks can name the part of a
recording that is their timed window (``summarize``). Limits of NVML: power is an average over one second on Ampere
(other than GA100) and later (nvmlDeviceGetPowerUsage), so the energy counter describes short windows better; it counts
since the driver was loaded (nvmlDeviceGetTotalEnergyConsumption, Volta and later). With MIG on, power, energy, clocks
and processes are those of the whole GPU.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Self

import psutil

from bench.launch import gpus

INTERVAL_S = 0.1
"""Interval between two samples of a GPU."""
PROCESSES_EVERY = 5
"""Processes are listed in every n-th sample, since that is the costliest query."""
STOP_S = 5.0
"""How long to wait for the last sample, in case the driver hangs."""
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
"""Reasons that are no slowdown: the GPU is idle, or runs at the clocks that a user has set.

According to NVML's documentation, all others hold clocks below the requested ones: SwPowerCap (the power limit),
HwSlowdown (temperature, an external power brake, or a fast trigger: clocks at most half; also seen briefly when the
P-state changes), SwThermalSlowdown and HwThermalSlowdown (GPU or memory too hot), HwPowerBrakeSlowdown (the power
supply), SyncBoost (another GPU of the group is slow), BoardLimit, Reliability, Unknown, and bits newer than this list.
SwPowerCap is common on a busy GPU; its share of the samples and the clocks show how much it matters.
"""
# Values of NVML's enumerations.
_CLOCK_SM, _CLOCK_MEMORY, _SENSOR_GPU = 1, 2, 0
_LASTING = frozenset({3, 4, 13})
"""Permanent errors, after which a query is not repeated: not supported, no permission, function not found."""


class Telemetry:
    """Records all visible GPUs from ``start`` to ``stop``, or as a context manager; can be used again.

    Start it before the ranks: other processes that are on a GPU at the start are certainly foreign. ``recording`` is
    plain JSON for ``summarize``, None without a GPU: ``interval_s``; ``samples``, one per GPU and time, as from
    ``Gpu.sample``; ``own_pids``, the processes seen that descend from this one; ``notes``.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.recording: dict[str, Any] | None = None
        self._interval_s = interval_s
        self._notes: list[str] = []
        self._samples: list[dict[str, Any]] = []
        self._own: dict[int, bool] = {}
        self._gpus: list[Gpu] = []
        self._nvml: Any = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Take the first sample and continue in a thread. Does nothing without a GPU."""
        self.recording, self._notes, self._samples = None, [], []
        self._own, self._gpus, self._ended = {}, [], threading.Event()
        try:
            self._open([gpu["uuid"] for gpu in gpus.gpus()])
        except Exception as error:
            note(self._notes, f"no telemetry: {type(error).__name__}: {error}")

    def _open(self, uuids: Sequence[str]) -> None:
        if not uuids:
            return
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        for uuid in uuids:
            try:
                self._gpus.append(Gpu(pynvml, uuid, self._notes))
            except Exception as error:
                note(self._notes, f"{uuid}: no telemetry: {error}")
        for gpu in self._gpus:
            if gpu.mig():
                note(self._notes, f"{gpu.uuid}: MIG is on: values are those of the whole GPU, not of an instance")
        self._sample(processes=True)
        self._thread = threading.Thread(target=self._watch, args=[self._ended], name="telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any] | None:
        """Take the last sample and return ``recording``."""
        self._ended.set()
        thread, self._thread = self._thread, None
        nvml, self._nvml = self._nvml, None
        if thread is not None:
            thread.join(STOP_S)
            if thread.is_alive():
                note(self._notes, f"NVML did not answer within {STOP_S:g} s")
                nvml = None  # the thread is inside it
            else:
                self._sample(processes=True)
        if nvml is not None:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()
        if self._samples or self._notes:
            self.recording = {
                "interval_s": self._interval_s,
                "samples": list(self._samples),
                "own_pids": sorted(pid for pid, own in self._own.copy().items() if own),
                "notes": list(self._notes),
            }
        return self.recording

    def _watch(self, ended: threading.Event) -> None:
        number = 0
        while not ended.wait(self._interval_s):
            number += 1
            self._sample(processes=number % PROCESSES_EVERY == 0)

    def _sample(self, *, processes: bool) -> None:
        for gpu in self._gpus:
            try:
                sample = gpu.sample(processes=processes)
                for pid in sample.get("pids") or ():
                    if pid not in self._own:
                        self._own[pid] = descends(pid, os.getpid())
                self._samples.append(sample)
            except Exception as error:
                note(self._notes, f"{gpu.uuid}: {type(error).__name__}: {error}")


def descends(pid: int, ancestor: int) -> bool:
    """Whether a process is the ancestor or one of its descendants; False if unknown."""
    try:
        process = psutil.Process(pid)
        return ancestor in {one.pid for one in (process, *process.parents())}
    except psutil.Error:
        return False


def summarize(
    recording: dict[str, Any] | None, begin: float | None, end: float | None, uuids: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Summarize the GPUs between two times of ``time.monotonic()``; None without a recording or without the times.

    Covers only the GPUs with the ``uuids``, since the others idled; all if none of those was recorded, as with MIG
    instances, which have UUIDs of their own.

    ``notes``, and ``gpus``, one each: ``uuid``; ``num_samples`` inside; the median ``sm_clock_mhz`` with
    ``sm_clock_min_mhz`` and ``sm_clock_max_mhz``; the median ``memory_clock_mhz`` and ``power_w``; the highest
    ``temperature_c``; ``throttle``, the share of samples with each reason; ``slowdowns``, those that are not in
    NO_SLOWDOWN; ``energy_j``, of the whole GPU, from the counter, interpolated; ``other_processes``, how many compute
    processes were foreign. Unknown values are None. A window too short for a sample uses the nearest samples.
    """
    if recording is None or begin is None or end is None:
        return None
    by_gpu: dict[str, list[dict[str, Any]]] = {}
    for sample in sorted(recording["samples"], key=lambda sample: sample["time"]):
        by_gpu.setdefault(sample["uuid"], []).append(sample)
    own = set(recording["own_pids"])
    used = [uuid for uuid in by_gpu if uuid in uuids] or list(by_gpu)
    return {
        "gpus": [_summary(uuid, by_gpu[uuid], begin, end, own) for uuid in used],
        "notes": list(recording["notes"]),
    }


def _summary(uuid: str, samples: list[dict[str, Any]], begin: float, end: float, own: set[int]) -> dict[str, Any]:
    def values(name: str) -> list[Any]:
        return [sample[name] for sample in _within(samples, name, begin, end)]

    clocks, reasons = values("sm_clock_mhz"), values("throttle")
    seen = Counter(name for names in reasons for name in names)
    return {
        "uuid": uuid,
        "num_samples": sum(begin <= sample["time"] <= end for sample in samples),
        "sm_clock_mhz": median(clocks) if clocks else None,
        "sm_clock_min_mhz": min(clocks, default=None),
        "sm_clock_max_mhz": max(clocks, default=None),
        "memory_clock_mhz": median(found) if (found := values("memory_clock_mhz")) else None,
        "power_w": median(found) if (found := values("power_w")) else None,
        "temperature_c": max(values("temperature_c"), default=None),
        "throttle": {name: count / len(reasons) for name, count in sorted(seen.items())} if reasons else None,
        "slowdowns": sorted(seen.keys() - NO_SLOWDOWN) if reasons else None,
        "energy_j": _energy([(s["time"], s["energy_j"]) for s in samples if s["energy_j"] is not None], begin, end),
        "other_processes": _num_foreign(samples, begin, end, own),
    }


def _within(samples: list[dict[str, Any]], name: str, begin: float, end: float) -> list[dict[str, Any]]:
    """The samples of a window with a value for ``name``; if there is none, the nearest before and after the window."""
    known = [sample for sample in samples if sample.get(name) is not None]
    inside = [sample for sample in known if begin <= sample["time"] <= end]
    before = [sample for sample in known if sample["time"] < begin]
    after = [sample for sample in known if sample["time"] > end]
    return inside or [*before[-1:], *after[:1]]


def _energy(counter: list[tuple[float, float]], begin: float, end: float) -> float | None:
    """Joules between two times; None if the counter was not read around both, or was reset."""
    first, last = _at(counter, begin), _at(counter, end)
    if first is None or last is None or any(after < before for (_, before), (_, after) in pairwise(counter)):
        return None
    return last - first


def _at(counter: list[tuple[float, float]], moment: float) -> float | None:
    """The counter at a time, interpolated linearly between two readings."""
    for (left, low), (right, high) in pairwise(counter):
        if left <= moment <= right:
            return low + (high - low) * ((moment - left) / (right - left) if right > left else 0.0)
    return None


def _num_foreign(samples: list[dict[str, Any]], begin: float, end: float, own: set[int]) -> int | None:
    """Number of foreign processes in a window; None if processes cannot be listed.

    If none of our own was ever recognized, NVML reports pids of another namespace (containers). Then only processes
    that were there at the start are known to be foreign.
    """
    listed = [sample for sample in samples if sample.get("pids") is not None]
    if not listed:
        return None
    seen = {pid for sample in _within(listed, "pids", begin, end) for pid in sample["pids"]} - own
    return len(seen if own else seen & set(listed[0]["pids"]))


def _reasons(bits: int) -> list[str]:
    """Names of the set bits, in order; an unknown bit as a hex number."""
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
"""Fields of a sample: conversion to SI units, and the queries to try: the rest of ``nvmlDeviceGet...``, arguments.

Queries after the first are for other versions of the library or the driver. Only compute processes are listed, so one
that also does graphics is counted once; clients of an MPS server have a separate list.
"""
PROCESS_FIELDS = ("pids", "mps_pids")


def note(notes: list[str], text: str) -> None:
    """Add a note once."""
    if text not in notes:
        notes.append(text)


class Gpu:
    """One GPU, with the queries that it supports."""

    def __init__(self, nvml: Any, uuid: str, notes: list[str]) -> None:
        self.uuid = uuid
        self._nvml, self._notes = nvml, notes
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._ways = {name: list(ways) for name, (_, ways) in QUESTIONS.items()}

    def sample(self, *, processes: bool) -> dict[str, Any]:
        """Take a sample. ``pids`` is missing unless processes are requested, and None if they cannot be listed."""
        found: dict[str, Any] = {"uuid": self.uuid, "time": time.monotonic()}
        for name in QUESTIONS:
            if name not in PROCESS_FIELDS:
                found[name] = self._ask(name)
        if processes:
            pids, clients = map(self._ask, PROCESS_FIELDS)
            found["pids"] = None if pids is None else sorted({*pids, *(clients or [])})
        return found

    def mig(self) -> bool:
        """Whether MIG is on."""
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(self._handle)[0])
        except Exception:  # most GPUs have no such mode
            return False

    def _ask(self, name: str) -> Any:
        """The result of a query; None, with a note, if it fails."""
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
                    break  # a transient error: the next sample tries again
                ways.pop(0)
        if error is not None and name != "mps_pids":  # drivers need not support MPS
            note(self._notes, f"{self.uuid}: no {name}: {error}")
        return None
