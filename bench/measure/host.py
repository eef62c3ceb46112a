"""Load of the machine by others while a rank trained, read from the kernel before and after.

- ``foreign_cores``: cores that other processes kept busy: the busy time of the CPUs
  (``/proc/stat``) minus the CPU time of the ranks. Only CPUs that the rank may use count, so
  neighbours on other sockets do not matter.
- ``stolen_cores``: cores that the hypervisor gave to other machines while this one wanted them.

psutil does not tell which CPU a row of its times belongs to. In most containers ``/proc/stat``
shows the CPUs of the whole host (lxcfs hides that), whatever the container's quota. In a virtual
machine it shows the machine's own; the host shows only as stolen time. The kernel counts in ticks
of 10 ms (proc_stat(5)), so measure for at least a second; less than about 0.1 cores is noise. Time
in interrupts is not part of ``busy_cores``: the ranks' own loopback traffic causes it, and whether
it is in their CPU time depends on ``CONFIG_IRQ_TIME_ACCOUNTING``. So ``foreign_cores`` tends to be
too low.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NotRequired, Self, TypedDict

from bench.grouping import grouped

IDLE_SHARE = 0.1
"""Largest share of the CPUs that others may use on an idle machine."""
BUSY = (0, 1, 2)
"""Fields of a CPU's line in ``/proc/stat`` that are work: user (includes guests), nice, system."""
STEAL = 7
"""Field of the time stolen by the hypervisor."""


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """What the kernel has counted of one CPU."""

    busy: float
    stolen: float


@dataclass(frozen=True, slots=True)
class LoadReading:
    """What the load is the difference of, in seconds."""

    time: float
    used: float
    """CPU time of this process."""
    cpus: Mapping[int, CpuSeconds]
    """By the number of the CPU."""


class MeasuredLoad(TypedDict):
    """The load while a process ran; plain JSON."""

    kernel: NotRequired[str]
    """Which tells machines apart; older commits do not say it."""
    wall_s: float
    cpus: Sequence[int]
    """Numbers of the CPUs counted."""
    busy_cores: float
    """Of these CPUs, as the next."""
    stolen_cores: float
    own_cores: float
    """Of all threads of this process without children."""


class HostLoad:
    """A context manager that measures this process; ``result`` is available afterwards.

    It is None without ``/proc/stat``, and before the end.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._begin: LoadReading | None = None
        self.result: MeasuredLoad | None = None

    def __enter__(self) -> Self:
        self._begin = self._read()  # less than a millisecond, more with many CPUs
        return self

    def __exit__(self, *exc: object) -> None:
        end = self._read()
        if self._begin is not None and end is not None:
            self.result = _between(self._begin, end, self._kernel())

    def _kernel(self) -> str:
        """The id that the kernel drew when it booted; empty if it is unknown (random(4))."""
        try:
            return (self._proc / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""

    def _read(self) -> LoadReading | None:
        cpus = self._cpus()
        if cpus is None:
            return None
        return LoadReading(time.monotonic(), time.process_time(), cpus)

    def _cpus(self) -> dict[int, CpuSeconds] | None:
        """Busy and stolen seconds of the CPUs that this process may use.

        Of all CPUs if the numbering differs; None if they cannot be read.
        """
        try:
            lines = (self._proc / "stat").read_text().splitlines()
            tick = 1 / os.sysconf("SC_CLK_TCK")
            found: dict[int, CpuSeconds] = {}
            for line in lines:
                name, *fields = line.split()
                if name.startswith("cpu") and name != "cpu":
                    busy = sum(int(fields[place]) for place in BUSY)
                    found[int(name[3:])] = CpuSeconds(busy * tick, int(fields[STEAL]) * tick)
        except (OSError, ValueError, IndexError):
            return None
        allowed = os.sched_getaffinity(0)
        if not allowed <= found.keys():
            # A container's file may number its CPUs from 0 while the affinity has the host's
            # numbers.
            if not found:
                return None
            return found
        return {cpu: found[cpu] for cpu in allowed}


def _between(begin: LoadReading, end: LoadReading, kernel: str) -> MeasuredLoad:
    wall, used = max(end.time - begin.time, 1e-9), end.used - begin.used
    cpus = sorted(begin.cpus.keys() & end.cpus.keys())  # a CPU may have gone offline
    busy = stolen = 0.0
    for cpu in cpus:  # whose counters may go back by a tick
        busy += max(0.0, end.cpus[cpu].busy - begin.cpus[cpu].busy)
        stolen += max(0.0, end.cpus[cpu].stolen - begin.cpus[cpu].stolen)
    return {
        "kernel": kernel,
        "wall_s": wall,
        "cpus": cpus,
        "busy_cores": busy / wall,
        "stolen_cores": stolen / wall,
        "own_cores": used / wall,
    }


def merge(ranks: Sequence[MeasuredLoad | None]) -> dict[str, float] | None:
    """Merge the loads of ranks: ``num_cpus``, ``own_cores``, ``foreign_cores``, ``stolen_cores``.

    The bench's own watching processes count as foreign. Ranks of several nodes that share a kernel,
    as containers do, count as ranks of one. None without ranks, or if one of them has no result.
    """
    results = [rank for rank in ranks if rank is not None]
    if not results or len(results) < len(ranks):
        return None
    # Ranks on the same CPUs measured the same; pinned ranks measured their own CPUs.
    groups = grouped(((rank.get("kernel", ""), tuple(rank["cpus"])), rank) for rank in results)
    used = busy = stolen = 0.0
    counted: set[tuple[str, int]] = set()
    for (kernel, cpus), group in groups.items():
        busy += fmean(rank["busy_cores"] for rank in group)
        stolen += fmean(rank["stolen_cores"] for rank in group)
        for cpu in cpus:
            counted.add((kernel, cpu))
    for rank in results:
        used += rank["own_cores"]
    return {
        "num_cpus": len(counted),
        "own_cores": used,
        "foreign_cores": max(0.0, busy - used),
        "stolen_cores": stolen,
    }
