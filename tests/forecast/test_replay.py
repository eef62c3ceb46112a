"""The replay of a window: what it holds between micro-batches is what formulas say, its peak what is measured."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from bench.forecast import footprint as module
from bench.forecast.footprint import footprint
from bench.forecast.live import ESTIMATED, HELD, Live
from bench.forecast.replay_decoder import Decoder
from bench.judge.formulas import BUILT_IN, expect, layout_of
from bench.launch.launcher import Launcher
from bench.plan.cell import REFERENCES, Cell, Precision, Sync
from tests.conftest import asked
from tests.factories import make_cell
from tests.worlds import measure

BACKENDS = [name for name in BUILT_IN if name not in REFERENCES]
CHOSEN = (
    *("ddp-eager", "fsdp2-deferred", "fsdp2-deferred-resident", "hsdp-eager", "hsdp-deferred-all-reduce"),
    *("deepspeed-zero2-deferred", "deepspeed-zero3-eager"),
)
"""Every way to hold gradients and parameters."""
NEAR = 2e-3
"""Relative difference of a replayed and a measured peak: scalars, and labels that a framework keeps."""


def cells(backend: str) -> list[Cell]:
    """Cells of a backend at several N and W, in both precisions if it runs in both."""
    refused = BUILT_IN[backend].framework == "DeepSpeed" and BUILT_IN[backend].sync is Sync.DEFERRED
    precisions = [Precision.FP32] if refused else list(Precision)
    worlds = (4, 6, 8) if BUILT_IN[backend].replicate else (1, 2, 3, 8)
    return [cell_of(backend, *at) for at in itertools.product((1, 2, 3, 5), worlds, precisions)]


def cell_of(backend: str, n: int, world_size: int, precision: Precision = Precision.FP32, **changes: Any) -> Cell:
    """The tiny model with one sample of 16 tokens; virtual, so that there is only rank 0. HSDP has 2 replicas."""
    values: dict[str, Any] = {"model": "tiny", "sequence_length": 16, "virtual": True} | changes
    values["replicate"] = BUILT_IN[backend].replicate
    batch = n * world_size * values.pop("samples", 1)
    return make_cell(
        backend=backend, accumulate=n, world_size=world_size, precision=precision, global_batch_size=batch, **values
    )


def replay(cell: Cell) -> module.Footprint:
    """The footprint of a cell."""
    layout = layout_of(cell)
    assert layout is not None
    expectation = expect(cell, layout)
    assert expectation is not None
    return footprint(cell, layout, BUILT_IN[cell.backend], expectation.held)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """What is alive, by category, when each forward begins and when the optimizer is about to step."""
    found: list[dict[str, int]] = []
    forward = Decoder.forward

    def watch(decoder: Decoder) -> None:
        found.append(decoder._live.parts())
        forward(decoder)

    class Watched(Live):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "moment" and value == "step":
                found.append(self.parts())
            super().__setattr__(name, value)

    monkeypatch.setattr(Decoder, "forward", watch)
    monkeypatch.setattr(module, "Live", Watched)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_between_micro_batches_it_holds_what_the_formulas_say(backend: str, watched: list[dict[str, int]]) -> None:
    for cell in cells(backend):
        watched.clear()
        replay(cell)
        layout = layout_of(cell)
        assert layout is not None
        expectation = expect(cell, layout)
        assert expectation is not None
        assert len(watched) > 2 or cell.accumulate == 1
        for between in watched[1:-1]:
            assert between == dict.fromkeys((*HELD, *ESTIMATED), 0) | expectation.held, cell.label


@pytest.mark.parametrize(
    ("precision", "n"),
    [
        (Precision.FP32, 3),
        pytest.param(Precision.FP32, 1, marks=pytest.mark.slow),
        pytest.param(Precision.BF16, 3, marks=pytest.mark.slow),
    ],
)
def test_the_replayed_peak_is_the_measured_one(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path: Path, precision: Precision, n: int
) -> None:
    """The tiny model in a virtual world; the tokens that the bench itself holds do not count."""
    chosen = [
        name for name in asked(request, CHOSEN, BACKENDS) if precision in {cell.precision for cell in cells(name)}
    ]
    made = [cell_of(name, n, 4, precision, samples=4) for name in chosen]
    found = measure(launcher, tmp_path, made, "memory")
    apart = {}
    for cell in made:
        memory = found[cell.backend]["memory"]
        apart[cell.backend] = replay(cell).peak / (memory["peak"] - memory["peak_other"]) - 1
    assert apart == pytest.approx(dict.fromkeys(apart, 0.0), abs=NEAR)
