"""What else ran on the machine: arithmetic on fake files of the kernel, and one look at the real ones."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from bench.measure import host
from bench.measure.host import HostLoad, merge

TICKS = os.sysconf("SC_CLK_TCK")


class FakeProc:
    """A ``/proc`` of two CPUs and this process, and the two clocks that go with it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.now, self.own = 100.0, 7.0
        monkeypatch.setattr(host.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(host.time, "process_time", lambda: self.own)
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: {0, 1})

    def cpus(self, *seconds: list[float]) -> None:
        """The lines of the CPUs: user nice system idle iowait irq softirq steal guest guest_nice, in seconds."""
        rows = [[round(second * TICKS) for second in row] for row in seconds]
        total = [sum(column) for column in zip(*rows, strict=True)]
        lines = [f"cpu  {' '.join(map(str, total))}"]
        lines += [f"cpu{number} {' '.join(map(str, row))}" for number, row in enumerate(rows)]
        (self.folder / "stat").write_text("\n".join([*lines, "intr 5 0 0", "ctxt 9"]) + "\n")

    def thread(self, number: int, ran: float, waited: float) -> None:
        task = self.folder / "self" / "task" / str(number)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{round(ran * 1e9)} {round(waited * 1e9)} 12\n")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    return FakeProc(tmp_path, monkeypatch)


def test_busy_stolen_own_and_waited(proc: FakeProc) -> None:
    proc.cpus([10, 1, 5, 90, 0, 0, 0, 2, 0, 0], [20, 0, 5, 80, 0, 0, 0, 0, 0, 0])
    proc.thread(41, ran=6.0, waited=0.5)
    proc.thread(42, ran=1.0, waited=0.25)
    with HostLoad(proc.folder) as load:
        assert load.result is None
        proc.now, proc.own = 110.0, 15.0
        # In ten seconds: 8 s of user, 1 of nice, 2 of system and 4 stolen; the others are not work of a process.
        proc.cpus([16, 2, 6, 92, 3, 1, 1, 6, 5, 1], [22, 0, 6, 88, 0, 0, 0, 0, 0, 0])
        proc.thread(41, ran=12.0, waited=1.0)
        proc.thread(43, ran=2.0, waited=0.75)  # new; it has waited since it was made
    assert load.result is not None
    assert json.loads(json.dumps(load.result)) == load.result
    assert load.result.pop("cpus") == [0, 1]
    assert load.result == pytest.approx(
        {
            "wall_s": 10.0,
            "busy_cores": 1.1,
            "stolen_cores": 0.4,
            "own_cores": 0.8,
            "own_cpu_s": 8.0,
            "waited_s": 0.5 + 0.75,
        }
    )


def test_only_the_cpus_that_may_be_used_are_counted(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = [0.0] * 10
    for allowed, cpus, busy in (({1}, [1], 0.2), ({64, 65}, [0, 1], 1.0)):  # the others: a container's own numbers
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        proc.now = 100.0
        proc.cpus(zeros, zeros)
        with HostLoad(proc.folder) as load:
            proc.now = 110.0
            proc.cpus([8.0, *zeros[1:]], [2.0, *zeros[1:]])
        assert load.result is not None
        assert load.result["cpus"] == cpus and load.result["busy_cores"] == pytest.approx(busy)


def _rank(**changes: Any) -> dict[str, Any]:
    return {
        "wall_s": 10.0,
        "cpus": [0, 1, 2, 3],
        "busy_cores": 3.0,
        "stolen_cores": 0.5,
        "own_cores": 0.9,
        "own_cpu_s": 9.0,
        "waited_s": 1.0,
    } | changes


def test_ranks_on_the_same_cpus_saw_the_same_load() -> None:
    merged = merge([_rank(), _rank(busy_cores=3.2, own_cores=1.0, own_cpu_s=10.0, waited_s=2.0)])
    assert merged == pytest.approx(
        {
            "num_cpus": 4,
            "own_cores": 1.9,
            "foreign_cores": 3.1 - 1.9,
            "stolen_cores": 0.5,
            "waited_share": 3.0 / 22.0,
        }
    )


def test_the_real_files_see_this_process() -> None:
    with HostLoad() as load:
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass
    assert load.result is not None
    assert load.result["own_cpu_s"] >= 0.3
    assert 0.0 < load.result["own_cores"] < 1.5
    assert load.result["busy_cores"] > 0.0
    assert set(load.result["cpus"]) <= set(range(os.cpu_count() or 1))
    merged = merge([load.result])
    assert merged is not None and merged["foreign_cores"] <= merged["num_cpus"]
    assert merged["waited_share"] is None or 0.0 <= merged["waited_share"] <= 1.0
