"""Bare loops beside the bench on a GPU that is not there (studies/overhead/on_gpu.py)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from studies.overhead.on_gpu import BACKENDS
from tests.conftest import ROOT
from tests.cuda.conftest import Machine


@pytest.mark.slow
def test_a_bare_loop_trains_the_same_in_turn_on_one_gpu(machine: Machine) -> None:
    options = ("--model", "micro", "--length", "32", "--windows", "2")
    process = subprocess.run(
        [sys.executable, "-m", "studies.overhead.on_gpu", *options],
        cwd=ROOT,
        env=machine.environment(1, values=True),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr  # also where losses differ
    told = [json.loads(line) for line in process.stdout.splitlines()]
    assert [row["backend"] for row in told] == list(BACKENDS)
    assert all(len(row["ratios"]) == 2 and row["bench_over_bare"] > 0 for row in told)
