"""What fits into a GPU by prediction: on cards of 80 and 16 GB, with references and without, and in the plan."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from bench.backends.base import registry
from bench.cli import main
from bench.forecast import fit
from bench.plan import matrix as matrix_file
from bench.plan.cell import Cell, Device, Precision
from bench.plan.expand import expand
from bench.plan.models import SIZES
from tests.conftest import ROOT, first
from tests.factories import make_cell

BACKENDS = registry()
GIB = 2**30
H100 = 79 * GIB


def on_gpu(backend: str = "fsdp2-deferred", **changes: Any) -> Cell:
    """One sample of 2048 tokens on one GPU per micro-batch, in bf16."""
    values: dict[str, Any] = {
        "model": "135m",
        "device": Device.CUDA,
        "precision": Precision.BF16,
        "world_size": 1,
    }
    values |= {
        "sequence_length": 2048,
        "accumulate": 4,
        "global_batch_size": 4,
        "optimizer": "adamw-fused",
    }
    return make_cell(backend=backend, **(values | changes))


def predicted(cell: Cell) -> int:
    found = fit.predicted_bytes(cell)
    assert found is not None
    return found


def test_a_reference_needs_its_state_and_a_slice() -> None:
    small, large = (on_gpu(global_batch_size=size).reference() for size in (4, 64))
    assert predicted(small) == predicted(large), "a batch of any size is seen in slices of one"
    assert predicted(small) > 16 * SIZES["135m"].num_parameters
    short = [on_gpu(sequence_length=16, global_batch_size=size).reference() for size in (4, 64)]
    assert predicted(short[0]) < predicted(short[1]), "these fit into a slice"


def filled(need: int, *, ranks: int = 1, nccl: bool = False) -> int:
    """The memory of a GPU that ranks with this need each just fill, beside the least that is kept free."""
    return ranks * need + fit.reserve(need, nccl=nccl, ranks=ranks).least


def test_what_no_prediction_counts_is_kept_free() -> None:
    fixed = (781 + 688) * 2**20
    kept = fit.reserve(100 * GIB, nccl=True)
    assert kept == fit.ReservedBytes(fixed + 6 * GIB, fixed + 37 * GIB)
    assert all(re.search("github|docs/", reserve.source) for reserve in fit.reserves(nccl=True))
    cell = on_gpu(virtual=True)
    need = predicted(cell)
    assert fit.too_large([cell], filled(need), 1) == {}
    (reason,) = fit.too_large([cell], filled(need) - 1, 1).values()
    pattern = r"135m needs \d+ GiB .* the GPU has \d+ GiB, .* at least \d.\d GiB are kept free"
    assert re.fullmatch(pattern, reason)
    several = dataclasses.replace(cell, model="3b", world_size=2, global_batch_size=8)
    real = dataclasses.replace(several, virtual=False)
    assert fit.too_large([several], filled(predicted(several)), 2) == {}, (
        "no process group, no NCCL"
    )
    assert fit.too_large([real], filled(predicted(real)), 2).keys() == {real.cell_id}


def test_ranks_on_one_gpu_share_its_memory() -> None:
    """Dealt out in turn: of five ranks on two GPUs one has three."""
    shared = on_gpu(
        "ddp-deferred", world_size=5, accumulate=2, global_batch_size=10, shared_gpu=True
    )
    assert predicted(shared) > predicted(shared.reference()) / 3, (
        "or the reference alone would decide"
    )
    limit = filled(predicted(shared), ranks=3)
    assert fit.too_large([shared], limit, 2) == {}
    (reason,) = fit.too_large([shared], limit - 1, 2).values()
    assert reason.startswith("135m on 3 ranks of one GPU ")
    assert f" {3 * predicted(shared) / 2**30:.0f} GiB by prediction" in reason
    assert fit.too_large([shared], limit - 1, 5) == {}, "each has a GPU"
    alone = dataclasses.replace(shared, shared_gpu=False)
    assert fit.too_large([alone], limit - 1, 2) == {}, "this one would have five GPUs"


@pytest.mark.parametrize("num_gpus", first([1, 8], [1, 2, 4, 8]))
def test_the_gpu_matrix_on_80_gb_skips_nothing_but_8b(num_gpus: int) -> None:
    cells = expand(matrix_file.load("gpu"), BACKENDS, num_gpus).cells
    reasons = fit.too_large(cells, H100, num_gpus)
    large = {cell for cell in cells if cell.cell_id in reasons}
    assert {cell.model for cell in large} == ({"8b"} if num_gpus <= 2 else set())
    if num_gpus == 1:
        (cell,) = (cell for cell in large if not cell.is_reference)
        assert cell.activation_checkpointing and cell.micro_batch_size == 1, "as small as it can be"


@pytest.mark.parametrize("num_gpus", first([1, 8], [1, 2, 4, 8]))
@pytest.mark.parametrize("name", ["H100 80GiB", "H200 141GB"])
def test_the_gpu_matrix_takes_no_longer_than_it_says(
    name: str, num_gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget, which no repeat exceeds and into which all initial repeats fit: fewer have no intervals."""
    made = matrix_file.load("gpu")
    for path in ("bench/matrices/gpu.toml", "docs/gpu.md"):
        assert f"at most {made['budget_s'] / 60:g} minutes" in (ROOT / path).read_text()
    assert main(["plan", "--matrix", "gpu", "--on", f"{num_gpus} x {name}"]) == 0
    pattern = r"about (\d+) min: (\d+) for the first repeat, .* (\d+) for each other"
    found = re.search(pattern, capsys.readouterr().out)
    assert found
    total, first, each = map(int, found.groups())
    assert total == pytest.approx(first + (made["repeats"] - 1) * each, abs=3)
    assert total <= made["budget_s"] / 60


def test_the_matrix_for_a_lease_fits_an_h100_and_its_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In 11 of 15 minutes; what is left is for the machine to start, and to pack."""
    assert main(["plan", "--matrix", "h100-15min", "--on", "1 x H100 80GiB"]) == 0
    out = capsys.readouterr().out
    assert "skipped:" not in out
    found = re.search(r"up to 5 repeats .*: about (\d+) min: (\d+) for the first", out)
    assert found and int(found[1]) <= 11 and int(found[2]) <= 6
    assert "budget of 11 min, " in out and "into which all of them fit" in out
    assert (
        main(["plan", "--matrix", "h100-15min", "--on", "1 x H100 80GiB", "--repeats", "50"]) == 0
    )
    assert "into which all of them fit" not in capsys.readouterr().out


def test_the_plan_of_gpus_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--matrix", "gpu", "--on", "1 x H100 80GiB"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    (large,) = [line for line in lines if " 8b, " in line]
    assert re.search(r"skipped: 8b needs \d+ GiB .* the GPU has 80 GiB$", large)
    assert not [line for line in lines if "CPU build" in line], (
        "what is installed here is not asked"
    )
    assert sum(" reference " in line for line in lines) == 6, (
        "none for a model that is skipped whole"
    )
    assert re.search(r"1 cell skipped\n\d+ trials, up to 5 repeats .*: about \d\d min", out)
    assert main(["plan", "--matrix", "gpu", "--on", "1 x H100 80GiB", "--try-all"]) == 0
    assert "skipped:" not in capsys.readouterr().out
