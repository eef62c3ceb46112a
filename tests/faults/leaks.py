"""What a run of the bench leaves on the machine, found by comparing before and after and by a mark.

Other programs start and end meanwhile, and nothing of theirs may count. A process belongs to the run if it has
inherited the mark in its environment or works in the run's folder. Shared memory is left behind if it is new and no
other program has it open.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil

MARK = "BENCH_TEST_TOKEN"
ENDING_S = 30.0
"""How long what a killed run started may take to end: on a busy machine, the import of torch alone takes seconds."""
SHARED = Path("/dev/shm")


class Leaks:
    """Everything that stands on the machine before a run; ``left`` is what the run added to it. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._mark = uuid.uuid4().hex
        # Short, since the fork server's socket lies there and the kernel allows 107 bytes for its path.
        self._temporary = Path(tempfile.mkdtemp(prefix="faults-"))
        self._shared = _shared()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes():  # a failed test must not spoil the next one
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """What marks a process and all its children."""
        # Torch's cache of compiled code is meant to stay.
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor")}
        return {MARK: self._mark, "TMPDIR": str(self._temporary), **cache}

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def left(self, within_s: float = ENDING_S) -> list[str]:
        """What is still there after so long, in words; empty as soon as there is nothing."""
        deadline = time.monotonic() + within_s
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _found(self) -> list[str]:
        ours = self.processes()
        pids = {process.pid for process in ours}
        found = [_spelled(process) for process in ours]
        found += [f"port {port} is open" for port in _ports(pids)]
        if new := {inode: name for inode, name in _shared().items() if inode not in self._shared}:
            found += [new[inode] for inode in new.keys() - _mapped_elsewhere(pids)]
        found += [f"{path.name} is locked" for path in self._locked()]
        return found + [f"temporary {path.name}" for path in sorted(self._temporary.iterdir())]

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                return False
            if process.environ().get(MARK) == self._mark:
                return True
            return Path(process.cwd()).is_relative_to(self._folder)
        return False

    def _locked(self) -> Iterator[Path]:
        """Files in the run's folder on which a process holds a lock."""
        table = Path("/proc/locks").read_text().splitlines()
        inodes = {
            int(part.rpartition(":")[2])
            for line in table
            for part in line.split()
            if part.count(":") == 2
        }
        for path in self._folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and path.stat().st_ino in inodes:
                    yield path


def _spelled(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
    return f"process {process.pid}"


def _shared() -> dict[int, str]:
    """Names of shared memory segments and semaphores of POSIX, by inode."""
    found = {}
    for path in SHARED.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                found[path.stat().st_ino] = str(path)
    return found


def _ports(pids: set[int]) -> list[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            sockets = psutil.Process(pid).net_connections("inet")
            found |= {
                connection.laddr.port
                for connection in sockets
                if connection.status == psutil.CONN_LISTEN
            }
    return sorted(found)


def _mapped_elsewhere(pids: set[int]) -> set[int]:
    """Inodes of the shared memory that other processes have mapped; glibc maps a semaphore under another name."""
    found = set()
    for pid in set(psutil.pids()) - pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {int(line.split()[4]) for line in lines if f" {SHARED}/" in line}
    return found
