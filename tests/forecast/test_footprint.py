"""Peaks in closed form beside measured ones, and by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.cli import main
from bench.errors import GOOD
from bench.forecast import fit
from bench.judge.loading import load
from bench.launch.launcher import Launcher
from bench.plan.categories import PEAK
from bench.plan.cell import Cell, Precision
from bench.plan.models import SIZES
from tests.conftest import ROOT
from tests.factories import make_cell
from tests.worlds import measure

PEAKS = Path(__file__).parent / "peaks.jsonl"
"""Virtual worlds of the 135m model with their peaks in bytes, as measured on the CPU; DDP's on real tensors."""
NEAR, SHARE = 0.05, 0.95
"""What ``predict`` says of its accuracy."""


def measured() -> dict[Cell, int]:
    """The cells of PEAKS."""
    found = {}
    for row in map(json.loads, PEAKS.read_text().splitlines()):
        values = {"fake_tensors": True} | row["cell"] | {"precision": Precision(row["cell"]["precision"])}
        found[make_cell(**values, model="135m", virtual=True)] = row["bytes"]
    return found


def test_peaks_are_as_near_to_measured_ones_as_predict_says() -> None:
    """Every mechanism that runs on fake tensors; fp32 and bf16, N = 1 and 2, with checkpointing and without."""
    apart = {cell: abs(fit.peaks([cell])[cell.cell_id] / peak - 1) for cell, peak in measured().items()}
    assert len(apart) > 30 and max(apart.values()) < 2 * NEAR
    assert sum(share <= NEAR for share in apart.values()) >= SHARE * len(apart), apart


@pytest.mark.slow
def test_the_measured_peaks_are_those_of_today(launcher: Launcher, tmp_path: Path) -> None:
    found = {cell: peak for cell, peak in measured().items() if cell.world_size == 8}
    for number, (cell, peak) in enumerate([*found.items()][::5]):
        memory = measure(launcher, tmp_path / str(number), [cell], "memory")[cell.backend]["memory"]
        assert memory["peak"] - memory["peak_other"] == peak, cell.label


@pytest.mark.torch
def test_the_exact_peak_is_that_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a virtual world in results/bytes, to the byte, though nothing is allocated here."""
    run = load(ROOT / "results/bytes")
    (cell,) = (
        cell for cell in run.cells.values()
        if (cell.backend, cell.accumulate, cell.world_size, cell.virtual) == ("fsdp2-deferred", 4, 8, True)
    )  # fmt: skip
    memory = run.tables.memory
    peak = memory[(memory["cell_id"] == cell.cell_id) & (memory["category"] == PEAK)]["bytes"].iloc[0]
    command = "predict --model tiny --world-size 8 --accumulate 4 --sequence 16 --precision fp32 --device cpu"
    size = ("--micro-batch", str(cell.micro_batch_size))
    assert main([*command.split(), *size, "--backend", "fsdp2-deferred", "--exact", "--json"]) == GOOD
    (row,) = json.loads(capsys.readouterr().out)
    assert row["exact_peak_bytes"] == peak


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--backend", "ddp-eager", "--device", "cpu"], "ddp-eager cannot run on fake tensors"),
        (["--backend", "fsdp2-eager"], "no GPU is visible; add --device cpu"),
        ([], "measures one backend; name it with --backend"),
    ],
)
def test_what_cannot_be_measured_is_told(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", "--model", "tiny", "--world-size", "8", "--accumulate", "2", "--sequence", "16"]
    assert main([*command, "--precision", "fp32", "--exact", *options]) == 2
    assert f"--exact: {words}" in capsys.readouterr().err


def test_the_peak_of_ddp_by_hand() -> None:
    """With few tokens: parameters, two moments, buckets, and beside them local gradients or the update's temporaries.

    Reduced gradients are views of the buckets; those that are summed under ``no_sync`` are not.
    """
    cell = make_cell(backend="ddp-deferred", model="8b", world_size=8, global_batch_size=16, sequence_length=16)
    parameters = SIZES["8b"].num_parameters
    for name, copies in (("ddp-deferred", 5), ("ddp-eager", 4)):
        peak = fit.predicted_bytes(dataclasses.replace(cell, backend=name, accumulate=2, optimizer="adamw-fused"))
        assert peak == pytest.approx(4 * copies * parameters, rel=0.07), name


def test_the_activations_of_checkpointed_blocks_by_hand() -> None:
    """Each block keeps its input in bf16; outside of blocks there are cos and sin, and the last norm's tensors."""
    tokens, size = 8192, SIZES["8b"]
    values = {"model": "8b", "world_size": 64, "accumulate": 2, "global_batch_size": 128, "sequence_length": tokens}
    cell = make_cell(backend="fsdp2-eager", **values, precision=Precision.BF16)
    kept, recomputed = (
        fit.predicted_bytes(dataclasses.replace(cell, activation_checkpointing=on)) for on in (False, True)
    )
    assert kept is not None and recomputed is not None
    hidden, query, key = size.hidden_size, size.num_heads * size.head_size, size.num_kv_heads * size.head_size
    norms = 2 * (4 * hidden + 4 + 2 * hidden + 2 * hidden)
    saved = tokens * (norms + 4 * (query + key) + 4 * size.num_heads + 8 * size.intermediate_size)
    assert kept - recomputed == size.num_layers * (saved - 2 * hidden * tokens)


def test_what_is_not_predicted() -> None:
    for changes in (
        {"compiled": True},
        {"backend": "deepspeed-zero3-defaults-eager", "activation_checkpointing": True},
    ):
        assert fit.predicted_bytes(make_cell(**changes)) is None
