"""Ending early, with everything cleaned up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any, NoReturn


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a run as Ctrl-C does, with everything cleaned up."""

    def interrupt(signum: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    # Under nohup SIGHUP is ignored, and stays so.
    wanted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
