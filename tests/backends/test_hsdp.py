"""HSDP on four ranks: against loops without the bench (bare_hsdp.py), and formulas against what was measured."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from bench.judge.formulas import expect
from bench.workload.layout import ROOT, Layout, Parameter
from tests.audit.test_scenarios_bare import run_bare
from tests.conftest import HSDP, Command
from tests.factories import make_cell

CALLED = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the loops without the bench computed, sent and held, by mode."""
    found = run_bare("bare_hsdp.py", folder=tmp_path_factory.mktemp("bare"))
    assert list(found) == HSDP
    return found


def test_updates_are_those_of_loops_without_the_bench(bare: dict[str, Any], here: Command) -> None:
    numbers = [
        "--samples",
        "40",
        "--micro-batch",
        "1",
        "--accumulate",
        "4",
        "--epochs",
        "2",
        "--world-size",
        "4",
    ]
    done = here("semantics", "--backend", ",".join(HSDP), *numbers, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    for observation in json.loads(done.stdout):
        right = bare[observation["backend"]]["updates"]
        assert [update["samples"] for update in observation["updates"]] == [
            pytest.approx(update) for update in right
        ]
        assert observation["verdict"] == "right"
    clipped = here("semantics", "--backend", ",".join(HSDP), *numbers, "--clip", "0.05", "--json")
    assert [observation["verdict"] for observation in json.loads(clipped.stdout)] == [
        "right"
    ] * len(HSDP)


@pytest.mark.parametrize("mode", HSDP)
def test_formulas_are_those_of_loops_without_the_bench(bare: dict[str, Any], mode: str) -> None:
    """Of a model of one unit, in windows of four micro-batches, and of the two that an epoch leaves over."""
    layout = Layout(
        parameters=(Parameter(name="weight", shape=(40, 1), unit=ROOT),), gradients=(0,)
    )
    for calls, n in zip(bare[mode]["calls"], (4, 4, 2) * 2, strict=True):
        expected = expect(make_cell(backend=mode, world_size=4, accumulate=n), layout)
        assert expected is not None
        counted = Counter({(row.op, row.group): row.calls for row in expected.collectives})
        words = (name.split() for name in calls)
        assert counted == {
            (CALLED[op], mesh.removeprefix("mesh_")): count
            for (op, mesh), count in zip(words, calls.values(), strict=True)
        }
        assert expected.held["gradients"] == 4 * bare[mode]["held"]
    scatters, reduces = (
        bare[mode]["calls"][0][op]
        for op in ("_reduce_scatter_base_ mesh_shard", "allreduce_ mesh_replicate")
    )
    assert (scatters, reduces) == dict(zip(HSDP, ((4, 4), (4, 1), (1, 1)), strict=True))[mode]
