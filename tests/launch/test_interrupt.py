"""Signals: which end a command, and what they wait for."""

from __future__ import annotations

import os
import signal
import time

import pytest

from bench.launch.interrupt import held, terminate_as_interrupt

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def kill_and_wait(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(5)  # the signal is taken before this ends


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_an_interrupt(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        kill_and_wait(number)
    assert [signal.getsignal(each) for each in SIGNALS] == before


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
