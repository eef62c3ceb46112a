"""Signals: which end a command, and what they wait for."""

from __future__ import annotations

import os
import signal

import pytest

from bench.launch.interrupt import held, terminate_as_interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_is_ignored_stays_so(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with terminate_as_interrupt():
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_what_is_held_is_finished_first() -> None:
    done = []

    def finish() -> None:
        with held():
            with held():
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        finish()
    assert done == ["inner", "outer"]
    with held():  # nothing is left over
        done.append("again")
