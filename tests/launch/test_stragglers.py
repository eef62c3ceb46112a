"""Processes are told from others of the same number and from zombies; what signals wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from bench.launch import stragglers
from bench.launch.interrupt import held, terminate_as_interrupt
from tests.conftest import until


def test_a_number_that_is_another_process_now_is_not_that_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = stragglers.find(os.getpid())
    assert stragglers.alive(process)
    monkeypatch.setattr(
        process, "_ident", (os.getpid(), 0.0)
    )  # as if it had been made of an older one
    assert not stragglers.alive(process)
    stragglers.send(process, signal.SIGKILL)
    assert stragglers.find(2**22 + 1) is None


def test_a_zombie_has_ended_and_a_stopped_one_has_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    found = stragglers.find(process.pid)
    process.send_signal(signal.SIGSTOP)
    until(lambda: stragglers.is_stopped(found))
    assert stragglers.alive(found)
    process.kill()
    until(lambda: not stragglers.alive(found))
    assert found.status() == psutil.STATUS_ZOMBIE
    assert stragglers.kill(lambda: {found} if psutil.pid_exists(process.pid) else set()) == set(), (
        "its number is free"
    )
    process.wait()


def test_children_of_a_process_that_is_ending_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no environment any more, and its child none to be told by."""
    code = "import time; time.sleep(60)"
    parent = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {code!r}], "
        f"env={{}}).pid, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{parent}; {code}"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    child, environ = int(process.stdout.readline()), psutil.Process.environ

    def gone(each: psutil.Process) -> dict[str, str]:
        if each.pid == process.pid:
            raise psutil.NoSuchProcess(each.pid)
        return environ(each)

    monkeypatch.setattr(psutil.Process, "environ", gone)
    assert {process.pid, child} <= {found.pid for found in stragglers.family(os.getpid(), "")}
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


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
