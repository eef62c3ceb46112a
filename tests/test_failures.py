"""Real runs that are interrupted, start every trial anew, or lack a compiler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MATRIX, ROOT, Command, Run, processes_with, run_matrix


def test_interrupt_keeps_finished_trials_and_resume_goes_on(tmp_path: Path, here: Command) -> None:
    (tmp_path / "matrix.toml").write_text(MATRIX.format(backend='["ddp-deferred"]', precision="fp32", repeats=2))
    command = [sys.executable, "-m", "bench", "run", "--matrix", "matrix.toml", "--out", "run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BENCH_TEST_TOKEN": "interrupted"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("[1/6]"):
        assert line or process.poll() is None, "the run ended early"
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait() == 130
    assert "python -m bench run --resume run" in rest
    assert processes_with("interrupted") == []

    resumed = here("run", "--resume", "run")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    run = Run(tmp_path / "run", resumed)
    good = [(record["cell"]["backend"], record["repeat"]) for record in run.records if record["status"] == "ok"]
    assert sorted(good) == [("ddp-deferred", 0), ("ddp-deferred", 1), ("reference", 0), ("reference", 1)]
    assert (run.tables.trials["status"] == "ok").all()
    assert not (run.folder / "scratch").exists()


@pytest.mark.slow
def test_cold_and_warm_trials_do_the_same(tmp_path: Path, fp32_run: Run) -> None:
    cold = run_matrix(tmp_path, "--cold", backend=["ddp-deferred", "deepspeed-zero2-eager"])
    assert cold.process.returncode == 0, cold.process.stdout + cold.process.stderr
    assert cold.manifest["cold"]
    for backend in ("reference", "ddp-deferred", "deepspeed-zero2-eager"):
        here, there = cold.record(backend), fp32_run.record(backend)
        assert here["cell_id"] == there["cell_id"]
        assert here["time"]["losses"] == there["time"]["losses"], "bit for bit"
        for fact in ("collectives", "memory"):
            assert here[fact] == there[fact]


@pytest.mark.slow
def test_a_machine_without_a_compiler_runs_deepspeed(tmp_path: Path) -> None:
    nothing = tmp_path / "bin"
    nothing.mkdir()
    backends = ["deepspeed-zero2-eager", "deepspeed-zero3-eager"]
    without = {
        "CXX": "false",
        "CC": "false",
        "PATH": str(nothing),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    run = run_matrix(tmp_path, backend=backends, **without)
    assert run.process.returncode == 0, run.process.stdout + run.process.stderr
    assert {record["status"] for record in run.records} == {"ok"}
    assert not (tmp_path / "extensions").exists(), "nothing was compiled"
