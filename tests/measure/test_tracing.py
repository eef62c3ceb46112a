"""The trace of a window: ranges of the taps and of collectives, on every rank, in one file."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.errors import GOOD
from bench.judge.formulas import expect, layout_of
from bench.launch.launcher import Launcher
from bench.plan.cell import Device, Status
from bench.plan.task import Spec
from bench.report.trace_file import RANK_IDS, write_merged
from tests.conftest import Command, run_matrix
from tests.factories import make_cell

BACKENDS = ["lightning-ddp", "ddp-deferred", "fsdp2-eager", "deepspeed-zero2-eager"]
N, W = 3, 2


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    ends = inner["ts"] + inner["dur"], outer["ts"] + outer["dur"]
    return outer["ts"] <= inner["ts"] and ends[0] <= ends[1] + 1.0


def test_a_window_has_its_micro_batches_and_collectives_in_every_framework(tmp_path: Path) -> None:
    with Launcher(Device.CPU) as launcher:
        for backend in BACKENDS:
            folder = tmp_path / backend
            folder.mkdir()
            cell = make_cell(
                backend=backend, model="micro", accumulate=N, world_size=W, global_batch_size=N * W,
                sequence_length=8,
            )  # fmt: skip
            spec = Spec(cell=cell, passes=("trace",), folder=str(folder), reference="")
            outcome = launcher.run(spec, 300)
            assert outcome.status is Status.OK, outcome.reason
            traces = [folder / rank["trace"] for rank in outcome.ranks]
            merged = folder / "merged.json.gz"
            num_events = write_merged(traces, merged, {"label": cell.label})
            content = json.loads(gzip.decompress(merged.read_bytes()))
            assert len(content["traceEvents"]) == num_events
            for rank in range(W):
                found = [
                    event
                    for event in content["traceEvents"]
                    if event.get("cat") == "user_annotation" and event["pid"] // RANK_IDS == rank
                ]
                check_ranges(backend, found)
                layout = layout_of(cell)
                assert layout is not None
                expectation = expect(cell, layout)
                assert expectation is not None
                issued = Counter(
                    event["name"].removeprefix("collective: ").partition(" of ")[0]
                    for event in found
                    if event["name"].startswith("collective: ")
                )
                due = Counter[str]()
                for row in expectation.collectives:
                    due[row.op] += row.calls
                assert issued == due, backend


def check_ranges(backend: str, found: list[dict[str, Any]]) -> None:
    """One window, N micro-batches each with a forward, and the optimizer's steps after them."""
    (window,) = (event for event in found if event["name"] == "window")
    micro_batches = [event for event in found if event["name"].startswith("micro-batch ")]
    assert [event["name"] for event in sorted(micro_batches, key=lambda event: event["ts"])] == [
        f"micro-batch {number}" for number in range(1, N + 1)
    ], backend
    forwards = [event for event in found if event["name"] == "forward"]
    steps = [event for event in found if event["name"] == "optimizer step"]
    assert len(forwards) == N and steps, backend
    for forward in forwards:
        assert sum(inside(forward, event) for event in micro_batches) == 1, backend
    assert all(inside(event, window) for event in (*micro_batches, *steps)), backend
    last = max(event["ts"] + event["dur"] for event in micro_batches)
    assert min(step["ts"] for step in steps) >= last - 1.0, backend


def test_ranks_are_moved_apart_and_to_one_clock(tmp_path: Path) -> None:
    paths = []
    for rank, base in enumerate((1_000_000, 3_000_000)):
        events = [
            {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
            {"ph": "X", "name": "a", "pid": 7, "tid": 7, "ts": 5.0, "dur": 1.0},
            {"ph": "s", "name": "ac2g", "id": 3, "pid": 7, "tid": 7, "ts": 5.0},
        ]
        path = tmp_path / f"trace{rank}.json"
        path.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}))
        paths.append(path)
    merged = tmp_path / "merged.json.gz"
    assert write_merged(paths, merged, {}) == 6
    events = json.loads(gzip.decompress(merged.read_bytes()))["traceEvents"]
    assert [event["pid"] for event in events] == [7] * 3 + [7 + RANK_IDS] * 3
    assert [event["args"]["name"] for event in (events[0], events[3])] == [
        "rank 0: python",
        "rank 1: python",
    ]
    assert events[1]["ts"] == 5.0 and events[4]["ts"] == pytest.approx(2005.0)
    assert events[2]["id"] == 3 and events[5]["id"] == 3 + RANK_IDS


def test_a_cell_without_steps_here_is_refused() -> None:
    from bench.commands.trace import _refuse
    from bench.errors import InputError

    _refuse(make_cell(virtual=True))
    with pytest.raises(InputError, match="fake tensors"):
        _refuse(make_cell(virtual=True, fake_tensors=True))
    with pytest.raises(InputError, match="several nodes"):
        _refuse(replace(make_cell(world_size=4, global_batch_size=16), ranks_per_node=2))


def test_a_cell_of_a_run_is_traced(here: Command, tmp_path: Path) -> None:
    run = run_matrix(tmp_path, backend=["ddp-deferred"], command=here)
    assert run.process.returncode == GOOD, run.process.stderr
    done = here("trace", "run", f"ddp-deferred N={N} W={W} fp32")
    assert done.returncode == GOOD, done.stderr
    (path,) = tmp_path.glob("trace-*.json.gz")
    assert str(path.name) in done.stdout
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    windows = [event["pid"] // RANK_IDS for event in events if event["name"] == "window"]
    assert sorted(windows) == [0, 1], "one on each rank"
