"""What only values over the stub show: CUDA held against the CPU."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from tests.cuda.conftest import Machine
from tests.cuda.test_runs import SMOKE, judged, told, unexpected

ONE_GPU = ("--world-size", "1", "--backend", "ddp-deferred", "--model", "mini", "--out", "run")


@pytest.mark.parametrize("workload", ["llama", "tests.cuda.repeating:in_turn"])
def test_an_error_that_only_cuda_has_makes_every_trial_invalid(
    machine: Machine, workload: str
) -> None:
    """Heads in the wrong order: backend and reference agree, since both run on CUDA."""
    process = machine.bench(*SMOKE, *ONE_GPU, "--workload", workload)
    assert not unexpected(machine.records()), told(machine.records())
    trials = pd.read_parquet(machine.folder / "run" / "trials.parquet")
    reference = trials[trials["backend"] == "reference"].iloc[0]
    if workload == "llama":
        assert process.returncode == 0 and not judged(machine), process.stdout + process.stderr
        assert 0 < reference["device_error"] < 1e-6 and reference["device_loss_deviation"] < 1e-5
    else:
        assert process.returncode == 1 and set(trials["failed_gates"]) == {"device"}, judged(
            machine
        )
        assert reference["device_error"] > 0.1


WEIGHTS = """
import dataclasses, json, torch
from bench.measure.tensors import tensors
from bench.plan.cell import Cell
from bench.workload import load
from tests.cuda.cells import counted_cell

def drawn(model, device):
    cell = dataclasses.replace(counted_cell("ddp-deferred", 1), model=model)
    return next(tensors(cell, torch.device(device)).model(load(cell, None).model).parameters())

torch.cuda.init()
before = torch.cuda.get_rng_state(), torch.get_rng_state()
found = {}
for model in ("tiny", "135m"):
    weight = drawn(model, "cuda:0")
    found[model] = weight.device.type, torch.equal(weight.cpu(), drawn(model, "cpu"))
unchanged = [torch.equal(a, b) for a, b in zip(before, (torch.cuda.get_rng_state(), torch.get_rng_state()))]
print(json.dumps([found, unchanged]))
"""


def test_small_models_have_the_weights_of_the_cpu_and_no_generator_moves(machine: Machine) -> None:
    found, unchanged = json.loads(machine.python(WEIGHTS, values=True))
    assert found == {"tiny": ["cpu", True], "135m": ["cuda", False]} and unchanged == [True, True]
