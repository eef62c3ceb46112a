"""Watches a trial: limits of time, inactivity and output, and ranks that do not end.

The bench's own process polls a few small files about twice a second, without disturbing the ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.launch import dumps
from bench.launch.outcome import written
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
class EndReason:
    """Why to end a trial now."""

    status: Status
    reason: str
    dump: bool = False
    """Whether to dump the stacks of the ranks first."""


class Watch:
    """Watches one trial from its start. Call ``look`` about every ``interval_s`` seconds."""

    def __init__(self, folder: Path, world_size: int, timeout_s: float, inactivity_s: float) -> None:
        self._folder = folder
        self._ranks = range(world_size)
        self._timeout_s = timeout_s
        self._inactivity_s = inactivity_s
        self._started = self._moved = time.monotonic()
        self._counts: dict[int, int] = {}
        self.ranks: dict[int, psutil.Process | None] = {}
        """Processes of the ranks that have started, by rank; None for one that ended before it was first looked up."""
        self._logs: list[Path] = []
        self._handed_over: float | None = None
        limits = [limit for limit in (timeout_s, inactivity_s) if limit]
        self.interval_s = min(POLL_S, *(limit / 4 for limit in limits))

    def look(self) -> EndReason | None:
        """The reason to end the trial; None if it may go on."""
        now = time.monotonic()
        self._read_beats(now)
        return self.excessive_output() or self._overdue(now) or self._idle(now) or self._slow_exit(now)

    def _read_beats(self, now: float) -> None:
        for rank in self._ranks:
            beat = heartbeat.read(self._folder, rank)
            if beat is not None and self._counts.get(rank) != beat.count:
                self._counts[rank], self._moved = beat.count, now
                if rank not in self.ranks:
                    self.ranks[rank] = find(beat.pid)

    def _overdue(self, now: float) -> EndReason | None:
        if now - self._started < self._timeout_s:
            return None
        reason = f"not finished after {self._timeout_s:g} s{self._rank_states()}; raise --timeout"
        return EndReason(status=Status.TIMEOUT, reason=reason, dump=True)

    def _idle(self, now: float) -> EndReason | None:
        if not self._inactivity_s or now - self._moved < self._inactivity_s:
            return None
        reason = (
            f"no rank got on for {self._inactivity_s:g} s{self._rank_states()}; raise --inactivity if it takes longer"
        )
        return EndReason(status=Status.HANG, reason=reason, dump=True)

    def _rank_states(self) -> str:
        """The state of each rank, in brackets."""
        if not self.ranks:
            return " (no rank has begun)"
        words = []
        for rank in self._ranks:
            if rank not in self.ranks:
                words.append(f"rank {rank} has not begun")
                continue
            process = self.ranks[rank]
            state = ", is stopped by a signal" if is_stopped(process) else "" if alive(process) else ", has ended"
            words.append(f"rank {rank} after {self._counts[rank]} events{state}")
        return f" ({'; '.join(words)})"

    def excessive_output(self) -> EndReason | None:
        """The reason to end the trial if its ranks wrote more than LOG_BYTES of logs.

        Check again when the trial has ended, so that its status does not depend on when this was polled.
        """
        if len(self._logs) < 2 * len(self._ranks):
            self._logs = list(self._folder.rglob("*.log"))
        if sum(map(dumps.size, self._logs)) <= LOG_BYTES:
            return None
        reason = f"its ranks wrote more than {LOG_BYTES // 2**20} MiB to their standard output and error"
        return EndReason(status=Status.CRASHED, reason=reason)

    def _slow_exit(self, now: float) -> EndReason | None:
        """The reason to end the trial if its ranks do not end within LEAVING_S of their results."""
        if self._handed_over is None:
            if len(written(self._folder, len(self._ranks))) == len(self._ranks):
                self._handed_over = now
            return None
        if now - self._handed_over < LEAVING_S:
            return None
        reason = f"its ranks did not end within {LEAVING_S:g} s of their results{self._rank_states()}"
        return EndReason(status=Status.HANG, reason=reason, dump=True)

    def dump(self) -> None:
        """Make the ranks dump their stacks."""
        dumps.ask(self._folder, self.ranks)
