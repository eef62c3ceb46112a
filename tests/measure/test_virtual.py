"""Real, virtual and fake worlds: all send and hold what the formulas say, and hold the same at the peak."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.backends.base import registry
from bench.judge.formulas import BUILT_IN, expect
from bench.launch.launcher import Launcher
from bench.measure.ledger import TensorLedger
from bench.measure.tensors import FakeTensors, tensors
from bench.plan.categories import HELD, PEAK, UNTRACKED
from bench.plan.cell import REFERENCE, Cell, Precision, Status
from bench.plan.task import SETTLED_WINDOWS, Spec, passes
from bench.workload import load
from tests.conftest import asked, first
from tests.factories import ALL_PASSES, make_cell
from tests.measure.test_memory import parts
from tests.worlds import by_rank, layout, measure, pretended, world_cell

BACKENDS = [name for name in BUILT_IN if name != REFERENCE and not name.endswith("corrected")]
VIRTUAL = [name for name in BACKENDS if not registry()[name].refuses.virtual]
FAKEABLE = [name for name in VIRTUAL if not registry()[name].refuses.fake]
CHOSEN = (
    "ddp-eager",
    "fsdp2-eager",
    "fsdp2-deferred-resident",
    "hsdp-deferred-all-reduce",
    "deepspeed-zero2-deferred",
    "deepspeed-zero3-eager",
    "deepspeed-zero2-offload",
    "deepspeed-zero3-offload",
    "fsdp2-offload-eager",
    "fabric-fsdp2-deferred",
    "hf-trainer-fsdp2",
    "torchtitan-eager",
)
"""One of every framework, sharding and sync."""
N = 2
FP32, BF16 = Precision
World = tuple[str, int, Precision]
"""How it is made, its size, and the precision of its cells."""
DEFAULT: list[World] = [
    ("gloo", 3, FP32),
    ("gloo", 4, BF16),
    ("virtual", 8, FP32),
    ("fake", 64, BF16),
]
EVERY: list[World] = [
    *(("gloo", size, precision) for size in (1, 2, 3, 4) for precision in Precision),
    *(("virtual", size, precision) for size in (2, 8, 64) for precision in Precision),
    *(("fake", size, precision) for size in (8, 64) for precision in Precision),
]


def cells_of(
    request: pytest.FixtureRequest, kind: str, size: int, precision: Precision
) -> list[Cell]:
    """Cells of the model that nothing divides, for some backends or, with --all, for every one that can."""
    every = {"gloo": BACKENDS, "virtual": VIRTUAL, "fake": FAKEABLE}[kind]
    if kind == "gloo" and size == 1:
        every = [name for name in every if "lightning-deepspeed" not in name]
    if (
        precision is BF16 and kind == "gloo"
    ):  # its safe_set_full_fp32_param fails on what the ranks do not divide
        every = [name for name in every if not name.startswith("deepspeed-zero3")]
    changes = {"virtual": kind != "gloo", "fake_tensors": kind == "fake", "precision": precision}
    cells = [
        world_cell(name, size, **changes)
        for name in asked(request, [n for n in CHOSEN if n in every], every)
    ]
    return [cell for cell in cells if cell.fits_mesh]


@pytest.mark.parametrize("world", first(DEFAULT, EVERY), ids=str)
def test_what_is_sent_and_held_is_what_the_formulas_say(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path: Path, world: World
) -> None:
    """Also where every shard and bucket is padded or cut: no rank divides a parameter, a table is above any bucket."""
    cells = cells_of(request, *world)
    wrong = []
    for cell, ranks in zip(cells, by_rank(launcher, tmp_path, cells), strict=True):
        for rank, found in enumerate(ranks):
            if found is None:
                assert (
                    cell.precision is BF16
                    and cell.backend.endswith("-deferred")
                    and "deepspeed" in cell.backend
                )
                continue
            expected = expect(cell, layout(cell), rank=rank)
            if (
                expected is None
            ):  # nobody knows which parts of a model of one's own Accelerate shards
                assert cell.backend.startswith("accelerate-fsdp2")
                continue
            held = parts(found["memory"], HELD)
            by_use = {use: sum(held[c] for c in held if c.startswith(use)) for use in expected.held}
            counted = [dataclasses.asdict(row) for row in expected.collectives]
            held_by_use = dict(expected.held)
            slack = flags(cell.backend) if world[0] == "fake" else 0
            if found["collectives"] != counted or by_use != pytest.approx(held_by_use, abs=slack):
                wrong.append((cell.label, rank, found["collectives"], counted, by_use, held_by_use))
            for total in (PEAK, HELD):
                assert sum(parts(found["memory"], total).values()) == found["memory"][total] > 0
    assert not wrong


def flags(backend: str) -> int:
    """Bytes of Lightning's flags of a byte or an integer, which fake tensors with values of their own keep longer."""
    return 64 if "lightning" in backend else 0


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_virtual_world_takes_the_memory_of_a_real_one(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path: Path, size: int
) -> None:
    """To the byte and in every category, but for the tokens of ranks that do not exist."""
    names = asked(request, ("ddp-deferred", "fsdp2-deferred", "deepspeed-zero2-eager"), VIRTUAL)
    real, virtual = (
        measure(
            launcher,
            tmp_path / str(virtual),
            [world_cell(name, size, virtual=virtual) for name in names],
        )
        for virtual in (False, True)
    )
    for name in names:
        assert virtual[name]["collectives"] == real[name]["collectives"]
        assert without_tokens(virtual[name]["memory"], 1) == without_tokens(
            real[name]["memory"], size
        )


@pytest.mark.parametrize("size", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_fake_tensors_count_as_real_ones(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path: Path, size: int
) -> None:
    """DeepSpeed makes views for every rank, and FSDP2 shards."""
    names = asked(
        request, ("fsdp2-deferred", "deepspeed-zero2-eager", "deepspeed-zero3-eager"), FAKEABLE
    )
    real, fake = (
        measure(
            launcher,
            tmp_path / str(fake),
            [world_cell(name, size, virtual=True, fake_tensors=fake) for name in names],
        )
        for fake in (False, True)
    )
    for name in names:
        tracked = (without_malloc(found[name]["memory"]) for found in (fake, real))
        assert next(tracked) == pytest.approx(next(tracked), abs=flags(name))


def without_tokens(memory: dict[str, int], num_ranks: int) -> dict[str, int]:
    """What a rank holds but for so many ranks' int64 tokens, 9 to a sample, which are there all the time."""
    tokens = 8 * 9 * N * (SETTLED_WINDOWS + 1) * num_ranks
    return {
        key: size - tokens * (key in ("peak", "held", "peak_other", "held_other"))
        for key, size in without_malloc(memory).items()
    }


def without_malloc(memory: dict[str, int]) -> dict[str, int]:
    """What is tracked: what else malloc has in use differs from process to process, and fake tensors have none."""
    return {key: size for key, size in memory.items() if not key.endswith(UNTRACKED)}


def test_the_whole_tensors_of_which_dtensor_learns_shapes_are_not_counted() -> None:
    ledger = TensorLedger("cpu")
    with pretended(8):
        mesh = init_device_mesh("cpu", (8,))
        with FakeTensors(torch.device("cpu")), ledger:
            shard = torch.zeros(1_000)
            DTensor.from_local(shard, mesh, [Shard(0)], run_check=False).erfinv()
    assert ledger.peak == 2 * shard.nbytes


def run(launcher: Launcher, folder: Path, backend: str, *asked: str, **changes: Any) -> Any:
    """One virtual cell through the usual path."""
    cell = world_cell(backend, 512, virtual=True, **changes)
    return launcher.run(Spec(cell=cell, passes=asked, folder=str(folder), reference=""), 120)


def test_the_usual_path_times_a_virtual_world_and_has_no_losses(
    launcher: Launcher, tmp_path: Path
) -> None:
    outcome = run(launcher, tmp_path, "ddp-deferred", "time", "collectives", "memory")
    assert outcome.status is Status.OK, outcome.reason
    (only,) = outcome.ranks
    time = only["time"]
    assert time["losses"] == []
    assert len(time["step_seconds"]) == 2
    assert all(seconds > 0 for seconds in time["step_seconds"])
    assert (time["num_updates"], time["num_micro_batches"], time["num_fetched"]) == (
        3,
        3 * N,
        3 * N,
    )
    assert time["micro_batches_per_update"] == [N]
    assert only["collectives"] and only["memory"]["peak"]


def test_what_cannot_be_is_unsupported_in_one_line(launcher: Launcher, tmp_path: Path) -> None:
    outcome = run(launcher, tmp_path, "ddp-eager", "memory", fake_tensors=True)
    assert outcome.status is Status.UNSUPPORTED
    assert "\n" not in outcome.reason
    assert "ddp-eager cannot run on fake tensors: DDP's reducer" in outcome.reason


def test_passes_that_compare_values_or_time_nothing_are_left_out() -> None:
    cells = [make_cell(), make_cell(virtual=True), make_cell(virtual=True, fake_tensors=True)]
    assert list(passes(cells).values()) == [
        ALL_PASSES,
        ("time", "collectives", "memory"),
        ("collectives", "memory"),
    ]


def test_a_device_draws_the_weights_of_a_large_shipped_model_and_of_no_other() -> None:
    llama = load(make_cell(model="micro"), None)
    for cell, drawn in (
        (make_cell(model="1b"), "meta"),
        (make_cell(), "cpu"),
        (make_cell(workload="mine:Own"), "cpu"),
    ):
        made = tensors(cell, torch.device("meta")).model(llama.model)
        assert {parameter.device.type for parameter in made.parameters()} == {drawn}
    here = tensors(make_cell(model="micro"), torch.device("cpu")).model(llama.model).state_dict()
    assert all(torch.equal(value, here[name]) for name, value in llama.model().state_dict().items())
