"""The rate of matrix products: which are measured, what is made of bad answers, and a real process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.launch.launcher import Launcher
from bench.launch.outcome import Outcome
from bench.measure import taps
from bench.plan.cell import Device, Precision, Status
from bench.run import links, machine, matmul
from bench.run.links import TimedCollective
from bench.run.matmul import MatmulTask, matmul_rate, measure, summary, tasks
from tests.factories import make_cell

CPU = torch.device("cpu")


def test_a_rate_is_flop_over_the_median_second(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        marks = 0

        def mark(self) -> float:
            Clock.marks += 1
            return 0.0

        def intervals(self, marks: list[float]) -> list[float]:
            assert len(marks) == matmul.PRODUCTS["cpu"] + 1
            return [9.0, 0.5, 0.25, 0.5, 0.5]

    monkeypatch.setitem(matmul.SIZE, "cpu", 10)
    monkeypatch.setattr(taps, "clock_for", lambda device: Clock())
    rate, capacity = matmul_rate(CPU, torch.float32)
    assert rate == 2 * 10**3 / 0.5
    assert capacity > rate, (
        "these products took less CPU time than the seconds that this clock tells"
    )


def test_there_is_a_task_for_each_number_of_ranks(tmp_path: Path) -> None:
    cells = [
        make_cell(),
        make_cell(backend="fsdp2-eager", precision=Precision.BF16),
        make_cell(accumulate=2),
        make_cell(world_size=4),
        make_cell().reference(),
        make_cell(world_size=64, virtual=True),
        make_cell(world_size=8, device=Device.CUDA, shared_gpu=True),
    ]
    two, four = tasks(cells, 0, tmp_path)
    assert (two.num_nodes, four.num_nodes) == (1, 1)
    spread = tasks([make_cell(world_size=4, ranks_per_node=2)], 0, tmp_path)
    assert [(task.world_size, task.num_nodes, task.threads) for task in spread] == [
        (4, 2, machine.threads_per_rank(2)),
        (2, 1, machine.threads_per_rank(2)),
    ]
    assert (two.world_size, two.precisions, two.device) == (
        2,
        (Precision.FP32, Precision.BF16),
        Device.CPU,
    )
    assert (four.world_size, four.precisions) == (4, (Precision.FP32,))
    assert (two.threads, four.threads) == (machine.threads_per_rank(2), machine.threads_per_rank(4))
    assert tasks([make_cell()], 3, tmp_path)[0].threads == 3
    assert two.folder != four.folder
    assert MatmulTask.from_json(two.to_json()) == two
    assert tasks([make_cell().reference()], 0, tmp_path) == []


class Answers:
    """Takes a launcher's place."""

    def __init__(self, *outcomes: Outcome) -> None:
        self._outcomes = list(outcomes)

    def run(self, task: Any, timeout_s: float) -> Outcome:
        assert timeout_s == matmul.TIMEOUT_S
        return self._outcomes.pop(0)


def test_a_failure_leaves_its_reason(tmp_path: Path) -> None:
    outcome = Outcome(status=Status.OOM, reason="rank 0: out of memory", ranks=[], wall_s=1.0)
    (entry,) = measure([make_cell(world_size=1)], 1, tmp_path, Answers(outcome))
    assert entry.flops_per_s == {}
    (line,) = summary([entry])
    assert line.startswith("matrix products on 1 rank: not known")
    assert line.endswith(": rank 0: out of memory")


def test_what_takes_too_long_names_no_option(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is fixed: ``--timeout`` is that of trials."""
    monkeypatch.setattr(matmul, "TIMEOUT_S", 0.2)
    (entry,) = measure([make_cell()], 1, tmp_path, launcher)
    assert entry.reason.startswith("not finished after 0.2 s") and "--" not in entry.reason


def test_ranks_of_a_real_process_group_are_timed(tmp_path: Path, launcher: Launcher) -> None:
    cells = [make_cell(), make_cell(precision=Precision.BF16)]
    (entry,) = measure(cells, 1, tmp_path, launcher)
    assert entry.reason == ""
    assert entry.flops_per_s.keys() == {"fp32", "bf16"}
    assert all(len(rates) == 2 and min(rates) > 1e8 for rates in entry.flops_per_s.values())
    assert [row["op"] for row in entry.links] == [*links.PASSES] * len(links.SIZES["cpu"])
    assert all(links.bus_rate(row, 2) > 1e5 for row in entry.links)
    assert len(summary([entry])) == 2


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """By hand, from the examples of its doc/PERFORMANCE.md: an all-reduce sends twice what an all-gather does."""
    row = TimedCollective(op="all_reduce", bytes=8 * 10**9, seconds=2.0)
    assert links.bus_rate(row, 4) == 6e9
    assert links.bus_rate({**row, "op": "reduce_scatter"}, 4) == 3e9
    timed = tuple(TimedCollective(op=op, bytes=2**20, seconds=2.0) for op in links.PASSES)
    assert links.MeasuredRates(world_size=4, num_nodes=2, links=timed).link_text == (
        "bus bandwidth between 4 ranks on 2 nodes, at 1.0 MiB: all-reduce 0.000786 GB/s, all-gather 0.000393 GB/s, "
        "reduce-scatter 0.000393 GB/s"
    )


def test_damaged_seconds_leave_their_reason(tmp_path: Path) -> None:
    ranks = [
        {"status": "ok", "flops_per_s": {"fp32": 1e9}, "links": [{"op": "all_reduce"}]}
        for _ in range(2)
    ]
    outcome = Outcome(status=Status.OK, reason="", ranks=ranks, wall_s=1.0)
    (entry,) = measure([make_cell()], 1, tmp_path, Answers(outcome))
    assert entry.links == () and entry.reason.startswith("a rank returned damaged rates")
