"""Trials that fail are rows with a reason and a log, and sound trials beside them are kept."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest

from bench.run.journal import JOURNAL
from tests.conftest import FAULTY, ROOT, Run, first, run_bench, run_matrix


def test_an_installed_package_adds_a_backend_that_runs(faulty_run: Run) -> None:
    trial = faulty_run.trial("x-sound")
    assert trial["status"] == "ok", trial["reason"]
    assert trial["framework"] == "Extra"
    assert faulty_run.trial("reference")["status"] == "ok", "the reference comes along unasked"


CASES = {
    "x-aborts-afterwards": ("ok", ""),  # it had handed over its result
    "x-raises": ("crashed", r"rank 1: KeyError: 'a key that says out of memory'"),
    "x-killed": ("crashed", r"rank 1 was ended by SIGKILL"),
    "x-unsupported": (
        "unsupported",
        r"rank 1: UnsupportedError: this framework cannot do that",
    ),
    "x-needs-missing": ("unsupported", r"needs no_such_package_at_all: pip install"),
    "x-last-only": ("invalid", r"pointing elsewhere: samples were lost"),
    "x-summed": ("invalid", r"2 times too large: summed over the 2 ranks"),
    "x-steps-too-often": ("invalid", r"12 optimizer steps were taken, 4 were due"),
}


@pytest.mark.parametrize("backend", first(FAULTY, CASES))
def test_each_failure_is_a_row_with_its_status_and_reason(faulty_run: Run, backend: str) -> None:
    trial, (status, reason) = faulty_run.trial(backend), CASES[backend]
    assert trial["status"] == status, trial["reason"]
    assert re.search(reason, trial["reason"])


def test_failed_trials_keep_their_logs_which_name_no_place_on_the_machine(faulty_run: Run) -> None:
    record = faulty_run.record("x-raises")
    text = (faulty_run.folder / record["log"]).read_text()
    assert "KeyError" in text and "in fail" in text and 'File "bench/' in text
    assert any(line.lstrip().startswith('File "bench/') for line in record["last_lines"])
    for path in (faulty_run.folder / JOURNAL, *(faulty_run.folder / "logs").iterdir()):
        for folder in (ROOT, sysconfig.get_path("purelib")):
            assert f"{folder}/" not in path.read_text(), path.name


@pytest.mark.slow
def test_cold_and_warm_trials_do_the_same(tmp_path: Path, fp32_run: Run) -> None:
    cold = run_bench(tmp_path, "smoke", "--backend", "ddp-deferred,deepspeed-zero2-eager", "--cold")
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
