"""Interrupts: they clean up and keep every finished trial."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class _State:
    """Interrupt state of this process."""

    holding: int = 0
    pending: bool = False


_state = _State()


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does.

    An ignored SIGHUP (nohup) or SIGINT (background jobs of a shell) stays ignored. Only the main thread gets signals;
    in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [signal.SIGTERM]
    wanted += [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay an interrupt until the end of this block, which must be short."""
    _state.holding += 1
    try:
        yield
    finally:
        _state.holding -= 1
        if not _state.holding and _state.pending:
            _state.pending = False
            raise KeyboardInterrupt


def _interrupt(signum: int, frame: Any) -> None:
    if _state.holding:
        _state.pending = True
        return
    raise KeyboardInterrupt
