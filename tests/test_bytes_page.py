"""The page on memory and bytes: what it says of made runs."""

from __future__ import annotations

import pytest

from bench.analysis import gates
from bench.analysis.compare import Run
from bench.analysis.footprint import footprint
from bench.analysis.formulas import BUILT_IN, expect, layout_of
from bench.cell import Cell
from bench.probes.categories import HELD, PEAK, Category
from bench.report import bytes_page
from bench.report.bytes_page import page
from bench.tables import build
from tests.factories import make_cell, make_manifest, make_record

KEYS = {
    "parameters": Category.PARAMETERS_SHARDED,
    "gradients": Category.GRADIENTS_SHARDED,
    "optimizer_state": Category.OPTIMIZER_STATE,
    "communication": Category.COMMUNICATION,
}


def memory_of(cell: Cell, peak: float = 1.0, rank: int = 0) -> dict[str, int]:
    """What a sound trial's memory pass finds on a rank, its peak so many times the replayed one."""
    layout = layout_of(cell)
    assert layout is not None
    expectation = expect(cell, layout, rank=rank)
    assert expectation is not None
    parts = dict.fromkeys(Category, 0) | {KEYS[use]: size for use, size in expectation.held.items()}
    held = {f"{HELD}_{category}": size for category, size in parts.items()}
    replayed = footprint(cell, layout, BUILT_IN[cell.backend], expectation.held).peak
    of_peak = {f"{PEAK}_{category}": 0 for category in Category} | {f"{PEAK}_{Category.OTHER}": 1000}
    return {HELD: sum(parts.values()), **held, PEAK: round(replayed * peak) + 1000, **of_peak}


def run_of(*trials: tuple[Cell, dict[str, int]]) -> Run:
    """A judged run of such trials."""
    cells = [cell for cell, _ in trials]
    manifest = make_manifest(cells)
    tables = gates.judge(build([make_record(cell, memory=memory) for cell, memory in trials], manifest), {})
    return Run(name="made", tables=tables, cells={cell.cell_id: cell for cell in cells}, manifest=manifest)


def test_a_peak_that_is_far_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far, known = (make_cell(backend=name) for name in ("ddp-eager", "fsdp2-eager", "fsdp2-deferred"))
    monkeypatch.setitem(bytes_page.DIFFERENCES, "fsdp2-deferred", "made for the test")
    run = run_of((near, memory_of(near)), (far, memory_of(far, 1.1)), (known, memory_of(known, 0.9)))
    text = page([run], [], "python -m bench bytes")
    assert "1 of 3, farthest +11.11 %" in text
    assert "| fsdp2-eager | real, W = 2, tiny | 4 | -9.1 % | not understood |" in text
    assert "| fsdp2-deferred | real, W = 2, tiny | 4 | +11.1 % | made for the test |" in text
    assert "12 of 12" in text, "held bytes"
    assert "Peaks farther away" not in page([run_of((near, memory_of(near)))], [], "")


def test_held_bytes_are_those_of_the_rank_with_most() -> None:
    """In ZeRO-2 the second rank's partition cuts a larger parameter than the first's."""
    cell = make_cell(backend="deepspeed-zero2-eager", world_size=4)
    for rank, right in ((0, False), (1, True)):
        trials = run_of((cell, memory_of(cell, rank=rank))).tables.trials
        assert ("held between micro-batches" not in trials["reason"].iloc[0]) == right


def test_the_replayed_peak_is_in_the_table_without_what_the_bench_holds() -> None:
    cell = make_cell(backend="fsdp2-eager")
    memory = run_of((cell, memory_of(cell))).tables.memory
    row = memory[memory["category"] == PEAK].iloc[0]
    assert row["bytes"] == row["expected_bytes"]
