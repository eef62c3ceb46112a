"""Dumps of a trial that hangs, made before it is killed: Python stacks, and NCCL's Flight Recorder.

A rank sets both up when it starts. C code inside the rank makes the dumps, in a signal handler and
in NCCL's monitoring thread, so they work even if the rank never returns to its interpreter.
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

from bench.files import portable, replacing, write
from bench.launch.stragglers import alive, send

SIGNAL = signal.SIGUSR2
"""Makes a rank write its stacks."""
STACKS_S = 2.0
"""Time limit for the stacks."""
FLIGHT_S = 5.0
"""Time limit for the Flight Recorder: NCCL's monitoring thread polls once a second."""
FLIGHT = "flight-rank"
"""Prefix of the names of its files and of the pipes that trigger it."""
BUFFER = "2000"
"""Number of collectives that it keeps; torch's default where it is on by default."""

_files: list[IO[str]] = []
"""Files of stacks, open for as long as the rank lives."""


def arm(folder: Path, rank: int) -> None:
    """Make this rank write its stacks to a file on SIGNAL, and to its log when it crashes."""
    faulthandler.enable()
    _files.append(stacks_of(folder, rank).open("w"))
    faulthandler.register(SIGNAL, file=_files[-1], all_threads=True)


def arm_flight_recorder(folder: Path) -> None:
    """Make NCCL's process group write its last collectives on request.

    Call it before the group is created. Sets the variables that torch 2.11 and later read: those
    with FR, and the older names, which its pipe still uses.
    """
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.setdefault(name, BUFFER)
    for name in (
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    ):
        os.environ[name] = str(folder / FLIGHT)


def stacks_of(folder: Path, rank: int) -> Path:
    """The file for the stacks of a rank in the folder of its trial."""
    return folder / f"rank{rank}.stacks"


def flights(folder: Path) -> list[Path]:
    """The Flight Recorder's files in the folder of a trial: pickles, to be kept and never read."""
    return sorted(path for path in folder.glob(f"{FLIGHT}*") if path.suffix != ".pipe")


def collect(folder: Path, stem: Path) -> list[Path]:
    """Copy the dumps of a trial to ``<stem>.<name>`` and return their original paths."""
    stacks = [path for path in sorted(folder.glob("rank*.stacks")) if size(path)]
    for path in stacks:
        write(Path(f"{stem}.{path.name}"), portable(path.read_text(errors="replace")))
    for path in flights(folder):
        with replacing(Path(f"{stem}.{path.name}")) as draft:
            shutil.copyfile(path, draft)
    return stacks + flights(folder)


def ask(folder: Path, ranks: Mapping[int, psutil.Process | None]) -> None:
    """Make the ranks write their dumps; returns when they are written, or after the time limits.

    A stopped rank is continued, since it cannot write otherwise; its group is about to be ended
    anyway.
    """
    pipes = [path for path in folder.glob(f"{FLIGHT}*.pipe") if _poke(path)]
    asked = []
    for rank, process in ranks.items():
        if not alive(process):
            continue
        send(process, SIGNAL)
        send(process, signal.SIGCONT)
        asked.append(stacks_of(folder, rank))
    _wait(lambda: [path for path in asked if size(path)], len(asked), STACKS_S)
    if pipes:
        _wait(lambda: [path for path in flights(folder) if size(path)], len(pipes), FLIGHT_S)


def _poke(pipe: Path) -> bool:
    """Write to a pipe; return whether a process reads it."""
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


def size(path: Path) -> int:
    """The size of a file in bytes; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _wait(written: Callable[[], list[Path]], number: int, limit_s: float) -> None:
    """Wait until ``number`` files exist and none of them grows any more."""
    deadline = time.monotonic() + limit_s
    before: list[int] = []
    while time.monotonic() < deadline:
        sizes = [size(path) for path in written()]
        if len(sizes) >= number and sizes == before:
            return
        before = sizes
        time.sleep(0.1)
