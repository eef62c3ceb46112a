"""Peaks in closed form beside measured ones, and by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bench.cli import main
from bench.errors import GOOD
from bench.forecast import fit
from bench.judge.loading import load
from bench.plan.cell import Precision
from bench.plan.models import SIZES
from studies.bytes_page import RUNS, exact_peaks, peak_errors
from tests.conftest import ROOT, first
from tests.factories import make_cell

FAKE = [
    (cell, peak)
    for cell, peak in exact_peaks().items()
    if cell.fake_tensors and not cell.selective_checkpointing
]
NEAR, FAR = 0.05, 0.2
"""What ``predict`` says of its accuracy: within NEAR in all cells of models from 135m on, in smaller within FAR."""


def test_peaks_are_as_near_to_exact_ones_as_predict_says() -> None:
    """Every mechanism in fp32 and bf16; N = 1, 2 and 4, W from 1 to 1024, with checkpointing and without."""
    errors = peak_errors(exact_peaks([load(ROOT / name) for name in RUNS]))
    apart = errors["error"].abs().groupby(errors["model"])
    assert apart.max().pop("tiny") <= FAR
    for model in ("135m", "1b", "8b"):
        found = apart.get_group(model)
        assert len(found) >= 15 and found.max() <= NEAR, model


@pytest.mark.torch
@pytest.mark.parametrize("number", first((60,), range(0, len(FAKE), 3)))
def test_the_exact_peak_is_the_committed_one(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the byte, and near to the prediction."""
    cell, peak = FAKE[number]
    words = (
        f"--model {cell.model} --backend {cell.backend} --world-size {cell.world_size} --accumulate {cell.accumulate} "
        f"--micro-batch {cell.micro_batch_size} --sequence {cell.sequence_length} --precision {cell.precision} "
        f"--optimizer {cell.optimizer}{f' --replicate {cell.replicate}' * bool(cell.replicate)}"
        f"{' --activation-checkpointing' * cell.activation_checkpointing}"
    )
    assert main(["predict", *words.split(), "--device", "cpu", "--exact", "--json"]) == GOOD
    (row,) = json.loads(capsys.readouterr().out)
    assert row["exact_peak_bytes"] == peak
    assert row["peak_memory_bytes"] == pytest.approx(peak, rel=2 * NEAR)


def test_the_peak_of_ddp_by_hand() -> None:
    """With few tokens: parameters, two moments, buckets, and beside them local gradients or the update's temporaries.

    Reduced gradients are views of the buckets; those that are summed under ``no_sync`` are not.
    """
    cell = make_cell(
        backend="ddp-deferred", model="8b", world_size=8, global_batch_size=16, sequence_length=16
    )
    parameters = SIZES["8b"].num_parameters
    for name, copies in (("ddp-deferred", 5), ("ddp-eager", 4)):
        peak = fit.predicted_bytes(
            dataclasses.replace(cell, backend=name, accumulate=2, optimizer="adamw-fused")
        )
        assert peak == pytest.approx(4 * copies * parameters, rel=0.07), name


def test_the_activations_of_checkpointed_blocks_by_hand() -> None:
    """Each block keeps its input in bf16; outside of blocks there are cos and sin, and the last norm's tensors."""
    tokens, size = 8192, SIZES["8b"]
    values = {
        "model": "8b",
        "world_size": 64,
        "accumulate": 2,
        "global_batch_size": 128,
        "sequence_length": tokens,
    }
    cell = make_cell(backend="fsdp2-eager", **values, precision=Precision.BF16)
    kept, recomputed = (
        fit.predicted_bytes(dataclasses.replace(cell, activation_checkpointing=on))
        for on in (False, True)
    )
    assert kept is not None and recomputed is not None
    hidden, query, key = (
        size.hidden_size,
        size.num_heads * size.head_size,
        size.num_kv_heads * size.head_size,
    )
    norms = 2 * (4 * hidden + 4 + 2 * hidden + 2 * hidden)
    saved = tokens * (norms + 4 * (query + key) + 4 * size.num_heads + 8 * size.intermediate_size)
    assert kept - recomputed == size.num_layers * (saved - 2 * hidden * tokens)


def test_what_is_not_predicted() -> None:
    assert fit.predicted_bytes(make_cell(compiled=True)) is None
    zero3 = make_cell(backend="deepspeed-zero3-defaults-eager", activation_checkpointing=True)
    assert fit.predicted_bytes(zero3) is None
