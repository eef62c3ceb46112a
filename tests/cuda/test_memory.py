"""The allocator's peak of each model at its full size beside that of a trial on fake tensors, which is exact."""

from __future__ import annotations

import dataclasses

import pytest

from bench.backends.base import registry
from bench.forecast import fit
from bench.plan import matrix as matrix_file
from bench.plan.cell import REFERENCES, Cell
from bench.plan.expand import expand
from tests.cuda.conftest import Machine

TOLERANCE = 0.03
MIB = 2**20
WORKSPACES = 2 * 32 * MIB
"""cuBLAS's on an H100, for the thread of forward and for that of backward (CublasHandlePool.cpp in torch). What the
ledger counts are the tensors alone."""
MODELS = ("tiny", "135m", "1b", "3b", "8b")
BY_DEFAULT = MODELS[:2]


def cells() -> dict[str, Cell]:
    """One cell of each model in the matrix for GPUs, on one of them: the first that has it.

    Those of 135m are references there, so it takes the place of the first cell's model. Two windows are enough, since
    the peak is the same in every one.
    """
    found: dict[str, Cell] = {}
    for cell in expand(matrix_file.load("gpu"), registry(), 1).cells:
        if cell.backend not in REFERENCES and cell.world.has_all_ranks:
            found.setdefault(cell.model, dataclasses.replace(cell, timed_windows=2))
    found["135m"] = dataclasses.replace(next(iter(found.values())), model="135m")
    return found


def test_every_model_of_the_matrix_is_among_them() -> None:
    assert (
        {part["workload.model"] for part in matrix_file.load("gpu").parts}
        == set(MODELS)
        == set(cells())
    )


@pytest.mark.parametrize(
    "model",
    [
        model if model in BY_DEFAULT else pytest.param(model, marks=pytest.mark.slow)
        for model in MODELS
    ],
)
def test_the_peak_is_that_of_a_trial_on_fake_tensors(machine: Machine, model: str) -> None:
    """DDP cannot run on fake tensors: there the memory pass of the trial itself counts."""
    cell = cells()[model]
    predicted = fit.predicted_bytes(cell)
    assert predicted is not None
    memory = str(
        max(81559, 2 * predicted // MIB)
    )  # the peak is asked for, not whether an H100 has it
    settings = {"FAKE_WEIGHTS": "none", "FAKE_COPY_MAX": "65536", "FAKE_MEM_MIB": memory}
    fake = dataclasses.replace(cell, virtual=True, fake_tensors=True)
    trials = machine.trials([cell], ("time", "memory"), gpus=1, **settings)
    trials += (
        machine.trials([fake], ("memory",), gpus=1)
        if not registry()[cell.backend].refuses.fake
        else []
    )
    assert [trial["status"] for trial in trials] == ["ok"] * len(trials), trials
    peak = trials[0]["found"]["time"]["cuda_memory"]["allocated"]
    exact = trials[-1]["found"]["memory"]["peak"] + WORKSPACES
    print(
        f"{model} {cell.backend} N={cell.accumulate}: measured {peak / MIB:.0f} MiB, exact {exact / MIB:.0f} MiB"
    )
    assert peak == pytest.approx(exact, rel=TOLERANCE)
