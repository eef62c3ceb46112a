"""Processes are told from others of the same number, and from zombies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from bench.launch import stragglers
from tests.conftest import until


def test_a_number_that_is_another_process_now_is_not_that_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process = stragglers.find(os.getpid())
    assert stragglers.alive(process)
    monkeypatch.setattr(process, "_ident", (os.getpid(), 0.0))  # as if it had been made of an older one
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
    assert stragglers.kill(lambda: {found} if psutil.pid_exists(process.pid) else set()) == set(), "its number is free"
    process.wait()
