"""HSDP on four ranks: against loops without the bench (bare_hsdp.py), and formulas against what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.judge.formulas import expect
from bench.launch.launcher import Launcher
from bench.plan.categories import HELD, Category, parts
from bench.plan.cell import Precision
from bench.workload.layout import ROOT, Layout, Parameter
from tests.conftest import HSDP, Command, asked
from tests.factories import make_cell
from tests.worlds import by_rank, layout, world_cell

CALLED = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}
FP32, BF16 = Precision
EVERY = list(itertools.product((1, 2, 4), Precision, (0.0, 1e-3)))
"""N, precision and the limit of the gradient's norm."""
CHOSEN = [(1, FP32, 0.0), (2, BF16, 1e-3), (4, FP32, 0.0)]


@pytest.fixture(scope="module")
def bare() -> dict[str, Any]:
    """What the loops without the bench computed, sent and held, by mode."""
    script = str(Path(__file__).parent / "bare_hsdp.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert list(found) == HSDP
    return found


def test_updates_are_those_of_loops_without_the_bench(bare: dict[str, Any], here: Command) -> None:
    numbers = ["--samples", "40", "--micro-batch", "1", "--accumulate", "4", "--epochs", "2", "--world-size", "4"]
    done = here("semantics", "--backend", ",".join(HSDP), *numbers, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    for one in json.loads(done.stdout):
        right = bare[one["backend"]]["updates"]
        assert [update["samples"] for update in one["updates"]] == [pytest.approx(update) for update in right]
        assert one["verdict"] == "right"
    clipped = here("semantics", "--backend", ",".join(HSDP), *numbers, "--clip", "0.05", "--json")
    assert [one["verdict"] for one in json.loads(clipped.stdout)] == ["right"] * len(HSDP)


@pytest.mark.parametrize("mode", HSDP)
def test_formulas_are_those_of_loops_without_the_bench(bare: dict[str, Any], mode: str) -> None:
    """Of a model of one unit, in windows of four micro-batches, and of the two that an epoch leaves over."""
    one = Layout(parameters=(Parameter(name="weight", shape=(40, 1), unit=ROOT),), gradients=(0,))
    for calls, n in zip(bare[mode]["calls"], (4, 4, 2) * 2, strict=True):
        expected = expect(make_cell(backend=mode, world_size=4, accumulate=n), one)
        assert expected is not None
        counted = Counter({(row.op, row.group): row.calls for row in expected.collectives})
        words = (name.split() for name in calls)
        assert counted == {
            (CALLED[op], mesh.removeprefix("mesh_")): count
            for (op, mesh), count in zip(words, calls.values(), strict=True)
        }
        assert expected.held["gradients"] == 4 * bare[mode]["held"]
    scatters, reduces = (
        bare[mode]["calls"][0][op] for op in ("_reduce_scatter_base_ mesh_shard", "allreduce_ mesh_replicate")
    )
    assert (scatters, reduces) == dict(zip(HSDP, ((4, 4), (4, 1), (1, 1)), strict=True))[mode]


def test_what_is_sent_and_held_is_what_the_formulas_say(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path: Path
) -> None:
    """Of a model that nothing divides, on every rank."""
    cells = [
        world_cell(name, 4, accumulate=n, precision=precision, clip_norm=clip, global_batch_size=4 * n)
        for name, (n, precision, clip) in itertools.product(HSDP, asked(request, CHOSEN, EVERY))
    ]
    for cell, ranks in zip(cells, by_rank(launcher, tmp_path, cells), strict=True):
        for rank, found in enumerate(ranks):
            expected = expect(cell, layout(cell), rank=rank)
            assert expected is not None and found is not None
            assert found["collectives"] == [dataclasses.asdict(row) for row in expected.collectives], cell.label
            held = parts(found["memory"], HELD)
            assert bool(held) == (cell.accumulate > 1)
            by_use = {use: sum(held[c] for c in Category if c.startswith(use)) for use in expected.held if held}
            assert by_use == (expected.held if held else {}), cell.label
