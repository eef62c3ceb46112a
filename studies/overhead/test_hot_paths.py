"""The hot paths: what runs inside a timed window first, then what runs once per trial, once per report, per page."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any

import matplotlib.style
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

from bench.backends.base import registry
from bench.errors import BAD, GOOD
from bench.judge import tables
from bench.judge.analysis import Analysis
from bench.judge.loading import Run
from bench.launch.launcher import Launcher
from bench.measure.final_state import FinalState
from bench.measure.taps import EventKind, Taps
from bench.measure.update import change_from, compare, save, sizes_of
from bench.plan.cell import Device, Status
from bench.plan.expand import expand
from bench.plan.task import Spec
from bench.report import canvas, figure_data, figures, page, style
from bench.report.answer import answer
from bench.report.curves import draw_step_time
from bench.run.journal import Journal
from tests.conftest import bench
from tests.factories import (
    judged_run,
    make_manifest,
    make_matrix,
    make_record,
    manifest_of,
    parsed_records,
)
from tests.factories import make_cell as cell_of
from tests.pages import report, write_large_run

EVENTS, BACKENDS, REPEATS = 1000, ("ddp-deferred", "ddp-eager", "fsdp2-eager", "fsdp2-deferred"), 10


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """A run of four backends and the reference at three N, ten trials each."""
    cells = [cell_of(backend=name, accumulate=n) for n in (1, 2, 4) for name in BACKENDS]
    cells = [cells[0].reference(), *cells]
    return [make_record(cell, repeat) for repeat in range(REPEATS) for cell in cells]


@pytest.fixture(scope="module")
def run(records: list[dict[str, Any]]) -> Run:
    return judged_run(records, make_manifest(finished="2025-01-01T00:00:00+00:00"))


@pytest.fixture(scope="module")
def data(run: Run) -> Analysis:
    return Analysis(run=run)


@pytest.fixture(scope="module")
def drawn(data: Analysis, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("run") / "plots"
    return figures.draw(data, folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large_run(tmp_path_factory.mktemp("large") / "run")


def test_thousand_tapped_steps(benchmark: BenchmarkFixture) -> None:
    def record() -> Taps:
        taps = Taps(mark=time.perf_counter)
        for _ in range(EVENTS):
            taps.record(EventKind.STEP, taps.mark())
        return taps

    assert benchmark(record).count(EventKind.STEP) == EVENTS


def test_one_append_to_the_journal(
    benchmark: BenchmarkFixture, records: list[dict[str, Any]], tmp_path: Path
) -> None:
    journal = Journal(tmp_path)
    benchmark(journal.append, records[1])
    assert journal.read()[0]["cell_id"] == records[1]["cell_id"]


def test_reading_the_journal(
    benchmark: BenchmarkFixture, records: list[dict[str, Any]], tmp_path: Path
) -> None:
    journal = Journal(tmp_path)
    for record in records[:20]:
        journal.append(record)
    journal.path.write_bytes(journal.path.read_bytes() * 10)
    assert len(benchmark(journal.read)) == 200


def test_planning_ten_thousand_cells(benchmark: BenchmarkFixture) -> None:
    powers = [2**n for n in range(15)]
    batch = {"workload.global_batch_size": 2**24}
    axes = {"accumulate": powers, "world_size": powers[:10], "precision": ["fp32", "bf16"]}
    matrix = make_matrix(batch, backend="all", **axes)
    assert len(benchmark(expand, matrix, registry(), 0).cells) > 10_000


def test_building_the_tables(benchmark: BenchmarkFixture, records: list[dict[str, Any]]) -> None:
    parsed, manifest = parsed_records(records), manifest_of(make_manifest())
    assert len(benchmark(tables.build, parsed, manifest).trials) == len(records)


def test_drawing_one_plot(benchmark: BenchmarkFixture, data: Analysis, tmp_path: Path) -> None:
    def draw() -> Path:
        with matplotlib.style.context(list(style.BASE)):
            (drawing,) = draw_step_time(figure_data.FigureData(data))
        return canvas.save(drawing.figure, tmp_path / drawing.stem, drawing.words)

    assert benchmark(draw).stat().st_size


def test_verdicts_against_every_baseline(benchmark: BenchmarkFixture, run: Run) -> None:
    def verdicts() -> list[int]:
        data = Analysis(run=run)
        return [len(data.against(name)) for name in data.baselines]

    assert len(benchmark(verdicts)) == len(BACKENDS)


def test_writing_the_page(benchmark: BenchmarkFixture, data: Analysis, drawn: list[Path]) -> None:
    assert f"<h1><bdi>{data.run.name}" in benchmark(page.render, data, answer(data), drawn)


@pytest.mark.benchmark(timer=time.process_time)
def test_report_of_500_cells_in_cpu_seconds(benchmark: BenchmarkFixture, large: Path) -> None:
    status, _ = benchmark.pedantic(report, (large,), rounds=1)
    assert status == 0


def test_opening_the_page_of_500_cells_until_it_can_be_used(
    benchmark: BenchmarkFixture, large: Path
) -> None:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: nox -s browser installs it"
    )
    program = shutil.which("chromium") or pytest.skip(
        "there is no chromium: nox -s browser installs it"
    )
    if not (large / "report.html").exists():
        report(large)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])

        def use() -> str:
            page = browser.new_page(offline=True)
            page.goto((large / "report.html").as_uri())
            page.select_option("#by-backend", label="backend-0-eager")
            found = str(
                page.locator("#overview tr[data-id]:visible").first.get_attribute("data-id")
            )
            page.close()
            return found

        assert benchmark.pedantic(use, rounds=5, warmup_rounds=1)
        browser.close()


LARGE = 10**8
"""Parameters in fp32 that are checked; what a check costs is proportional to them."""


class Square(nn.Module):
    """One matrix of LARGE elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(math.isqrt(LARGE), math.isqrt(LARGE)))


@pytest.mark.slow
@pytest.mark.benchmark(timer=time.process_time)
def test_checking_an_update_of_1e8_parameters_in_cpu_seconds(
    benchmark: BenchmarkFixture, tmp_path: Path
) -> None:
    """The whole gate: the difference from before, and its deviation from the reference's."""
    model, reference = Square(), tmp_path / "reference.safetensors"
    after = {"weight": model.weight.detach() + 1}
    save(dict(change_from(model, after, "a backend")), reference, sizes_of(model))

    def check() -> float:
        return compare(change_from(model, after, "a backend"), reference, torch.device("cpu"))[
            "error"
        ]

    assert benchmark.pedantic(check, rounds=3, warmup_rounds=1) == 0


@pytest.mark.slow
@pytest.mark.benchmark(timer=time.process_time)
def test_reading_the_final_state_of_1e8_parameters_in_cpu_seconds(
    benchmark: BenchmarkFixture, tmp_path: Path
) -> None:
    """Projections of the parameters and of AdamW's two moments, on one rank."""
    model = Square()
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    end = FinalState(tmp_path / "reference.safetensors")
    end.built(model)
    backend = registry()["ddp-deferred"]()

    def read() -> dict[str, object]:
        return end.read(backend, [optimizer], {}, torch.device("cpu"), whole=False)

    assert benchmark.pedantic(read, rounds=3, warmup_rounds=1)["steps"] == 1


@pytest.mark.slow
def test_warm_trial_of_two_small_windows(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    cell = cell_of(model="micro", warmup_windows=1, timed_windows=1)
    spec = Spec(
        cell=cell,
        passes=("time",),
        folder=str(tmp_path / "trial"),
        reference=str(tmp_path / "none"),
    )
    with Launcher(Device.CPU) as launcher:
        outcome = benchmark.pedantic(launcher.run, (spec, 60.0), rounds=10, warmup_rounds=1)
    assert outcome.status is Status.OK, outcome.reason


@pytest.mark.slow
def test_smoke_run(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    done = benchmark.pedantic(
        bench, ("run", "--matrix", "smoke", "--out", "out"), {"cwd": tmp_path}, rounds=1
    )
    assert done.returncode == GOOD, done.stderr


@pytest.mark.slow
def test_semantics_suite(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    done = benchmark.pedantic(
        bench, ("semantics", "--suite", "--out", "out"), {"cwd": tmp_path}, rounds=1
    )
    assert done.returncode == BAD, done.stderr  # it finds the known defects
