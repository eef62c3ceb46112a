"""Interrupts: they clean up and keep every finished trial."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class _State:
    holding = 0
    pending = False


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does.

    An ignored SIGHUP (nohup) or SIGINT (background jobs of a shell) stays ignored. Only the main
    thread gets signals; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _interrupt)}
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay an interrupt until the end of this block, which must be short."""
    _State.holding += 1
    try:
        yield
    finally:
        _State.holding -= 1
        if not _State.holding and _State.pending:
            _State.pending = False
            raise KeyboardInterrupt


def _interrupt(signum: int, frame: FrameType | None) -> None:
    if _State.holding:
        _State.pending = True
        return
    raise KeyboardInterrupt
