"""The page on memory and bytes: what it says of made runs, and that the one in docs is of the runs in results."""

from __future__ import annotations

import pytest

from bench.backends.deepspeed import ZeroOffload, ZeroStage3
from bench.backends.plain import DDPBackend
from bench.forecast import fit
from bench.judge import gates
from bench.judge.formulas import BUILT_IN, expect, layout_of
from bench.judge.loading import Run, load
from bench.plan.categories import HELD, PEAK, Category
from bench.plan.cell import REFERENCES, Cell
from studies import bytes_page
from studies.bytes_page import Measured, page
from tests.conftest import ROOT
from tests.factories import make_cell, make_manifest, make_record, make_tables

KEYS = {
    "parameters": Category.PARAMETERS_SHARDED,
    "gradients": Category.GRADIENTS_SHARDED,
    "optimizer_state": Category.OPTIMIZER_STATE,
    "communication": Category.COMMUNICATION,
}


def memory_of(cell: Cell, peak: float = 1.0, rank: int = 0) -> dict[str, int]:
    """What a sound trial's memory pass finds on a rank, its peak so many times the predicted one."""
    layout = layout_of(cell)
    assert layout is not None
    expectation = expect(cell, layout, rank=rank)
    assert expectation is not None
    parts = dict.fromkeys(Category, 0) | {KEYS[use]: size for use, size in expectation.held.items()}
    held = {f"{HELD}_{category}": size for category, size in parts.items()}
    predicted = fit.predicted_bytes(cell)
    assert predicted is not None
    of_peak = {f"{PEAK}_{category}": 0 for category in Category} | {
        f"{PEAK}_{Category.OTHER}": 1000
    }
    return {HELD: sum(parts.values()), **held, PEAK: round(predicted * peak) + 1000, **of_peak}


def run_of(*trials: tuple[Cell, dict[str, int]]) -> Run:
    cells = [cell for cell, _ in trials]
    manifest = make_manifest(cells)
    records = [make_record(cell, memory=memory) for cell, memory in trials]
    tables = gates.judge(make_tables(records, manifest), peaks=fit.peaks(cells))
    return Run(
        name="made", tables=tables, cells={cell.cell_id: cell for cell in cells}, manifest=manifest
    )


def test_peaks_that_are_far_and_rows_without_numbers_are_told() -> None:
    near, far, low = (
        make_cell(backend=name) for name in ("ddp-eager", "fsdp2-eager", "fsdp2-deferred")
    )
    run = run_of((near, memory_of(near)), (far, memory_of(far, 1.1)), (low, memory_of(low, 0.9)))
    error = {"accumulate": 16, "error": 1e-9}
    summed = [
        {"backend": "ddp-eager", "precision": "bf16", "dtype": "fp32", "errors": [error]},
        *(
            {
                "backend": name,
                "precision": "bf16",
                "dtype": "unsupported",
                "reason": "made for the test",
            }
            for name in ("fsdp2-eager", "fsdp2-deferred")
        ),
    ]
    text = page([run], summed)
    assert "| tiny | 3 | 33.3 % | 100.0 % | +11.11 %, fsdp2-deferred N=4 W=2 fp32 |" in text
    assert "12 of 12" in text, "held bytes"
    assert "| `fsdp2-*` | bf16 | unsupported | - |" in text
    assert "- made for the test: fsdp2-eager in bf16, fsdp2-deferred in bf16." in text


def test_held_bytes_are_those_of_the_rank_with_most() -> None:
    """In ZeRO-2 the second rank's partition cuts a larger parameter than the first's."""
    cell = make_cell(backend="deepspeed-zero2-eager", world_size=4)
    for rank, right in ((0, False), (1, True)):
        trials = run_of((cell, memory_of(cell, rank=rank))).tables.trials
        assert ("held between micro-batches" not in trials["reason"].iloc[0]) == right


def test_the_predicted_peak_is_in_the_table_without_what_the_bench_holds() -> None:
    cell = make_cell(backend="fsdp2-eager")
    memory = run_of((cell, memory_of(cell))).tables.memory
    row = memory[memory["category"] == PEAK].iloc[0]
    assert row["bytes"] == row["expected_bytes"]


@pytest.fixture(scope="module")
def measured() -> list[Run]:
    return [load(ROOT / folder) for folder in bytes_page.RUNS]


def test_the_page_is_of_the_runs_in_results(measured: list[Run]) -> None:
    assert bytes_page.written(measured) == (ROOT / bytes_page.DOCS).read_text(encoding="utf-8")


def test_what_was_measured_is_what_was_calculated(measured: list[Run]) -> None:
    """Every backend, N of 1 and 4, real worlds of 1 to 4 and virtual ones of 8 and 64; and 8b on fake tensors."""
    found = Measured.of(measured)
    counted = found.collectives.dropna(subset=["expected_calls"])
    assert (counted["calls"] == counted["expected_calls"]).all()
    assert (counted["payload_bytes"] == counted["expected_payload_bytes"]).all()
    memory = found.memory.dropna(subset=["expected_bytes"])
    held = memory[memory["category"].str.startswith(HELD)]
    assert (held["bytes"] == held["expected_bytes"]).all()
    for world_size in (1, 2, 4, 8, 64):
        fitting = {
            name for name, backend in BUILT_IN.items() if world_size >= 2 * backend.replicate
        }
        backends = fitting & set(measured[0].manifest.backends) - set(REFERENCES)
        for n in (1, 4):
            chosen = found.trials[
                (found.trials["world_size"] == world_size) & (found.trials["accumulate"] == n)
            ]
            assert set(chosen["backend"]) >= backends, (world_size, n)


def test_who_holds_which_gradients_is_as_the_page_says(measured: list[Run]) -> None:
    """Where they are sharded, eager sync holds a shard, deferred sync all, ZeRO-3 a shard besides; DDP its buckets."""
    memory = Measured.of(measured).memory
    gradients = memory[
        (memory["category"] == "held_gradients") & (memory["world"] == "real, W = 2, tiny")
    ]
    held = gradients.groupby("backend")["bytes"].max()
    whole, shard = held["ddp-eager"], held["fsdp2-eager"]
    for name, all_held in held.items():
        kind, size = BUILT_IN[name], all_held
        if issubclass(kind, ZeroOffload):
            size -= shard  # on the host, which is the device on a CPU
        if kind.sharding == "none":
            beside = issubclass(kind, DDPBackend) and kind.bucket_views and kind.sync == "deferred"
            assert size == (2 * whole if beside else whole), name
        elif kind.sync == "eager":
            assert shard <= size < 0.6 * whole, name
        else:
            is_zero3 = issubclass(kind, ZeroStage3)
            assert size == whole + (shard if is_zero3 else 0), name
