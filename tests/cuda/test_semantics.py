"""The suite of scenarios on CUDA: what reaches which update is what the committed records of the CPU say."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench.audit.semantics_files import OBSERVATIONS
from bench.errors import BAD
from tests.conftest import ROOT
from tests.cuda.conftest import Machine

DIFFERENT = {
    ("deepspeed-zero3-deferred", "zero-grad"),
    ("deepspeed-zero3-offload-deferred", "zero-grad"),
    *product(
        ("lightning-deepspeed-zero3", "lightning-deepspeed-zero3-corrected"),
        ("exception", "exception-epoch-2"),
    ),
}
"""Backend and scenario of the records that differ by device; docs/gpu.md says why."""


def records(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """By backend and scenario; on a CPU Lightning's strategy is a class of ours, which is named in its errors."""
    text = (
        (folder / OBSERVATIONS).read_text().replace("DeepSpeedStrategyOnCPU", "DeepSpeedStrategy")
    )
    return {
        (record["backend"], record["scenario"]): record
        for record in json.loads(text)["observations"]
    }


@pytest.mark.parametrize(
    "names", ["ddp-eager,deepspeed-zero3-deferred", pytest.param("all", marks=pytest.mark.slow)]
)
def test_records_are_those_of_the_cpu(machine: Machine, names: str) -> None:
    done = machine.bench(
        "semantics", "--suite", "--device", "cuda", "--backend", names, "--out", "suite", gpus=2
    )
    assert done.returncode == BAD, done.stderr  # known defects are among what it finds
    found, on_cpu = records(machine.folder / "suite"), records(ROOT / "results" / "semantics")
    assert {backend for backend, _ in found} >= {"ddp-eager", "deepspeed-zero3-deferred"}
    assert {name for name in found if found[name] != on_cpu[name]} == DIFFERENT & found.keys()
