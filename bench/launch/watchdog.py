"""Whether a trial gets on: its limits of time, inactivity and output, and ranks that have ended before it.

The bench's own process looks twice a second, at a few small files; the ranks know nothing of it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.launch import dumps
from bench.launch.outcome import read, written
from bench.launch.stragglers import alive, find, is_stopped, send
from bench.measure import heartbeat
from bench.plan.cell import Status

POLL_S = 0.4
"""A rank that failed with a word stays a bit longer (``rank.LAST_WORDS_S``), so one that left none is seen."""
LOG_BYTES = 64 * 2**20
"""The most that all ranks of a trial may write to their standard output and error."""
PEERS_S = 5.0
"""How long after the end of one rank the others may take to be ended by torch elastic, which sends SIGTERM: those that
ignore it, or are stopped, would be waited for for half a minute."""
LEAVING_S = 30.0
"""How long ranks may take to end once all have handed over their results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndReason:
    """Why a trial is to be ended now."""

    status: Status
    reason: str
    dump: bool = False
    """Whether it matters where the ranks are."""


class Watch:
    """Watches one trial from its start. ``look`` again and again, about every ``interval_s``."""

    def __init__(self, folder: Path, world_size: int, timeout_s: float, inactivity_s: float) -> None:
        self._folder = folder
        self._ranks = range(world_size)
        self._timeout_s = timeout_s
        self._inactivity_s = inactivity_s
        self._started = self._moved = time.monotonic()
        self._counts: dict[int, int] = {}
        self.ranks: dict[int, psutil.Process | None] = {}
        """Processes of the ranks that have begun, by rank; None of one that had ended when it was first looked for."""
        self._logs: list[Path] = []
        self._gone: float | None = None
        self.first: tuple[int, ...] = ()
        """Ranks that were seen to have ended before the others."""
        self._done: set[int] = set()
        self._handed_over: float | None = None
        limits = [limit for limit in (timeout_s, inactivity_s) if limit]
        self.interval_s = min(POLL_S, *(limit / 4 for limit in limits))

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks that ended before the others, and left no word."""
        some = 0 < len(self.first) < len(self.ranks)
        return tuple(rank for rank in self.first if some and rank not in written(self._folder, len(self._ranks)))

    def look(self) -> EndReason | None:
        """Why the trial is to be ended; None if it may go on."""
        now = time.monotonic()
        self._read_beats(now)
        return self.talkative() or self._overdue(now) or self._idle(now) or self._leaving(now) or self._left(now)

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
        reason = f"not finished after {self._timeout_s:g} s{self._whereabouts()}; raise --timeout"
        return EndReason(status=Status.TIMEOUT, reason=reason, dump=True)

    def _idle(self, now: float) -> EndReason | None:
        if not self._inactivity_s or now - self._moved < self._inactivity_s:
            return None
        reason = (
            f"no rank got on for {self._inactivity_s:g} s{self._whereabouts()}; raise --inactivity if it takes longer"
        )
        return EndReason(status=Status.HANG, reason=reason, dump=True)

    def _whereabouts(self) -> str:
        """What is known of the ranks, in brackets."""
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

    def talkative(self) -> EndReason | None:
        """Whether the ranks wrote too much: logs fill the disk before they tell anything more.

        To be asked once more when the trial has ended: what it is called must not depend on when somebody looked.
        """
        if len(self._logs) < 2 * len(self._ranks):
            self._logs = list(self._folder.rglob("*.log"))
        total = 0
        for path in self._logs:
            try:
                total += path.stat().st_size
            except OSError:
                continue
        if total <= LOG_BYTES:
            return None
        reason = f"its ranks wrote more than {LOG_BYTES // 2**20} MiB to their standard output and error"
        return EndReason(status=Status.CRASHED, reason=reason)

    def _leaving(self, now: float) -> EndReason | None:
        """Whoever handed over its result has only to end."""
        if self._handed_over is None:
            if len(written(self._folder, len(self._ranks))) == len(self._ranks):
                self._handed_over = now
            return None
        if now - self._handed_over < LEAVING_S:
            return None
        reason = f"its ranks did not end within {LEAVING_S:g} s of their results{self._whereabouts()}"
        return EndReason(status=Status.HANG, reason=reason, dump=True)

    def _left(self, now: float) -> EndReason | None:
        """A rank that has ended ends the others: if not by torch elastic's SIGTERM, then so."""
        running = {rank: one for rank, one in self.ranks.items() if alive(one)}
        ended = tuple(rank for rank in self.ranks if rank not in running and not self._is_done(rank))
        if not ended:
            return None
        if self._gone is None:
            self._gone, self.first = now, ended
        if now - self._gone < PEERS_S:
            return None
        if running and now - self._gone < 2 * PEERS_S:
            for process in running.values():
                send(process, signal.SIGKILL)
            return None
        return EndReason(status=Status.CRASHED, reason=said_of(self.first))

    def _is_done(self, rank: int) -> bool:
        """Whether a rank that has ended was to end: its part is done, whatever the others still do."""
        if rank not in self._done:
            result = read(self._folder / f"rank{rank}.json")
            if result is None or result["status"] != Status.OK:
                return False
            self._done.add(rank)
        return True

    def dump(self) -> None:
        """Have the ranks write where they are."""
        dumps.ask(self._folder, self.ranks)


def said_of(ranks: Sequence[int]) -> str:
    """The reason of a trial in which these ranks ended in silence."""
    return f"rank {' and '.join(map(str, ranks))} ended without a result"
