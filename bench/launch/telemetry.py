"""GPU telemetry that the bench's own process records in a training: clocks, power, energy.

The ranks are not disturbed: one thread of the bench queries NVML ten times a second for each GPU.
Without a GPU nothing happens. Values that are unknown, all of them without NVML, are None with a
note, and no error ends a run.

Times are ``time.monotonic()``, which on Linux is one clock for all processes, so that ranks can
name the part of a recording that is their timed window (``summarize``).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, TypedDict

import psutil

from bench.grouping import grouped
from bench.launch import gpus
from bench.launch.nvml import SAMPLED, GpuSample, Nvml, NvmlGpu

INTERVAL_S = 0.1
"""Interval between two samples of a GPU."""
PROCESSES_EVERY = 5
"""Processes are listed in every n-th sample, since that is the costliest query."""
STOP_S = 5.0
"""How long to wait for the last sample, in case the driver hangs."""
NO_SLOWDOWN = frozenset({"GpuIdle", "ApplicationsClocksSetting", "DisplayClockSetting"})
"""Reasons that are no slowdown: the GPU is idle, or runs at the clocks that a user has set.

According to NVML's documentation, all others hold clocks below the requested ones: SwPowerCap (the
power limit), HwSlowdown (temperature, an external power brake, or a fast trigger: clocks at most
half; also seen briefly when the P-state changes), SwThermalSlowdown and HwThermalSlowdown (GPU or
memory too hot), HwPowerBrakeSlowdown (the power supply), SyncBoost (another GPU of the group is
slow), BoardLimit, Reliability, Unknown, and bits newer than this list. SwPowerCap is common on a
busy GPU; its share of the samples and the clocks show how much it matters. """
SampleJson = Mapping[str, Any]
"""A ``GpuSample`` that has travelled as JSON."""


class Recording(TypedDict):
    """What was recorded of a node's GPUs; plain JSON for ``summarize``."""

    interval_s: float
    samples: list[GpuSample]
    """One per GPU and time."""
    own_pids: list[int]
    """The processes seen that descend from this one."""
    notes: list[str]


class Telemetry:
    """Records all visible GPUs from ``start`` to ``stop``; can be used again.

    Start it before the ranks: other processes that are on a GPU at the start are certainly foreign.
    ``recording`` is None without a GPU.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.recording: Recording | None = None
        self._interval_s = interval_s
        self._notes: list[str] = []
        self._samples: list[GpuSample] = []
        self._is_ours: dict[int, bool] = {}
        self._gpus: list[NvmlGpu] = []
        self._nvml: Nvml | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Take the first sample and continue in a thread. Does nothing without a GPU."""
        self.recording, self._notes, self._samples = None, [], []
        self._is_ours, self._gpus, self._ended = {}, [], threading.Event()
        try:
            visible = [gpu["uuid"] for gpu in gpus.gpus()]
            if not visible:
                return
            self._nvml = Nvml()
            self._gpus = [gpu for gpu in self._nvml.gpus if gpu.uuid in visible]
        except Exception as error:
            self._note(f"no telemetry: {error}")
            return
        for gpu in self._gpus:
            if gpu.ask("mig"):
                self._note(
                    f"{gpu.uuid}: MIG is on: values are those of the whole GPU, not of an instance"
                )
        self._sample(processes=True)
        self._thread = threading.Thread(
            target=self._watch, args=[self._ended], name="telemetry", daemon=True
        )
        self._thread.start()

    def stop(self) -> Recording | None:
        """Take the last sample and return ``recording``."""
        self._ended.set()
        thread, self._thread = self._thread, None
        nvml, self._nvml = self._nvml, None
        if thread is not None:
            thread.join(STOP_S)
            if thread.is_alive():
                self._note(f"NVML did not answer within {STOP_S:g} s")
                nvml = None  # the thread is inside it
            else:
                self._sample(processes=True)
        if nvml is not None:
            nvml.close()
        unknown: list[str] = []
        for gpu in self._gpus:
            for name, problem in gpu.problems.copy().items():
                if name in (*SAMPLED, "pids"):
                    unknown.append(f"{gpu.uuid}: no {name}: {problem}")
        own_pids = [pid for pid, is_ours in self._is_ours.copy().items() if is_ours]
        if self._samples or self._notes:
            self.recording = {
                "interval_s": self._interval_s,
                "samples": list(self._samples),
                "own_pids": sorted(own_pids),
                "notes": [*self._notes, *unknown],
            }
        return self.recording

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _watch(self, ended: threading.Event) -> None:
        number = 0
        while not ended.wait(self._interval_s):
            number += 1
            self._sample(processes=number % PROCESSES_EVERY == 0)

    def _learn_owners(self, pids: Sequence[int]) -> None:
        for pid in pids:
            if pid not in self._is_ours:
                self._is_ours[pid] = descends(pid, os.getpid())

    def _sample(self, *, processes: bool) -> None:
        for gpu in self._gpus:
            try:
                sample = gpu.sample(processes=processes)
                pids = sample.get("pids")
                if pids is not None:
                    self._learn_owners(pids)
                self._samples.append(sample)
            except Exception as error:
                self._note(f"{gpu.uuid}: {type(error).__name__}: {error}")


def descends(pid: int, ancestor: int) -> bool:
    """Whether a process is the ancestor or one of its descendants; False if unknown."""
    try:
        process = psutil.Process(pid)
        return ancestor in {relative.pid for relative in (process, *process.parents())}
    except psutil.Error:
        return False


class GpuSummaries(TypedDict):
    """What ``summarize`` tells of the GPUs of one node."""

    gpus: list[dict[str, object]]
    notes: list[str]


def summarize(
    recording: Mapping[str, Any] | None,
    begin: float | None,
    end: float | None,
    uuids: Sequence[str] = (),
) -> GpuSummaries | None:
    """Summarize the GPUs between two times of ``time.monotonic()``.

    None without a recording or without the times. Covers only the GPUs with the ``uuids``, since
    the others idled; all if none of those was recorded, as with MIG instances, which have UUIDs of
    their own.

    ``notes``, and ``gpus``, one each: ``uuid``; ``num_samples`` inside; the median ``sm_clock_mhz``
    with ``sm_clock_min_mhz`` and ``sm_clock_max_mhz``; the median ``memory_clock_mhz`` and
    ``power_w``; the highest ``temperature_c``; ``throttle``, the share of samples with each reason;
    ``slowdowns``, those that are not in NO_SLOWDOWN; ``energy_j``, of the whole GPU, from the
    counter, interpolated; ``other_processes``, how many compute processes were foreign. Unknown
    values are None. A window too short for a sample uses the nearest samples.
    """
    if recording is None or begin is None or end is None:
        return None
    samples: list[SampleJson] = sorted(
        recording["samples"], key=lambda sample: float(sample["time"])
    )
    by_gpu = grouped((str(sample["uuid"]), sample) for sample in samples)
    our_pids = set(recording["own_pids"])
    used = [uuid for uuid in by_gpu if uuid in uuids]
    if not used:
        used = list(by_gpu)
    return {
        "gpus": [_summary(uuid, by_gpu[uuid], begin, end, our_pids) for uuid in used],
        "notes": list(recording["notes"]),
    }


def _summary(
    uuid: str, samples: list[SampleJson], begin: float, end: float, our_pids: set[int]
) -> dict[str, object]:
    """One GPU between two times; the keys are those of ``summarize``."""

    def values(name: str) -> list[Any]:
        return [sample[name] for sample in _within(samples, name, begin, end)]

    clocks = values("sm_clock_mhz")
    inside = [sample for sample in samples if begin <= sample["time"] <= end]
    return {
        "uuid": uuid,
        "num_samples": len(inside),
        "sm_clock_mhz": _median(clocks),
        "sm_clock_min_mhz": min(clocks, default=None),
        "sm_clock_max_mhz": max(clocks, default=None),
        "memory_clock_mhz": _median(values("memory_clock_mhz")),
        "power_w": _median(values("power_w")),
        "temperature_c": max(values("temperature_c"), default=None),
        **_throttling(values("throttle")),
        "energy_j": _energy(samples, begin, end),
        "other_processes": _num_foreign(samples, begin, end, our_pids),
    }


def _median(values: list[float]) -> float | None:
    if values:
        return median(values)
    return None


def _throttling(reasons: list[list[str]]) -> dict[str, object]:
    """``throttle`` and ``slowdowns``, from the reasons of each sample; None without samples."""
    if not reasons:
        return {"throttle": None, "slowdowns": None}
    seen = Counter(itertools.chain.from_iterable(reasons))
    return {
        "throttle": {name: count / len(reasons) for name, count in sorted(seen.items())},
        "slowdowns": sorted(seen.keys() - NO_SLOWDOWN),
    }


def _within(samples: list[SampleJson], name: str, begin: float, end: float) -> list[SampleJson]:
    """The samples of a window with a value for ``name``, or else the nearest before and after."""
    before: list[SampleJson] = []
    inside: list[SampleJson] = []
    after: list[SampleJson] = []
    for sample in samples:
        if sample.get(name) is None:
            continue
        if sample["time"] < begin:
            before.append(sample)
        elif sample["time"] > end:
            after.append(sample)
        else:
            inside.append(sample)
    if inside:
        return inside
    return [*before[-1:], *after[:1]]


def _energy(samples: list[SampleJson], begin: float, end: float) -> float | None:
    """Joules between two times, interpolated.

    None if the counter was not read around both, or was reset.
    """
    times: list[float] = []
    joules: list[float] = []
    for sample in samples:
        if sample["energy_j"] is not None:
            times.append(sample["time"])
            joules.append(sample["energy_j"])
    if not times or begin < times[0] or end > times[-1] or joules != sorted(joules):
        return None
    import numpy as np  # the command line starts faster without it

    first, last = np.interp([begin, end], times, joules)
    return float(last - first)


def _num_foreign(
    samples: list[SampleJson], begin: float, end: float, our_pids: set[int]
) -> int | None:
    """Number of foreign processes in a window; None if processes cannot be listed.

    If none of our own was ever recognized, NVML reports pids of another namespace (containers).
    Then only processes that were there at the start are known to be foreign.
    """
    listed = [sample for sample in samples if sample.get("pids") is not None]
    if not listed:
        return None
    seen: set[int] = set()
    for sample in _within(listed, "pids", begin, end):
        seen.update(sample["pids"])
    if not our_pids:
        seen &= set(listed[0]["pids"])
    return len(seen - our_pids)
