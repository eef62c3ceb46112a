"""Watches a trial: limits of time, inactivity and output, and ranks that do not end.

The bench's own process polls a few small files about twice a second, without disturbing the ranks.
On other nodes their agents do, and send what they see.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.launch import dumps
from bench.launch.outcome import Ending, written
from bench.launch.stragglers import alive, find, is_stopped
from bench.measure import heartbeat
from bench.plan.cell import Status

POLL_S = 0.4
"""Seconds between two looks at a trial."""
LOG_BYTES = 64 * 2**20
"""Limit on the standard output and error of all ranks of a trial together."""
LEAVING_S = 30.0
"""How long ranks may take to end once all have written their results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What is seen of the ranks of one node at one moment; plain JSON."""

    counts: Sequence[int | None]
    """Events of each rank; None before its first heartbeat."""
    states: Sequence[str]
    """Of each rank: empty, or why it cannot get on."""
    written: Sequence[int]
    """Ranks that have written a result or a failure."""
    log_bytes: int


class Ranks:
    """The ranks of a trial on this node."""

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self.folder, self.numbers = folder, ranks
        self._processes: dict[int, psutil.Process | None] = {}
        """Processes of the ranks that have started; None for one that ended before it was first
        looked up."""
        self._logs: list[Path] = []

    def look(self) -> Sight:
        beats = {rank: heartbeat.read(self.folder, rank) for rank in self.numbers}
        for rank, beat in beats.items():
            if beat is not None and rank not in self._processes:
                self._processes[rank] = find(beat.pid)
        return Sight(
            counts=[None if beat is None else beat.count for beat in beats.values()],
            states=[self._state(rank) for rank in self.numbers],
            written=sorted(written(self.folder, self.numbers)),
            log_bytes=self.log_bytes(),
        )

    def _state(self, rank: int) -> str:
        if rank not in self._processes:
            return ""
        process = self._processes[rank]
        if is_stopped(process):
            return "is stopped by a signal"
        if alive(process):
            return ""
        return "has ended"

    def log_bytes(self) -> int:
        """Bytes that the ranks have written to their standard output and error."""
        if len(self._logs) < 2 * len(self.numbers):
            self._logs = list(self.folder.rglob("*.log"))
        return sum(map(dumps.size, self._logs))

    def dump(self) -> None:
        dumps.ask(self.folder, self._processes)


class Watch:
    """Watches one trial from its start. Call ``look`` about every ``interval_s`` seconds."""

    def __init__(self, names: Sequence[str], timeout_s: float, inactivity_s: float) -> None:
        self._names = names
        self._timeout_s = timeout_s
        self._inactivity_s = inactivity_s
        self._started = self._moved = time.monotonic()
        self._counts: list[int | None] = [None for _ in names]
        self._states: list[str] = []
        self._handed_over: float | None = None
        limits = [limit for limit in (timeout_s, inactivity_s) if limit]
        self.interval_s = min(POLL_S, *(limit / 4 for limit in limits))

    def look(self, sights: Sequence[Sight]) -> Ending | None:
        """The reason to end the trial; None if it may go on.

        ``sights`` has the nodes in the order of their ranks.
        """
        now = time.monotonic()
        counts = list(itertools.chain.from_iterable(sight.counts for sight in sights))
        self._states = list(itertools.chain.from_iterable(sight.states for sight in sights))
        if counts != self._counts:
            self._counts, self._moved = counts, now
        num_written = sum(len(sight.written) for sight in sights)
        ending = excessive(sum(sight.log_bytes for sight in sights))
        if ending is None:
            ending = self._overdue(now)
        if ending is None:
            ending = self._idle(now)
        if ending is None:
            ending = self._slow_exit(now, num_written)
        return ending

    def _overdue(self, now: float) -> Ending | None:
        if now - self._started < self._timeout_s:
            return None
        reason = f"not finished after {self._timeout_s:g} s{self._rank_states()}"
        return Ending(status=Status.TIMEOUT, failure=reason, dump=True)

    def _idle(self, now: float) -> Ending | None:
        if not self._inactivity_s or now - self._moved < self._inactivity_s:
            return None
        reason = (
            f"no rank got on for {self._inactivity_s:g} s{self._rank_states()}; raise "
            "--inactivity if it takes longer"
        )
        return Ending(status=Status.HANG, failure=reason, dump=True)

    def _rank_states(self) -> str:
        """The state of each rank, in brackets."""
        if not any(count is not None for count in self._counts):
            return " (no rank has begun)"
        words = []
        for name, count, state in zip(self._names, self._counts, self._states, strict=True):
            if count is None:
                words.append(f"{name} has not begun")
            elif state:
                words.append(f"{name} after {count} events, {state}")
            else:
                words.append(f"{name} after {count} events")
        return f" ({'; '.join(words)})"

    def _slow_exit(self, now: float, num_written: int) -> Ending | None:
        """The reason to end the trial if its ranks do not end within LEAVING_S of their results."""
        if self._handed_over is None:
            if num_written == len(self._names):
                self._handed_over = now
            return None
        if now - self._handed_over < LEAVING_S:
            return None
        reason = (
            f"its ranks did not end within {LEAVING_S:g} s of their results{self._rank_states()}"
        )
        return Ending(status=Status.HANG, failure=reason, dump=True)


def excessive(log_bytes: int) -> Ending | None:
    """The reason to end a trial whose ranks wrote more than LOG_BYTES of logs.

    Check again when the trial has ended, so that its status does not depend on when this was
    polled.
    """
    if log_bytes <= LOG_BYTES:
        return None
    reason = (
        f"its ranks wrote more than {LOG_BYTES // 2**20} MiB to their standard output and error"
    )
    return Ending(status=Status.CRASHED, failure=reason, void=True)
