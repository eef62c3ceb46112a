"""What the stub counts in this process, and from where the host waits for the device."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class Kind(IntEnum):
    """As in counters.h."""

    KERNEL = 0
    LIBRARY = 1
    COPY = 2
    COLLECTIVE = 3
    STREAM_SYNC = 4
    DEVICE_SYNC = 5
    EVENT_SYNC = 6
    BLOCKING_COPY = 7
    BLOCKING_FREE = 8


WAITING = tuple(kind for kind in Kind if kind >= Kind.STREAM_SYNC)
"""Kinds by which the host waits."""
NATIVE_FRAMES = 40
PACKAGES = Path(sysconfig.get_path("purelib"))


@dataclass(frozen=True, slots=True)
class Wait:
    """One time that the host waited for the device."""

    kind: Kind
    python: tuple[str, ...]
    """``file:line function``, innermost first; of the main thread where the waiting one runs no Python."""
    native: tuple[str, ...]
    """Mangled symbols of C++, innermost first; only those that libraries export."""


class Counters:
    """The stub's counters; ``waits`` grows from ``watch`` on."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(Path(os.environ["CUDA_STUB"]) / "lib" / "libcuda_stub.so"))
        self._counts = (ctypes.c_long * len(Kind)).in_dll(self._library, "fake_counts")
        self._c = ctypes.CDLL(None)
        self._c.backtrace_symbols.restype = ctypes.POINTER(ctypes.c_char_p)
        self.waits: list[Wait] = []

    def now(self) -> dict[Kind, int]:
        return {kind: self._counts[kind] for kind in Kind}

    def watch(self) -> None:
        """Note every wait from now on."""
        self._hook = ctypes.CFUNCTYPE(None, ctypes.c_int)(
            self._see
        )  # kept, since C holds its address
        self._library.fake_set_hook(self._hook)

    def _see(self, kind: int) -> None:
        frames = stack(sys._getframe(1)) if sys._getframe().f_back else ()
        if not frames:
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            frames = stack(main)
        self.waits.append(Wait(Kind(kind), frames, self._native()))

    def _native(self) -> tuple[str, ...]:
        addresses = (ctypes.c_void_p * NATIVE_FRAMES)()
        number = self._c.backtrace(addresses, NATIVE_FRAMES)
        lines = self._c.backtrace_symbols(addresses, number)
        # library(symbol+offset) [address]
        found = [
            lines[i].decode(errors="replace").partition("(")[2].partition("+")[0]
            for i in range(number)
        ]
        self._c.free(lines)
        return tuple(name for name in found if name.startswith("_Z"))


def stack(frame: object) -> tuple[str, ...]:
    """``file:line function`` of a frame and its callers, innermost first; files as they are imported."""
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)  # type: ignore[arg-type]
    return tuple(f"{_imported(frame.filename)}:{frame.lineno} {frame.name}" for frame in summary)


def _imported(name: str) -> str:
    """A file without the folder on the path that it was imported from."""
    for root in sorted((*sys.path, str(PACKAGES)), key=len, reverse=True):
        if root and name.startswith(f"{root}/"):
            return name.removeprefix(f"{root}/")
    return name


@functools.cache
def demangled(names: tuple[str, ...]) -> tuple[str, ...]:
    """C++ as it was written; c++filt comes with the compiler."""
    if not names:
        return ()
    return tuple(
        subprocess.run(
            ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
        ).stdout.split("\n")
    )
