"""When a trial is ended: no rank gets on, time is up, logs grow without end, or a rank is gone; and what is dumped."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.launch import dumps, watchdog
from bench.launch.outcome import Ending
from bench.launch.watchdog import Watch
from bench.measure import heartbeat
from bench.plan.cell import Status
from tests.conftest import ROOT, until

RANK = """
import ctypes, sys, time
from pathlib import Path
from bench.launch import dumps, stragglers
from bench.measure import heartbeat
import os
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
heartbeat.begin(folder, rank)
dumps.arm(folder, rank)

def wait_in_python():
    heartbeat.beat()
    while True:
        time.sleep(60)

def wait_with_the_interpreter_locked():
    heartbeat.beat()
    ctypes.PyDLL(None).sleep(60)

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
            self.processes.append(
                subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
            )
        until(self._have_begun, seconds=60)

    def _have_begun(self) -> bool:
        beats = [heartbeat.read(self.folder, rank) for rank in range(len(self.processes))]
        return all(beat is not None and beat.count for beat in beats)

    def watch(
        self, timeout_s: float = 3000.0, inactivity_s: float = 0.0
    ) -> Callable[[], Ending | None]:
        """Looks at the ranks, as those of two nodes."""
        numbers = range(len(self.processes))
        nodes = [watchdog.Ranks(self.folder, numbers[:1]), watchdog.Ranks(self.folder, numbers[1:])]
        watch = Watch([f"rank {rank}" for rank in numbers], timeout_s, inactivity_s)
        return lambda: watch.look([node.look() for node in nodes])


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The watch's clock; ``now`` is set by the test."""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_ranks_that_do_not_get_on_hang(ranks: Ranks, clock: SimpleNamespace) -> None:
    ranks.start("wait_in_python", "wait_in_python")
    look = ranks.watch(timeout_s=600.0, inactivity_s=10.0)
    assert look() is None
    ranks.processes[0].send_signal(signal.SIGSTOP)
    os.waitpid(ranks.processes[0].pid, os.WUNTRACED)
    clock.now += 9
    with heartbeat.path_of(ranks.folder, 1).open("r+b") as file:
        file.write(struct.pack("=2Q", ranks.processes[1].pid, 2))
    assert look() is None
    clock.now += 9
    assert look() is None, "one that gets on is enough: the others may wait for it"
    clock.now += 1
    found = look()
    assert found is not None and (found.status, found.dump) == (Status.HANG, True)
    told = re.findall(r"rank (\d) after (\d) events(, is stopped by a signal)?", found.failure)
    assert told == [("0", "1", ", is stopped by a signal"), ("1", "2", "")]
    assert "for 10 s" in found.failure and "--inactivity" in found.failure
    clock.now = 700.0
    late = look()
    assert (
        late is not None
        and late.status is Status.TIMEOUT
        and late.failure.startswith("not finished after 600 s")
    )


def test_ranks_that_handed_over_have_to_end(ranks: Ranks, clock: SimpleNamespace) -> None:
    ranks.start("wait_in_python", "wait_in_python")
    look = ranks.watch(timeout_s=600.0)
    for rank in range(2):
        (ranks.folder / f"rank{rank}.json").write_text("{}")
        assert look() is None
        clock.now += watchdog.LEAVING_S
    found = look()
    assert found is not None and "did not end within 30 s of their results" in found.failure


def test_every_rank_tells_where_it_is(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dumps, "STACKS_S", 3000.0)
    ranks.start("wait_in_python", "wait_with_the_interpreter_locked", "wait_in_python")
    ranks.processes[2].send_signal(signal.SIGSTOP)
    seen = watchdog.Ranks(tmp_path, range(3))
    seen.look()
    seen.dump()
    for rank, function in enumerate(
        ("wait_in_python", "wait_with_the_interpreter_locked", "wait_in_python")
    ):
        assert f"in {function}" in dumps.stacks_of(ranks.folder, rank).read_text()


def test_the_flight_recorder_is_asked_through_its_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's monitoring thread does: it reads a pipe of its own name, and writes a file beside it."""
    monkeypatch.setattr(dumps, "FLIGHT_S", 3000.0)
    pipe, file = tmp_path / "flight-rank0.pipe", tmp_path / "flight-rank0"
    os.mkfifo(pipe)
    os.mkfifo(tmp_path / "flight-rank1.pipe")  # that of a rank that has ended: nobody reads it
    ready = threading.Event()

    def monitor() -> None:
        number = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        ready.set()
        while True:
            try:
                if os.read(number, 128):
                    file.write_bytes(b"what torch writes")
                    break
            except BlockingIOError:
                pass
            time.sleep(0.02)
        os.close(number)

    thread = threading.Thread(target=monitor, daemon=True)
    thread.start()
    assert ready.wait(60)
    dumps.ask(tmp_path, {})
    thread.join(60)
    assert dumps.flights(tmp_path) == [file]
    assert [path.name for path in dumps.collect(tmp_path, tmp_path / "kept")] == ["flight-rank0"]
    assert (tmp_path / "kept.flight-rank0").read_bytes() == b"what torch writes"
