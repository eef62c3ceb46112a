"""When a trial is ended: no rank gets on, time is up, logs grow without end, or a rank is gone; and what is dumped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.launch import dumps, watchdog
from bench.launch.watchdog import EndReason, Watch
from bench.measure import heartbeat
from bench.plan.cell import Status

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import ctypes, sys, time
from pathlib import Path
from bench.launch import dumps, stragglers
from bench.measure import heartbeat
import os
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
heartbeat.begin(folder, rank)
dumps.arm(folder, rank)
heartbeat.beat()

def wait_in_python():
    while True:
        time.sleep(60)

def wait_with_the_interpreter_locked():
    ctypes.PyDLL(None).sleep(60)

def get_on():
    while True:
        time.sleep(0.05)
        heartbeat.beat()

def leave():
    pass

globals()[sys.argv[3]]()
"""


class Ranks:
    """Processes that do as ranks do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *behaviours: str) -> None:
        for rank, behaviour in enumerate(behaviours):
            command = [sys.executable, "-c", RANK, str(self.folder), str(rank), behaviour]
            self.processes.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}))
        deadline = time.monotonic() + 120
        while not all((beat := heartbeat.read(self.folder, r)) and beat.count for r in range(len(behaviours))):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def watch(self, timeout_s: float = 60.0, inactivity_s: float = 0.0) -> Watch:
        return Watch(self.folder, len(self.processes), timeout_s, inactivity_s)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def until_verdict(watch: Watch, seconds: float = 60.0) -> EndReason | None:
    """What the watch says, looking as its owner does; None after some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := watch.look():
            return found
        time.sleep(watch.interval_s)
    return None


def test_ranks_that_do_not_get_on_hang(ranks: Ranks) -> None:
    ranks.start("get_on", "wait_in_python")
    watch = ranks.watch(inactivity_s=0.4)
    assert until_verdict(watch, 1.2) is None, "one that gets on is enough: the others may wait for it"
    ranks.processes[0].send_signal(signal.SIGSTOP)
    found = until_verdict(watch)
    assert found is not None and (found.status, found.dump) == (Status.HANG, True)
    assert found.reason.startswith("no rank got on for 0.4 s (rank 0 after ")
    assert "events, is stopped by a signal; rank 1 after 1 events); raise --inactivity" in found.reason


def test_ranks_that_handed_over_have_to_end(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LEAVING_S", 0.3)
    ranks.start("get_on", "get_on")
    (ranks.folder / "rank0.json").write_text("{}")
    watch = ranks.watch()
    assert until_verdict(watch, 0.8) is None
    (ranks.folder / "rank1.json").write_text("{}")
    found = until_verdict(watch)
    assert found is not None and "did not end within 0.3 s of their results" in found.reason


def test_every_rank_tells_where_it_is(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumps, "STACKS_S", 60.0)
    ranks.start("wait_in_python", "wait_with_the_interpreter_locked", "get_on")
    ranks.processes[2].send_signal(signal.SIGSTOP)
    watch = ranks.watch()
    watch.look()
    began = time.monotonic()
    watch.dump()
    assert time.monotonic() - began < dumps.STACKS_S
    for rank, function in enumerate(("wait_in_python", "wait_with_the_interpreter_locked", "get_on")):
        assert f"in {function}" in dumps.stacks_of(ranks.folder, rank).read_text()


def test_the_flight_recorder_is_asked_through_its_pipe(tmp_path: Path) -> None:
    """As NCCL's monitoring thread does: it reads a pipe of its own name, and writes a file beside it."""
    pipe, file = tmp_path / "flight-rank0.pipe", tmp_path / "flight-rank0"
    os.mkfifo(pipe)
    os.mkfifo(tmp_path / "flight-rank1.pipe")  # that of a rank that has ended: nobody reads it
    ready = threading.Event()

    def monitor() -> None:
        number = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        ready.set()
        for _ in range(200):
            try:
                if os.read(number, 128):
                    file.write_bytes(b"what torch writes")
                    break
            except BlockingIOError:
                pass
            time.sleep(0.02)
        os.close(number)

    thread = threading.Thread(target=monitor)
    thread.start()
    ready.wait()
    dumps.ask(tmp_path, {})
    thread.join()
    assert dumps.flights(tmp_path) == [file]
    assert [path.name for path in dumps.collect(tmp_path, tmp_path / "kept")] == ["flight-rank0"]
    assert (tmp_path / "kept.flight-rank0").read_bytes() == b"what torch writes"
