"""What a launcher's processes leave behind: processes, found wherever they went, and shared memory of NCCL.

A launcher's process and all that come from it are told by a mark in their environment, which children inherit, by their
process group, and by whose children they are. So those are found that called setsid, or whose parents are gone. Not
found are processes that took all three off: with an environment of their own, in a session of their own, and adopted by
a process outside, because the launcher's process, which adopts orphans, was gone by then.

NCCL's shared memory are files of random names in /dev/shm. NCCL unlinks one when its last peer has attached, so one is
left where ranks are killed before. Whose it is can only be told while a process has it mapped; so what ranks have
mapped is noted before they are ended. A segment belongs to one communicator, and all communicators of a trial's ranks
lie within the trial, so nobody else waits for it. Those that only a rank had which ended by itself are not known, and
stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "BENCH_LAUNCHER"
"""Environment variable that names the launcher of a process."""
KILLING_S = 5.0
"""How long killed processes may take until they are gone: in a system call that cannot be interrupted, for ever."""
POLL_S = 0.01
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2)."""
TRACKER = b"multiprocessing.resource_tracker"
"""In the command of the process that removes named semaphores when all who used them have ended."""


@dataclass(frozen=True, slots=True)
class Process:
    """A line of /proc/<pid>/stat."""

    pid: int
    state: str
    """One letter: R running, S sleeping, D in a call that cannot be interrupted, T stopped, Z zombie; see proc(5)."""
    parent: int
    group: int
    started: int
    """Clock ticks after boot."""

    @property
    def ended(self) -> bool:
        """Whether only its exit status is left, which holds nothing."""
        return self.state in "ZX"

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger stopped it."""
        return self.state in "Tt"


def find(pid: int) -> Process | None:
    """The process of that number; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()  # after the name
        return Process(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def alive(pid: int, started: int) -> Process | None:
    """That very process, unless it has ended: a number may be another's by now."""
    process = find(pid)
    return process if process is not None and process.started == started and not process.ended else None


def every() -> Iterator[Process]:
    """All processes, zombies too."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and (process := find(int(path.name))) is not None:
            yield process


def family(launcher: int, mark: str, since: int) -> set[int]:
    """Live processes that come from a launcher's process, itself among them; none was started before ``since``."""
    later = [process for process in every() if process.started >= since]
    marked = f"{MARK}={mark}".encode()
    found = {p.pid for p in later if launcher in (p.pid, p.group) or marked in _environment(p.pid)}
    children: dict[int, list[int]] = {}
    for process in later:
        children.setdefault(process.parent, []).append(process.pid)
    new = list(found)
    while new:
        fresh = [pid for pid in children.get(new.pop(), ()) if pid not in found]
        found.update(fresh)
        new += fresh
    return found & {process.pid for process in later if not process.ended}


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return []


def kill(members: Callable[[], set[int]]) -> set[int]:
    """Kill processes until ``members`` finds no more; those that are left after KILLING_S."""
    deadline = time.monotonic() + KILLING_S
    while (left := members()) and time.monotonic() < deadline:
        for pid in left:
            send(pid, signal.SIGKILL)
        reap(left)
        time.sleep(POLL_S)
    return left


def wait(members: Callable[[], set[int]], seconds: float) -> None:
    """Wait until ``members`` finds no more, but not longer than that."""
    deadline = time.monotonic() + seconds
    while members() and time.monotonic() < deadline:
        time.sleep(5 * POLL_S)


def terminate(pids: set[int]) -> None:
    """Ask processes to end; one that is stopped is continued, or it would not hear of it."""
    for pid in pids:
        send(pid, signal.SIGTERM)
        send(pid, signal.SIGCONT)


def without_trackers(pids: set[int]) -> set[int]:
    """Those that do not track the resources of others: such a process tidies up after them, and ends by itself."""
    return {pid for pid in pids if TRACKER not in _command(pid)}


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def name(number: int) -> str:
    """What a signal is called; those for real-time programs have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def reap(pids: set[int]) -> None:
    """Take the exit status of those that are children of this process: a zombie keeps its number."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def signal_at_parents_end(number: signal.Signals) -> None:
    """Get this signal when the thread that started this process ends."""
    _prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of all that come from this process and lose theirs."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


BEGINNING = "/dev/shm/nccl-"


@dataclass(frozen=True, slots=True)
class Segment:
    """A file that was mapped; a name may be another file's by now."""

    path: str
    inode: int


def mapped(pids: Iterable[int]) -> set[Segment]:
    """The segments that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(BEGINNING) and not fields[5].endswith(" (deleted)"):
                    found.add(Segment(fields[5], int(fields[4])))
    return found


def remove(segments: Iterable[Segment]) -> None:
    """Remove those of the segments that are still there, are this user's, and are mapped by no process any more."""
    left = [one for one in segments if _is_there(one)]
    if not left:
        return
    used = mapped(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    for one in left:
        if one not in used:
            with contextlib.suppress(OSError):
                Path(one.path).unlink()


def _is_there(segment: Segment) -> bool:
    try:
        found = os.lstat(segment.path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_ino == segment.inode and found.st_uid == os.getuid()
