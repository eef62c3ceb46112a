"""Estimates of time, by hand and from earlier measurements."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.files import RESULTS
from bench.forecast import estimate
from bench.forecast.estimate import TrialSeconds, costs
from bench.plan.cell import Cell, Device, Precision, Sharding
from bench.plan.models import SIZES
from bench.plan.schedule import Cost
from bench.run import machine
from bench.run.journal import Journal
from tests.factories import make_cell, make_failure, make_record

H100 = "NVIDIA H100 80GB HBM3"


def test_earlier_walls_are_medians_of_good_trials(tmp_path: Path) -> None:
    cell, failed = make_cell(), make_cell(accumulate=2)
    records = [
        make_record(cell, repeat, wall_s=wall) for repeat, wall in enumerate([1.0, 9.0, 2.0])
    ]
    records.append(make_failure(cell, 3))
    for name, lines in {"a": records[:2], "b": records[2:], "c": [make_failure(failed)]}.items():
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "trials.jsonl").write_text(text + '{"torn": ')
        write_machine(tmp_path / name, {})
    (walls,) = estimate.earlier_walls(tmp_path, ()).values()
    assert walls.instead_of(TrialSeconds(None)) == TrialSeconds(2.0)
    assert list(estimate.earlier_walls(tmp_path, ())) == [cell.cell_id]
    assert estimate.earlier_walls(tmp_path / "nothing here", ()) == {}


def write_machine(folder: Path, changes: dict[str, object]) -> None:
    """A run.json that says that a run was on this machine, but for changes."""
    about = {**machine.machine(), "gpus": [{"name": H100}]} | changes
    (folder / "run.json").write_text(json.dumps({"machine": about}))


@pytest.mark.parametrize("changes", [{"cpu": "another one"}, {"cores": 7}, {"cores": None}])
def test_walls_of_another_cpu_say_nothing(changes: dict[str, object], tmp_path: Path) -> None:
    write_walls(tmp_path, make_cell(), [2.0], [])
    assert estimate.earlier_walls(tmp_path, ())
    write_machine(tmp_path / "run", changes)
    assert estimate.earlier_walls(tmp_path, ()) == {}


@pytest.mark.parametrize(
    ("name", "is_alike"),
    [
        (H100, True),
        ("H100", True),
        ("A100", False),
        ("H100 PCIe", False),
        (f"{H100} MIG 1g.10gb", False),
    ],
)
def test_walls_are_those_of_the_same_kind_of_gpu(name: str, is_alike: bool, tmp_path: Path) -> None:
    write_walls(tmp_path, gpu_cell(), [2.0], [])
    assert bool(estimate.earlier_walls(tmp_path, [{"name": name}])) is is_alike


def test_runs_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    write_walls(tmp_path, make_cell(), [2.0], [])
    for name in ("a folder", "a pipe", "no run.json"):
        (tmp_path / name).mkdir()
        write_machine(tmp_path / name, {})
    (tmp_path / "a folder" / "trials.jsonl").mkdir()
    os.mkfifo(tmp_path / "a pipe" / "trials.jsonl")
    (tmp_path / "no run.json" / "run.json").unlink()
    (tmp_path / "no run.json" / "trials.jsonl").write_text("")
    assert len(estimate.earlier_walls(tmp_path, ())) == 1


def write_walls(folder: Path, cell: Cell, timed: list[float], checked: list[float]) -> None:
    """A run in which trials of a cell with the time pass alone, and with all passes, took so long."""
    records = [make_record(cell, wall_s=wall, passes=["time"]) for wall in timed]
    records += [make_record(cell, wall_s=wall) for wall in checked]
    (folder / "run").mkdir()
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "run" / "trials.jsonl").write_text(text)
    write_machine(folder / "run", {})


@pytest.mark.parametrize("is_own", [True, False])
def test_checks_that_run_once_are_counted_beside_earlier_walls(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = make_cell()
    if is_own:
        cell = make_cell(workload="mine:Own")
    monkeypatch.setattr(estimate, "RESULTS", tmp_path)
    write_walls(tmp_path, cell, [2.0, 9.0, 3.0], [11.0, 7.0])
    cost = costs([cell], [], ())[cell.cell_id]
    assert (cost.seconds, cost.once_s) == (3.0, 6.0)
    assert cost.total(1) == 9.0 and cost.total(4) == 4 * 3.0 + 6.0


def test_checks_that_never_ran_are_estimated_beside_earlier_walls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "RESULTS", tmp_path)
    unknown = on_gpu(accumulate=2)
    assert unknown.once_s > 0
    write_walls(tmp_path, gpu_cell(accumulate=2), [4.0], [])
    known = on_gpu(accumulate=2)
    assert (known.seconds, known.once_s) == (4.0, unknown.once_s)


def gpu_cell(**changes: Any) -> Cell:
    """A cell of the 135m model on one GPU."""
    values: dict[str, Any] = {
        "model": "135m",
        "device": Device.CUDA,
        "precision": Precision.BF16,
        "world_size": 1,
    }
    values |= {"sequence_length": 2048, "global_batch_size": 32} | changes
    return make_cell(**values)


def on_gpu(**changes: Any) -> Cost:
    """Of such a cell on an H100, with all passes that it has beside others of other N."""
    cell = gpu_cell(**changes)
    cells = {dataclasses.replace(cell, accumulate=n) for n in (1, 2, 32)} | {cell}
    return costs([*cells], [{"name": H100}], ())[cell.cell_id]


def test_the_estimate_on_a_gpu_by_hand() -> None:
    """Few launches: 32 x 2048 tokens at 35 % of 989 TFLOP/s. Many: 3.3 ms per layer and micro-batch under DDP."""
    windows, compared = make_cell().windows, 3 * 4 * SIZES["135m"].num_parameters / 2e9
    launching = 30 * 3.3e-3
    computing = 32 * 2048 * SIZES["135m"].flops_per_token(2048) / (0.35 * 989e12)
    assert on_gpu(accumulate=1).seconds == pytest.approx(3.0 + windows * computing)
    assert on_gpu(accumulate=32).seconds == pytest.approx(3.0 + windows * 32 * launching)
    assert on_gpu(accumulate=32, compiled=True).seconds == pytest.approx(
        10.0 + windows * 32 * launching
    )
    many, few = on_gpu(accumulate=32), on_gpu(accumulate=2)
    exposure = 3 * 32 * 30 * 6.7e-3
    assert many.once_s == pytest.approx(32 * launching + compared + exposure), (
        "and the update; the others are of N = 2"
    )
    assert few.once_s > 3 * 2 * 30 * 10e-3, "where the memory pass watches every operator"
    assert few.seconds is not None and few.total(3) == pytest.approx(few.once_s + 3 * few.seconds)


def test_estimates_are_near_what_trials_took_on_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs in which no program loaded its packages or compiled beside a trial."""
    monkeypatch.setattr(estimate, "earlier_walls", lambda results, gpus: {})
    for name in ("h100", "h100-bf16", "h100-1b"):
        run = RESULTS / name
        cells = [
            Cell.from_dict(cell) for cell in json.loads((run / "run.json").read_text())["cells"]
        ]
        found = costs(cells, [{"name": H100}], ())
        took = [record for record in Journal(run).read() if record["status"] == "ok"]
        estimated = sum(found[record["cell_id"]].total(1) for record in took)
        estimated -= sum(found[record["cell_id"]].once_s for record in took if record["repeat"])
        assert estimated == pytest.approx(sum(record["wall_s"] for record in took), rel=0.1)


def test_what_is_sent_is_in_the_estimate_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """1b with 512 tokens a micro-batch on 8 GPUs: by hand, over links of 360 GB/s. FSDP2 gathers its root once."""
    monkeypatch.setattr(estimate, "GPU_LAYER_S", dict.fromkeys(Sharding, 1e-3))
    size = SIZES["1b"]
    whole, root = size.num_parameters, (size.vocab_size + 1) * size.hidden_size
    gathers, reductions = (7 / 8 * sent / 3.6e11 for sent in (2 * (2 * whole - root), 4 * whole))
    values: dict[str, Any] = {
        "model": "1b",
        "world_size": 8,
        "global_batch_size": 256,
        "sequence_length": 512,
    }
    values |= {"warmup_windows": 1, "timed_windows": 1, "accumulate": 32}

    def step(backend: str) -> float:
        few, many = (
            on_gpu(**values | {"backend": backend, "timed_windows": n}).seconds for n in (1, 2)
        )
        assert few is not None and many is not None
        return many - few

    assert step("fsdp2-eager") == pytest.approx(32 * (gathers + reductions)), "in bf16 and in fp32"
    launching = 32 * 16 * 1e-3
    assert step("fsdp2-deferred") == pytest.approx(max(32 * gathers + reductions, launching))
    assert step("ddp-deferred") == pytest.approx(launching)
    assert step("ddp-eager") > step("fsdp2-eager")


def test_a_model_of_ones_own_has_no_estimate_until_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = make_cell(workload="mine:Own")
    monkeypatch.setattr(estimate, "RESULTS", tmp_path)
    assert costs([cell], [], ()) == {cell.cell_id: Cost(None, None)}
    write_walls(tmp_path, cell, [], [7.0])
    assert costs([cell], [], ()) == {cell.cell_id: Cost(7.0, None)}
