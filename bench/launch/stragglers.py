"""What a launcher's processes leave behind: processes, found wherever they went, and shared memory of NCCL.

psutil tells one process from another that has its number, by pid and start.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "BENCH_LAUNCHER"
"""Environment variable that names the launcher of a process."""
KILLING_S = 5.0
"""How long killed processes may take until they are gone: in a system call that cannot be interrupted, for ever."""
POLL_S = 0.01
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2)."""
TRACKER = "multiprocessing.resource_tracker"
"""In the command of the process that removes named semaphores when all who used them have ended."""


def find(pid: int) -> psutil.Process | None:
    """The process of that number; None if there is none. It stays that one when the number is another's."""
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def alive(process: psutil.Process | None) -> bool:
    """Whether a process has not ended; a zombie has, as only its exit status is left."""
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def is_stopped(process: psutil.Process | None) -> bool:
    """Whether a signal or a debugger stopped a process."""
    try:
        return process is not None and process.status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
    except psutil.Error:
        return False


def family(launcher: int, mark: str) -> set[psutil.Process]:
    """Live processes that come from a launcher's process, itself among them."""
    psutil.process_iter.cache_clear()  # it would leave out a process whose number was another's the last time
    every = list(psutil.process_iter(["ppid", "status", "environ"]))
    found = {
        one for one in every if launcher in {one.pid, _group(one.pid)} or (one.info["environ"] or {}).get(MARK) == mark
    }
    children: dict[int, list[psutil.Process]] = {}
    for one in every:
        children.setdefault(one.info["ppid"], []).append(one)
    new = list(found)
    while new:
        fresh = [child for child in children.get(new.pop().pid, ()) if child not in found]
        found.update(fresh)
        new += fresh
    return {one for one in found if one.info["status"] not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}}


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # it has ended
        return None


def kill(members: Callable[[], set[psutil.Process]]) -> set[psutil.Process]:
    """Kill processes until ``members`` finds no more; those that are left after KILLING_S."""
    deadline = time.monotonic() + KILLING_S
    while (left := members()) and time.monotonic() < deadline:
        for process in left:
            send(process, signal.SIGKILL)
        psutil.wait_procs(left, POLL_S)  # takes the exit status of children: a zombie keeps its number
    return left


def wait(members: Callable[[], set[psutil.Process]], seconds: float) -> None:
    """Wait until ``members`` finds no more, but not longer than that."""
    deadline = time.monotonic() + seconds
    while members() and time.monotonic() < deadline:
        time.sleep(5 * POLL_S)


def terminate(processes: set[psutil.Process]) -> None:
    """Ask processes to end; one that is stopped is continued, or it would not hear of it."""
    for process in processes:
        send(process, signal.SIGTERM)
        send(process, signal.SIGCONT)


def without_trackers(processes: set[psutil.Process]) -> set[psutil.Process]:
    """Those that do not track the resources of others: such a process tidies up after them, and ends by itself."""
    return {process for process in processes if not _tracks(process)}


def _tracks(process: psutil.Process) -> bool:
    try:
        return any(TRACKER in word for word in process.cmdline())
    except psutil.Error:
        return False


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def name(number: int) -> str:
    """What a signal is called; those for real-time programs have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
    """The segments that these processes have mapped. psutil names no inode, and reads the far slower smaps."""
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
    used = mapped(psutil.pids())
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
