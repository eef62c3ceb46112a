"""What else ran on the machine while a rank trained: read from the kernel before and after, never in between.

Three numbers tell a quiet machine from a busy one:

- ``foreign_cores``: how many cores other processes kept busy. What the CPUs were busy with (``/proc/stat``) less the
  CPU time of the ranks themselves. Only the CPUs that the rank may use are counted, so that a neighbour on other
  sockets of a big host is not.
- ``stolen_cores``: how many cores the hypervisor gave to other machines while this one wanted them.
- ``waited_share``: of the time for which the ranks' threads wanted a core, the share for which they got none.

psutil is not asked: it does not say which CPU a row of its times is, nor how long threads waited.
``/proc/stat`` shows the CPUs of the whole host in most containers (lxcfs hides that), whatever the quota of the
container is. In a virtual machine it shows the machine's own, and what the host does is seen as stolen time only.
The kernel counts it in ticks of 10 ms (proc_stat(5)) and books whole ticks, so a stretch should take a second or more,
and less than about 0.1 cores is noise. Time in interrupts is no part of ``busy_cores``: the ranks' own traffic over the
loopback device causes it, and whether it is also in their CPU time depends on how the kernel was built
(``CONFIG_IRQ_TIME_ACCOUNTING``). So ``foreign_cores`` is rather too low than too high.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

BUSY = (0, 1, 2)
"""Fields of a CPU's line of ``/proc/stat`` that are work: user, nice, system. Guests' time is part of user's."""
STEAL = 7
"""Field of the time stolen by the hypervisor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """Everything as it stands at one moment, in seconds."""

    at: float
    own: float
    cpus: dict[int, tuple[float, float]]
    """Busy and stolen seconds of each CPU."""
    waits: dict[int, tuple[float, float]]
    """Seconds that each thread ran, and that it was ready and did not run."""


class HostLoad:
    """A context manager around a stretch of time of this process; ``result`` is there when it is left.

    ``result`` is plain JSON, for ``merge``: ``wall_s``; ``cpus``, the numbers of the CPUs counted; ``busy_cores``
    and ``stolen_cores`` of them; ``own_cores`` of all threads of this process, children not included; ``own_cpu_s``,
    the same in seconds; ``waited_s``, summed over its threads, or None if the kernel does not tell. It is None on a
    system without ``/proc/stat``, and before the end.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._begin: _Reading | None = None
        self.result: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        self.restart()
        return self

    def __exit__(self, *exc: object) -> None:
        end = self._read()
        if self._begin is not None and end is not None:
            self.result = _between(self._begin, end)

    def restart(self) -> None:
        """The stretch begins now; what was before is forgotten. Takes less than a millisecond, more with many CPUs."""
        self._begin = self._read()

    def _read(self) -> _Reading | None:
        cpus = self._cpus()
        if cpus is None:
            return None
        return _Reading(at=time.monotonic(), own=time.process_time(), cpus=cpus, waits=self._waits())

    def _cpus(self) -> dict[int, tuple[float, float]] | None:
        """Busy and stolen seconds of the CPUs that this process may use, or of all if their numbers are others."""
        try:
            lines = (self._proc / "stat").read_text().splitlines()
            tick = 1 / os.sysconf("SC_CLK_TCK")
            found: dict[int, tuple[float, float]] = {}
            for line in lines:
                name, *fields = line.split()
                if name.startswith("cpu") and name != "cpu":
                    ticks = [int(field) for field in fields]
                    stolen = ticks[STEAL] if len(ticks) > STEAL else 0
                    found[int(name[3:])] = (sum(ticks[i] for i in BUSY) * tick, stolen * tick)
        except (OSError, ValueError, IndexError):
            return None
        allowed = os.sched_getaffinity(0)
        # A container's file may number its CPUs from 0 while the affinity has the host's numbers.
        return {cpu: found[cpu] for cpu in allowed} if allowed <= found.keys() else found or None

    def _waits(self) -> dict[int, tuple[float, float]]:
        """Of each thread of this process: the seconds it ran and waited (Documentation/scheduler/sched-stats.rst)."""
        found = {}
        for task in (self._proc / "self" / "task").glob("[0-9]*"):
            try:
                ran, waited = (task / "schedstat").read_text().split()[:2]
                found[int(task.name)] = (int(ran) / 1e9, int(waited) / 1e9)
            except (OSError, ValueError):  # the thread has ended, or the kernel has no such file
                continue
        return found


def _between(begin: _Reading, end: _Reading) -> dict[str, Any]:
    """What happened from one reading to the next."""
    wall = max(end.at - begin.at, 1e-9)
    both = sorted(begin.cpus.keys() & end.cpus.keys())  # a CPU may be switched off meanwhile
    busy, stolen = (
        # A counter of the kernel may go back by a tick.
        sum(max(0.0, end.cpus[cpu][field] - begin.cpus[cpu][field]) for cpu in both)
        for field in (0, 1)
    )
    own = end.own - begin.own
    return {
        "wall_s": wall,
        "cpus": both,
        "busy_cores": busy / wall,
        "stolen_cores": stolen / wall,
        "own_cores": own / wall,
        "own_cpu_s": own,
        "waited_s": _waited(begin.waits, end.waits),
    }


def _waited(begin: dict[int, tuple[float, float]], end: dict[int, tuple[float, float]]) -> float | None:
    """Seconds for which threads waited; those of threads that have ended are lost. None if no thread says it ran."""
    if not any(ran for ran, _ in end.values()):
        return None  # a kernel without this information writes zeros
    waited = 0.0
    for thread, (_, until) in end.items():
        before = begin.get(thread, (0.0, 0.0))[1]
        waited += until - before if until >= before else until  # a new thread may have an old one's number
    return waited


def merge(ranks: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """All ranks' results as one: the ``foreign_cores``, ``stolen_cores`` and ``waited_share`` of the module's text.

    Beside them ``num_cpus``, the CPUs counted, and ``own_cores`` of all ranks together. The processes that only watch,
    the bench's own and its launcher, count as foreign. ``waited_share`` is None if the kernel of any rank does not
    tell. None without ranks, or if one of them has no result.
    """
    results = [rank for rank in ranks if rank is not None]
    if not results or len(results) < len(ranks):
        return None
    # Ranks on the same CPUs saw the same; ranks that are pinned to CPUs of their own saw parts.
    groups: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for rank in results:
        groups.setdefault(tuple(rank["cpus"]), []).append(rank)
    busy, stolen = (
        sum(fmean(rank[name] for rank in group) for group in groups.values()) for name in ("busy_cores", "stolen_cores")
    )
    own = sum(rank["own_cores"] for rank in results)
    waits = [rank["waited_s"] for rank in results]
    share = None
    if None not in waits:
        waited = sum(waits)
        wanted = waited + sum(rank["own_cpu_s"] for rank in results)
        share = waited / wanted if wanted > 0 else 0.0
    return {
        "num_cpus": len({cpu for cpus in groups for cpu in cpus}),
        "own_cores": own,
        "foreign_cores": max(0.0, busy - own),
        "stolen_cores": stolen,
        "waited_share": share,
    }
