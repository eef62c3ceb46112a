"""Runs a command as a shell does: it gets the terminal, and the signals sent to this process.

The command has a process group of its own, which is the foreground of the terminal if this process
was. So a signal of the terminal reaches it without us, and one that is sent to this process, or to
the group that it would have been in, reaches it once. What is left of its group when a signal has
ended the command gets that signal, too, since it would have been an orphan.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

PASSED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)
"""Signals that are passed on."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What is left of the group gets these when the command has ended."""
OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH)
POLL_SECONDS = 0.05


def run_in_foreground(
    command: Sequence[str], environment: Mapping[str, str], output: IO[str] | None
) -> int:
    """Its exit status, negative for a signal. Raises OSError if it cannot be started."""
    received: list[int] = []
    waiting: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        received.append(number)
        for process in waiting:
            _send(process.pid, number)

    before = {}
    for passed in PASSED:
        before[passed] = signal.signal(passed, pass_on)
    try:
        with _terminal() as terminal:
            process = subprocess.Popen(command, env=environment, stdout=output, process_group=0)
            waiting.append(process)
            _give(terminal, process.pid)
            for number in received:
                _send(process.pid, number)
            status = _wait(process, terminal)
            waiting.clear()
            ending = list(filter(ENDING.__contains__, received))
            if ending:
                _end_group(process.pid, ending[-1])
            return status
    finally:
        for passed, handler in before.items():
            signal.signal(passed, handler)


def _wait(process: subprocess.Popen[bytes], terminal: int | None) -> int:
    """Wait as long as it takes.

    Where the terminal stops the command, this process stops until it goes on.
    """
    while True:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode
        if terminal is not None:
            _give(terminal, os.getpgrp())
            os.kill(os.getpid(), signal.SIGSTOP)
            _give(terminal, process.pid)


def _end_group(group: int, number: int) -> None:
    """Send a signal to what is left of a group, and wait until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
        while True:
            os.killpg(group, 0)
            time.sleep(POLL_SECONDS)


def _send(process: int, number: int) -> None:
    """To the command, or to its whole group where a terminal would.

    A shell waits for its child before it ends.
    """
    with contextlib.suppress(ProcessLookupError):
        if number in OF_TERMINALS:
            os.killpg(process, number)
        else:
            os.kill(process, number)


@contextlib.contextmanager
def _terminal() -> Iterator[int | None]:
    """The terminal whose foreground this process is; None if it is in no foreground.

    It gets it back at the end.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        if os.tcgetpgrp(terminal) != os.getpgrp():
            yield None
            return
        yield terminal
        _give(terminal, os.getpgrp())
    finally:
        os.close(terminal)


def _give(terminal: int | None, group: int) -> None:
    """Make a group the foreground. It goes on if it had to wait for that."""
    if terminal is None:
        return
    # Who is in the background is stopped by the terminal where it asks for the foreground.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.tcsetpgrp(terminal, group)
    signal.signal(signal.SIGTTOU, before)
    if group != os.getpgrp():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGCONT)
