"""Without the extra ``frameworks``: what reads works, and what trains says which command brings torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BAD, GOOD, WRONG
from tests.conftest import ROOT

ABSENT = (
    "torch",
    "lightning",
    "deepspeed",
    "transformers",
    "safetensors",
    "accelerate",
    "torchtitan",
)
SITE = f"""
import sys

class WithoutFrameworks:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *place):
        return None if name.partition(".")[0] in {ABSENT!r} else self.finder.find_spec(name, *place)

sys.meta_path[:] = [WithoutFrameworks(finder) for finder in sys.meta_path]
"""
CONFIG = "trainer: {strategy: deepspeed_stage_2, accumulate_grad_batches: 4}\n"
CPU = str(ROOT / "results" / "cpu")
CELLS = ("fsdp2-deferred N=8 W=2 fp32", "fsdp2-eager N=8 W=2 fp32")
SIZE = (
    "--model",
    "8b",
    "--world-size",
    "64",
    "--accumulate",
    "16",
    "--sequence",
    "8192",
    "--precision",
    "bf16",
)


@pytest.fixture
def light(tmp_path: Path) -> Any:
    """Calls the bench in a folder of its own, in a Python that has no framework."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    (tmp_path / "config.yaml").write_text(CONFIG)

    def call(*arguments: str) -> Any:
        return subprocess.run(
            [sys.executable, "-m", "bench", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])},
            capture_output=True,
            text=True,
        )

    return call


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("plan", "--matrix", "cpu"), GOOD),
        (("backends",), GOOD),
        (("lint", "config.yaml"), BAD),
        (("steps", "--samples", "100", "--micro-batch", "4", "--accumulate", "4"), GOOD),
        (("predict", *SIZE), GOOD),
        (("check", CPU), GOOD),
        (("cite", CPU, *CELLS), GOOD),
        (("compare", CPU, "--backend", "fsdp2-deferred", "--against", "fsdp2-eager"), GOOD),
        (("export", CPU, "--table", "ratios"), GOOD),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_reads_needs_no_framework(light: Any, arguments: tuple[str, ...], status: int) -> None:
    done = light(*arguments)
    assert done.returncode == status, done.stderr
    assert done.stdout


def test_a_report_is_drawn_without_a_framework(light: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.json", "trials.jsonl"):
        (folder / name).write_bytes((Path(CPU) / name).read_bytes())
    done = light("report", "run", "--plots", "pictures")
    assert done.returncode == GOOD, done.stderr
    assert (folder / "report.html").exists()


@pytest.mark.parametrize("command", ["run", "semantics", "throughput", "accumulation"])
def test_what_trains_names_what_it_lacks(light: Any, command: str) -> None:
    done = light(command)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (WRONG, "", 1)
    assert "lacks the package torch; " in done.stderr


def test_doctor_says_that_torch_cannot_be_used(light: Any) -> None:
    done = light("doctor", "--json")
    errors = {
        found["topic"] for found in json.loads(done.stdout)["findings"] if found["level"] == "error"
    }
    assert done.returncode == BAD
    assert "torch" in errors
