"""Where every rank is when a trial is ended because it does not end: Python's stacks, and NCCL's Flight Recorder.

A rank arms itself when it begins. Both dumps are made by C code inside the rank, in a signal handler and in NCCL's
monitoring thread, so they also tell of a rank that never gets back to its interpreter.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import psutil

from bench.launch.stragglers import alive, send

SIGNAL = signal.SIGUSR2
"""Asks a rank for its stacks."""
STACKS_S = 2.0
"""How long that may take."""
FLIGHT_S = 5.0
"""How long the Flight Recorder may take: NCCL's monitoring thread looks once a second."""
FLIGHT = "flight-rank"
"""Beginning of the names of its files, and of the pipes that ask for them."""
BUFFER = "2000"
"""Collectives that it keeps: torch's own default where it is on by default."""

_files: list[IO[str]] = []
"""Open for as long as the rank lives."""


def arm(folder: Path, rank: int) -> None:
    """Let this rank write its stacks when it is asked, and to its log when it crashes."""
    faulthandler.enable()
    _files.append(stacks_of(folder, rank).open("w"))
    faulthandler.register(SIGNAL, file=_files[-1], all_threads=True)


def arm_flight_recorder(folder: Path) -> None:
    """Let NCCL's process group write its last collectives when it is asked; before the group is made.

    Under the names that torch 2.11 and later read: those with FR, and the older ones that its pipe goes by.
    """
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.setdefault(name, BUFFER)
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
        os.environ[name] = str(folder / FLIGHT)


def stacks_of(folder: Path, rank: int) -> Path:
    """The file of a rank's stacks in the folder of its trial."""
    return folder / f"rank{rank}.stacks"


def flights(folder: Path) -> list[Path]:
    """The Flight Recorder's files in the folder of a trial, which are torch's (pickles): to be kept, never read."""
    return sorted(path for path in folder.glob(f"{FLIGHT}*") if path.suffix != ".pipe")


def collect(folder: Path, stem: Path) -> list[Path]:
    """Copy the dumps of a trial to files whose names begin with ``stem`` and go on as theirs; which there were."""
    found = [path for path in sorted(folder.glob("rank*.stacks")) if _size(path)] + flights(folder)
    for path in found:
        shutil.copyfile(path, f"{stem}.{path.name}")
    return found


def ask(folder: Path, ranks: Mapping[int, psutil.Process | None]) -> None:
    """Have the ranks write their dumps; returns when they have, or will not.

    A stopped rank writes when it is continued, so it is: its group is about to end.
    """
    pipes = [path for path in folder.glob(f"{FLIGHT}*.pipe") if _poke(path)]
    asked = []
    for rank, process in ranks.items():
        if not alive(process):
            continue
        send(process, SIGNAL)
        send(process, signal.SIGCONT)
        asked.append(stacks_of(folder, rank))
    _wait(lambda: [path for path in asked if _size(path)], len(asked), STACKS_S)
    if pipes:
        _wait(lambda: [path for path in flights(folder) if _size(path)], len(pipes), FLIGHT_S)


def _poke(pipe: Path) -> bool:
    """Write into a pipe; whether somebody reads it."""
    try:
        number = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in {errno.ENXIO, errno.ENOENT}:
            return False
        raise
    with contextlib.suppress(OSError):
        os.write(number, b"1")
    os.close(number)
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _wait(written: Callable[[], list[Path]], number: int, limit_s: float) -> None:
    """Wait until so many files are there and none of them grows any more."""
    deadline = time.monotonic() + limit_s
    before: list[int] = []
    while time.monotonic() < deadline:
        sizes = [_size(path) for path in written()]
        if len(sizes) >= number and sizes == before:
            return
        before = sizes
        time.sleep(0.1)
