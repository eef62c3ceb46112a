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
        self.now, self.cpu = 100.0, 7.0
        monkeypatch.setattr(host.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(host.time, "process_time", lambda: self.cpu)
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: {0, 1})

    def cpus(self, *seconds: list[float]) -> None:
        """The lines of the CPUs: user nice system idle iowait irq softirq steal guest guest_nice, in seconds."""
        rows = [[round(second * TICKS) for second in row] for row in seconds]
        total = [sum(column) for column in zip(*rows, strict=True)]
        lines = [f"cpu  {' '.join(map(str, total))}"]
        lines += [f"cpu{number} {' '.join(map(str, row))}" for number, row in enumerate(rows)]
        (self.folder / "stat").write_text("\n".join([*lines, "intr 5 0 0", "ctxt 9"]) + "\n")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    return FakeProc(tmp_path, monkeypatch)


def test_busy_stolen_and_own(proc: FakeProc) -> None:
    proc.cpus([10, 1, 5, 90, 0, 0, 0, 2, 0, 0], [20, 0, 5, 80, 0, 0, 0, 0, 0, 0])
    with HostLoad(proc.folder) as load:
        assert load.result is None
        proc.now, proc.cpu = 110.0, 15.0
        # In ten seconds: 8 s of user, 1 of nice, 2 of system and 4 stolen; the others are not work of a process.
        proc.cpus([16, 2, 6, 92, 3, 1, 1, 6, 5, 1], [22, 0, 6, 88, 0, 0, 0, 0, 0, 0])
    assert load.result is not None
    assert json.loads(json.dumps(load.result)) == load.result
    assert (load.result.pop("cpus"), load.result.pop("kernel")) == ([0, 1], "")
    assert load.result == pytest.approx(
        {"wall_s": 10.0, "busy_cores": 1.1, "stolen_cores": 0.4, "own_cores": 0.8}
    )


def test_only_the_cpus_that_may_be_used_are_counted(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = [0.0] * 10
    for allowed, cpus, busy in (
        ({1}, [1], 0.2),
        ({64, 65}, [0, 1], 1.0),
    ):  # the others: a container's own numbers
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
    } | changes


def test_ranks_on_the_same_cpus_saw_the_same_load() -> None:
    merged = merge([_rank(), _rank(busy_cores=3.2, own_cores=1.0)])
    assert merged == pytest.approx(
        {"num_cpus": 4, "own_cores": 1.9, "foreign_cores": 3.1 - 1.9, "stolen_cores": 0.5}
    )


def test_nodes_are_told_apart_by_their_kernels() -> None:
    """Two containers on one machine saw the same load; two machines saw one each, on CPUs of the same numbers."""
    shared = merge([_rank(kernel="a"), _rank(kernel="a")])
    apart = merge([_rank(kernel="a"), _rank(kernel="b")])
    assert (
        shared is not None
        and shared["num_cpus"] == 4
        and shared["foreign_cores"] == pytest.approx(3.0 - 1.8)
    )
    assert (
        apart is not None
        and apart["num_cpus"] == 8
        and apart["foreign_cores"] == pytest.approx(6.0 - 1.8)
    )


def test_the_real_files_see_this_process() -> None:
    with HostLoad() as load:
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass
    assert load.result is not None
    assert 0.0 < load.result["own_cores"] < 1.5
    assert load.result["busy_cores"] > 0.0
    assert set(load.result["cpus"]) <= set(range(os.cpu_count() or 1))
    merged = merge([load.result])
    assert merged is not None and merged["foreign_cores"] <= merged["num_cpus"]
