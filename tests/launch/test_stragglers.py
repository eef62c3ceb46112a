"""Processes are found wherever they went, and ended whatever they do against it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bench.launch import stragglers

MARK = "a-mark-for-the-tests"
FAMILY = """
import os, signal, subprocess, sys, time

def child(name, work):
    if os.fork() == 0:
        work()
        open(name, "w").write(str(os.getpid()))
        while True:
            time.sleep(60)

def ignore():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

def orphan():
    if os.fork() != 0:
        os._exit(0)
    os.setsid()

child("plain", lambda: None)
child("ignores", ignore)
child("session", os.setsid)
child("orphan", orphan)
subprocess.Popen([sys.executable, "-c", "import os, time; open('bare', 'w').write(str(os.getpid())); time.sleep(600)"],
                 env={}, start_new_session=True)
time.sleep(600)
"""
NAMES = ("plain", "ignores", "session", "orphan", "bare")


def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.02)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with children of every kind, whose pids are in files of their names."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FAMILY)],
        cwd=tmp_path,
        env=os.environ | {stragglers.MARK: MARK},
        start_new_session=True,
    )
    wait_for(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in NAMES))
    yield process
    for pid in [process.pid, *(int((tmp_path / name).read_text()) for name in NAMES)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def pids(folder: Path) -> dict[str, int]:
    return {name: int((folder / name).read_text()) for name in NAMES}


def family(launcher: subprocess.Popen[bytes]) -> set[int]:
    return {process.pid for process in stragglers.family(launcher.pid, MARK)}


def test_all_that_came_from_a_process_are_found(launcher: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert family(launcher) == {launcher.pid, *pids(tmp_path).values()}


def test_those_whose_parent_was_killed_are_found_by_their_mark(
    launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    launcher.kill()
    launcher.wait()
    left = {name: pid for name, pid in pids(tmp_path).items() if name != "bare"}
    assert family(launcher) == set(left.values())
    os.kill(left["plain"], signal.SIGSTOP)
    assert stragglers.kill(lambda: stragglers.family(launcher.pid, MARK)) == set()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in left.values())


def test_a_number_that_is_another_process_now_is_not_that_process(monkeypatch: pytest.MonkeyPatch) -> None:
    own = stragglers.find(os.getpid())
    assert stragglers.alive(own)
    monkeypatch.setattr(own, "_ident", (os.getpid(), 0.0))  # as if it had been made of an older one
    assert not stragglers.alive(own)
    stragglers.send(own, signal.SIGKILL)
    assert stragglers.find(2**22 + 1) is None


def test_a_zombie_has_ended_and_a_stopped_one_has_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    found = stragglers.find(process.pid)
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: stragglers.is_stopped(found))
    assert stragglers.alive(found)
    process.kill()
    wait_for(lambda: not stragglers.alive(found))
    assert found.status() == psutil.STATUS_ZOMBIE
    assert stragglers.kill(lambda: {found} if psutil.pid_exists(process.pid) else set()) == set(), "its number is free"
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_gets_a_signal_at_its_parents_end(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
    import os, signal, time
    from bench.launch import stragglers
    child = os.fork()
    if child == 0:
        stragglers.signal_at_parents_end(signal.{number.name})
        open("pid", "w").write(str(os.getpid()))
        time.sleep(60)
    while not (os.path.exists("pid") and open("pid").read()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env=environment)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


MAP = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    kept = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
time.sleep(600)
"""


def test_segments_are_removed_when_their_last_process_has_ended() -> None:
    """NCCL's shared memory, as ranks that are killed leave it."""
    segment = Path(f"{stragglers.SEGMENT_PREFIX}test-{os.getpid()}")
    segment.write_bytes(bytes(4096))
    command = [sys.executable, "-c", MAP, str(segment)]
    with contextlib.ExitStack() as stack:
        stack.callback(segment.unlink, missing_ok=True)
        own, peer = (stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)) for _ in range(2))
        for process in (own, peer):
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == b"mapped\n"
        found = stragglers.mapped([own.pid])
        assert found == {str(segment)}
        own.kill()
        own.wait()
        stragglers.remove(found)
        assert segment.exists(), "its peer still has it mapped"
        peer.kill()
        peer.wait()
        stragglers.remove(found)
        assert not segment.exists()
