"""Backends that offload, on GPUs that are not there: what the host holds, what of it is pinned, and what is copied."""

from __future__ import annotations

import pandas as pd
import pytest

from bench.backends.base import Offloading, registry
from bench.forecast.prediction import Prediction
from bench.judge.formulas import layout_of
from bench.judge.offload import USES
from bench.plan.categories import COPIED_TO_DEVICE, COPIED_TO_HOST, HELD, ON_HOST, PINNED
from bench.plan.cell import Cell, Device, Precision
from tests.cuda.conftest import Machine
from tests.cuda.test_runs import SMOKE, judged, told

NAMES = [name for name, backend in registry().items() if issubclass(backend, Offloading)]
IN_BF16 = [name for name in NAMES if not registry()[name].refuses.bf16]
VARIANTS = {
    "alone": (NAMES, ("--world-size", "1")),
    "two": (NAMES, ("--world-size", "2")),
    "bf16": (IN_BF16, ("--world-size", "2", "--precision", "bf16")),
    "clipped": (IN_BF16, ("--world-size", "2", "--clip-norm", "0.5")),
    "fused": (IN_BF16, ("--world-size", "2", "--optimizer", "adamw-fused")),
}
DUE = {
    *(f"{HELD}_{use}" for use in USES),
    *(f"{ON_HOST}_{HELD}_{use}" for use in USES),
    *(PINNED, COPIED_TO_DEVICE, COPIED_TO_HOST),
}
"""What of a trial's memory has a formula."""


@pytest.mark.parametrize(
    "variant",
    ["two", *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != "two")],
)
def test_every_byte_is_where_its_formula_says(machine: Machine, variant: str) -> None:
    """Every pass runs, the gates find nothing, and no byte of device, host, pinned memory or copies is off."""
    names, options = VARIANTS[variant]
    done = machine.bench(
        *SMOKE, *options, "--backend", ",".join(names), "--batch", "12", "--out", "run", gpus=2
    )
    records = machine.records()
    assert {record["status"] for record in records} == {"ok"}, told(records)
    assert not judged(machine) and done.returncode == 0, done.stdout + done.stderr
    memory = pd.read_parquet(machine.folder / "run" / "memory.parquet")
    trials = pd.read_parquet(machine.folder / "run" / "trials.parquet")
    for name in names:
        ids = trials[trials["backend"] == name]["cell_id"]
        rows = memory[memory["cell_id"].isin(ids) & memory["category"].isin(DUE)]
        assert set(rows["category"]) == DUE, name
        assert (rows["bytes"] == rows["expected_bytes"]).all(), (name, rows)


def fake_cell(backend: str) -> Cell:
    """135m on rank 0 of eight, without values."""
    precision = Precision.BF16
    if registry()[backend].refuses.bf16:
        precision = Precision.FP32
    return Cell(
        backend=backend,
        model="135m",
        accumulate=2,
        world_size=8,
        global_batch_size=16,
        sequence_length=512,
        precision=precision,
        optimizer="adamw-foreach",
        device=Device.CUDA,
        virtual=True,
        fake_tensors=True,
    )


@pytest.mark.parametrize(
    "backend",
    [
        name if name == "fsdp2-offload-eager" else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
    ],
)
def test_predicted_peaks_of_device_and_host_are_near_to_exact_ones(
    machine: Machine, backend: str
) -> None:
    cell = fake_cell(backend)
    (trial,) = machine.trials([cell], ("memory",), gpus=1)
    assert trial["status"] == "ok", trial
    memory, layout = trial["found"]["memory"], layout_of(cell)
    assert layout is not None
    predicted = Prediction(cell, registry()[backend], layout)
    assert predicted.host is not None
    exact = memory["peak"] - memory["peak_other"]
    on_host = memory["host_peak"] - memory["host_peak_other"]
    assert predicted.memory.peak == pytest.approx(exact, rel=0.01)
    assert predicted.host.peak == pytest.approx(on_host, rel=0.01)
    assert (memory[COPIED_TO_DEVICE], memory[COPIED_TO_HOST]) == (
        predicted.host.to_device,
        predicted.host.to_host,
    )
