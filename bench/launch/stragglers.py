"""Cleans up what a launcher leaves behind: processes and NCCL's shared memory.

psutil identifies a process by its pid and its start time, so a reused pid is not mistaken for the
old process.

Descendants of a launcher's process are recognized by a mark in their environment, which children
inherit, by their process group, and by their parents. This finds processes that called setsid and
orphans. It misses a process that has a new environment and a new session and was adopted by an
outside process, because the launcher's process, which adopts orphans, had ended by then.

NCCL's shared memory consists of files with random names in /dev/shm. NCCL unlinks a file when its
last peer has attached, so the file stays if ranks are killed before that. Its owner is known only
while a process has it mapped, so the mappings of the ranks are recorded before they are ended. A
segment belongs to one communicator, and a trial's communicators never leave the trial, so no other
process needs it. A segment that was mapped only by a rank that ended on its own is not known, and
stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from bench.grouping import grouped

MARK = "BENCH_LAUNCHER"
"""Environment variable that identifies the launcher of a process."""
KILLING_S = 5.0
"""How long to wait for killed processes: one in an uninterruptible system call may never end."""
POLL_S = 0.01
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2)."""
TRACKER = "multiprocessing.resource_tracker"
"""Part of the command of the process that removes named semaphores after all their users have
ended."""


def find(pid: int) -> psutil.Process | None:
    """The process with this pid; None if there is none.

    The object never refers to a later process of the same pid.
    """
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def alive(process: psutil.Process | None) -> bool:
    """Whether a process is running. A zombie is not: only its exit status is left."""
    try:
        return (
            process is not None
            and process.is_running()
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False


def is_stopped(process: psutil.Process | None) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    try:
        return process is not None and process.status() in {
            psutil.STATUS_STOPPED,
            psutil.STATUS_TRACING_STOP,
        }
    except psutil.Error:
        return False


def family(launcher: int, mark: str) -> set[psutil.Process]:
    """A launcher's process and its live descendants."""
    psutil.process_iter.cache_clear()  # it would skip a process with a reused pid
    # One that is ending has no environment, but its children still: asked for that here, it would
    # be left out.
    every = list(psutil.process_iter(["ppid", "status"]))
    found = set()
    for process in every:
        if launcher in {process.pid, _group(process.pid)} or _mark(process) == mark:
            found.add(process)
    children = grouped((process.info["ppid"], process) for process in every)
    new = list(found)
    while new:
        fresh = [child for child in children.get(new.pop().pid, ()) if child not in found]
        found.update(fresh)
        new += fresh
    return {p for p in found if p.info["status"] not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}}


def _mark(process: psutil.Process) -> str | None:
    try:
        return str(process.environ()[MARK])
    except (psutil.Error, KeyError):
        return None


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # it has ended
        return None


def kill(members: Callable[[], set[psutil.Process]]) -> set[psutil.Process]:
    """Kill processes until ``members`` finds no more; return those left after KILLING_S."""
    deadline = time.monotonic() + KILLING_S
    while (left := members()) and time.monotonic() < deadline:
        for process in left:
            send(process, signal.SIGKILL)
        psutil.wait_procs(left, POLL_S)  # reaps children
    return left


def wait(members: Callable[[], set[psutil.Process]], seconds: float) -> None:
    """Wait until ``members`` finds no more, for at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while members() and time.monotonic() < deadline:
        time.sleep(5 * POLL_S)


def terminate(processes: set[psutil.Process]) -> None:
    """Send SIGTERM to processes, and SIGCONT, since a stopped process would not handle it."""
    for process in processes:
        send(process, signal.SIGTERM)
        send(process, signal.SIGCONT)


def without_trackers(processes: set[psutil.Process]) -> set[psutil.Process]:
    """All but multiprocessing's resource trackers, which clean up after others and then end."""
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
    """The name of a signal; real-time signals have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_at_parents_end(number: signal.Signals) -> None:
    """Make the kernel send this signal when the thread that started this process ends."""
    _prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


SEGMENT_PREFIX = "/dev/shm/nccl-"


def mapped(pids: Iterable[int]) -> set[str]:
    """Paths of NCCL's segments that these processes have mapped.

    psutil would read the far slower smaps.
    """
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                path = line.split(maxsplit=5)[-1]
                if path.startswith(SEGMENT_PREFIX) and not path.endswith(" (deleted)"):
                    found.add(path)
    return found


def remove(segments: Iterable[str]) -> None:
    """Remove the segments that still exist and that no process has mapped any more."""
    left = {path for path in segments if os.path.lexists(path)}
    if not left:
        return
    for path in left - mapped(psutil.pids()):
        with contextlib.suppress(OSError):  # it belongs to another user
            Path(path).unlink()
