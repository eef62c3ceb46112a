"""Virtual worlds against real ones: rank 0 of W pretended ranks does what rank 0 of W real ranks does, to the byte."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.backends.base import registry
from bench.judge.formulas import expect, layout_of
from bench.launch.launcher import Launcher
from bench.measure.ledger import TensorLedger
from bench.measure.tensors import FakeTensors, tensors
from bench.plan.cell import Cell, Device, Precision, Status
from bench.plan.models import SIZES
from bench.plan.task import SETTLED_WINDOWS, Spec, passes
from bench.workload import load
from tests.conftest import asked, first
from tests.factories import ALL_PASSES, make_cell
from tests.virtual_worlds import measure, world_cell

BACKENDS = [name for name, backend in registry().items() if not backend.not_virtual and not name.endswith("corrected")]
CHOSEN = (
    "ddp-eager",
    "ddp-deferred",
    "fsdp2-eager",
    "fsdp2-deferred",
    "deepspeed-zero2-eager",
    "deepspeed-zero3-eager",
    "lightning-ddp",
    "lightning-deepspeed-zero3",
    "fabric-fsdp2-deferred",
)
FAKEABLE = [name for name in BACKENDS if not registry()[name].not_fake]
IN_BF16 = [
    "fsdp2-deferred",
    "deepspeed-zero2-eager",
    "deepspeed-zero3-eager",
    "lightning-fsdp2",
    "lightning-deepspeed-zero2",
    "fabric-fsdp2-deferred",
]
"""One of every framework, and of both stages of ZeRO."""
ZERO = [name for name in FAKEABLE if "deepspeed" in name]
FSDP2 = [name for name in BACKENDS if registry()[name].framework == "FSDP2"]
N = 2
WIDE = (8, 64)
"""World sizes that only pretended ranks have here; most of the model's parameters have fewer rows than the larger."""
World = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(Device.CPU) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> World:
    """The backends of one world, measured once."""
    known: dict[tuple[int, str], dict[str, Any]] = {}

    def find(world_size: int, kind: str) -> dict[str, Any]:
        if (world_size, kind) not in known:
            every = {"fake": FAKEABLE, "fake zero": ZERO}.get(kind, BACKENDS)
            chosen = asked(request, [name for name in every if name in CHOSEN], every)
            changes = {"virtual": kind != "gloo", "fake_tensors": kind.startswith("fake")}
            cells = [world_cell(name, world_size, **changes) for name in chosen]
            known[world_size, kind] = measure(launcher, tmp_path_factory.mktemp(kind), cells)
        return known[world_size, kind]

    return find


def without_tokens(memory: dict[str, int], tokens: int) -> dict[str, int]:
    """What a rank holds but for so many bytes of tokens, which are there all the time."""
    return {key: size - tokens * (key in ("peak", "held", "peak_other", "held_other")) for key, size in memory.items()}


def token_bytes(num_ranks: int) -> int:
    """Bytes of the int64 tokens of a trial of ``world_cell`` for so many ranks; a sample has 9."""
    return 8 * 9 * N * (SETTLED_WINDOWS + 1) * num_ranks


@pytest.mark.parametrize("backend", first(CHOSEN, BACKENDS))
@pytest.mark.parametrize("world_size", first([2], [2, 4]))
def test_a_virtual_world_communicates_as_a_real_one(world: World, world_size: int, backend: str) -> None:
    pretended, real = world(world_size, "virtual")[backend], world(world_size, "gloo")[backend]
    assert pretended["collectives"] == real["collectives"]
    assert any(row["payload_bytes"] for row in real["collectives"])


@pytest.mark.parametrize("backend", first(CHOSEN, BACKENDS))
@pytest.mark.parametrize("world_size", first([2], [2, 4]))
def test_a_virtual_world_takes_the_memory_of_a_real_one(world: World, world_size: int, backend: str) -> None:
    """To the byte and in every category, but for the tokens of ranks that do not exist."""
    pretended, real = world(world_size, "virtual")[backend]["memory"], world(world_size, "gloo")[backend]["memory"]
    assert without_tokens(pretended, token_bytes(1)) == without_tokens(real, token_bytes(world_size))
    assert pretended["peak"] > pretended["held"] > 0


@pytest.mark.parametrize("backend", first(CHOSEN, FAKEABLE))
def test_fake_tensors_count_as_real_ones(world: World, backend: str) -> None:
    fake, real = world(8, "fake")[backend], world(8, "virtual")[backend]
    assert fake["collectives"] == real["collectives"]
    # Lightning's flags of a byte or an integer, which fake tensors with values of their own keep somewhat longer.
    slack = 64 if "lightning" in backend else 0
    assert fake["memory"] == pytest.approx(real["memory"], abs=slack)


@pytest.mark.parametrize("backend", first(CHOSEN, ZERO))
@pytest.mark.parametrize("world_size", first([64], [2, 4, 64]))
def test_views_that_deepspeed_makes_for_every_rank_are_missed_by_none(
    world: World, world_size: int, backend: str
) -> None:
    """Of fake tensors they are made on demand (``bench.measure.views``), of real ones by DeepSpeed."""
    fake, real = world(world_size, "fake zero")[backend], world(world_size, "virtual")[backend]
    assert fake["collectives"] == real["collectives"]
    assert fake["memory"] == pytest.approx(real["memory"], abs=64 if "lightning" in backend else 0)


@pytest.fixture
def pretended() -> Iterator[DeviceMesh]:
    """A mesh over 8 ranks, of which only this one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


def test_the_whole_tensors_of_which_dtensor_learns_shapes_are_not_counted(pretended: DeviceMesh) -> None:
    ledger = TensorLedger("cpu")
    with FakeTensors(torch.device("cpu")), ledger:
        shard = torch.zeros(1_000)
        DTensor.from_local(shard, pretended, [Shard(0)], run_check=False).erfinv()
    assert ledger.peak == 2 * shard.nbytes


@pytest.fixture(scope="module")
def in_bf16(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    """One backend per framework, in bf16, with real tensors and with fake ones."""
    return {
        fake: measure(
            launcher,
            tmp_path_factory.mktemp("bf16"),
            [world_cell(name, 8, virtual=True, fake_tensors=fake, precision=Precision.BF16) for name in IN_BF16],
        )
        for fake in (False, True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("backend", IN_BF16)
def test_fake_tensors_count_as_real_ones_in_bf16(in_bf16: dict[bool, dict[str, Any]], backend: str) -> None:
    real, fake = (in_bf16[kind][backend] for kind in (False, True))
    assert fake["collectives"] == real["collectives"]
    assert "bfloat16" in {row["dtype"] for row in real["collectives"]}
    slack = 64 if "lightning" in backend else 0
    assert fake["memory"] == pytest.approx(real["memory"], abs=slack)


def padded_bytes(world_size: int) -> int:
    """Bytes of the model's fp32 parameters when the rows of each are padded to a multiple of the world size."""
    model = load(world_cell("fsdp2-eager", 1), None).model()
    rows = [(p.size(0), p.numel() // p.size(0)) for p in model.parameters()]
    return 4 * sum(world_size * math.ceil(size / world_size) * rest for size, rest in rows)


def calls(trial: dict[str, Any], op: str) -> tuple[int, int]:
    """Calls and payload bytes of one operation."""
    rows = [row for row in trial["collectives"] if row["op"] == op]
    return sum(row["calls"] for row in rows), sum(row["payload_bytes"] for row in rows)


@pytest.mark.parametrize("backend", first(CHOSEN, FSDP2))
@pytest.mark.parametrize("world_size", WIDE)
def test_fsdp2_pads_what_it_reduces_in_a_wide_world(world: World, world_size: int, backend: str) -> None:
    reductions = 1 if "deferred" in backend else N
    units = 3  # two blocks and the root
    found = calls(world(world_size, "virtual")[backend], "reduce_scatter")
    assert found == (reductions * units, reductions * padded_bytes(world_size))
    assert padded_bytes(world_size) > padded_bytes(1)


@pytest.mark.parametrize("world_size", WIDE)
def test_ddp_reduces_the_same_in_a_wide_world(world: World, world_size: int) -> None:
    for backend, reductions in (("ddp-eager", N), ("ddp-deferred", 1), ("lightning-ddp", 1)):
        assert calls(world(world_size, "virtual")[backend], "all_reduce")[1] == reductions * padded_bytes(1)
        assert world(world_size, "virtual")[backend]["memory"] == world(2, "virtual")[backend]["memory"]


def test_deferred_gradients_do_not_shrink_with_the_world_and_eager_ones_do(world: World) -> None:
    for world_size in (2, *WIDE):
        trials = world(world_size, "virtual")
        eager, deferred = trials["fsdp2-eager"]["memory"], trials["fsdp2-deferred"]["memory"]
        assert deferred["held_gradients_unsharded"] == padded_bytes(1)
        assert deferred["held_gradients_sharded"] == eager["held_gradients_unsharded"] == 0
        assert eager["held_gradients_sharded"] == padded_bytes(world_size) // world_size
        assert deferred["held"] - eager["held"] == padded_bytes(1) - padded_bytes(world_size) // world_size


def test_zero_shards_go_on_shrinking(world: World) -> None:
    for backend in ("deepspeed-zero2-eager", "deepspeed-zero3-eager"):
        states = [world(size, "virtual")[backend]["memory"]["held_optimizer_state"] for size in (2, *WIDE)]
        assert states == sorted(states, reverse=True)
        assert states[0] / states[-1] == pytest.approx(WIDE[-1] / 2, rel=0.25)


def run(launcher: Launcher, folder: Path, backend: str, *asked: str, **changes: Any) -> Any:
    """One virtual cell through the usual path."""
    cell = world_cell(backend, 512, virtual=True, **changes)
    return launcher.run(Spec(cell=cell, passes=asked, folder=str(folder), reference=""), 120)


@pytest.mark.parametrize("backend", ["fsdp2-eager", "ddp-deferred"])
def test_the_usual_path_times_a_virtual_world_and_has_no_losses(
    launcher: Launcher, tmp_path: Path, backend: str
) -> None:
    outcome = run(launcher, tmp_path, backend, "time", "collectives", "memory")
    assert outcome.status is Status.OK, outcome.reason
    (only,) = outcome.ranks
    time = only["time"]
    assert time["losses"] == []
    assert len(time["step_seconds"]) == 2
    assert all(seconds > 0 for seconds in time["step_seconds"])
    assert (time["num_updates"], time["num_micro_batches"], time["num_fetched"]) == (3, 3 * N, 3 * N)
    assert time["micro_batches_per_update"] == [N]
    assert only["collectives"] and only["memory"]["peak"]


def test_what_cannot_be_is_unsupported_in_one_line(launcher: Launcher, tmp_path: Path) -> None:
    outcome = run(launcher, tmp_path, "ddp-eager", "memory", fake_tensors=True)
    assert outcome.status is Status.UNSUPPORTED
    assert "\n" not in outcome.reason
    assert "ddp-eager cannot run on fake tensors: DDP's reducer" in outcome.reason


def test_refusals_name_the_backend_and_the_reason() -> None:
    backends, virtual = registry(), make_cell(virtual=True).world
    assert "reference cannot be in a virtual world" in virtual.refusal(backends["reference"])
    assert virtual.refusal(backends["ddp-eager"]) == ""
    assert {make_cell().world.refusal(backend) for backend in backends.values()} == {""}


def test_passes_that_compare_values_or_time_nothing_are_left_out() -> None:
    cells = [make_cell(), make_cell(virtual=True), make_cell(virtual=True, fake_tensors=True)]
    assert list(passes(cells).values()) == [ALL_PASSES, ("time", "collectives", "memory"), ("collectives", "memory")]


def large_cell(backend: str, world_size: int) -> Cell:
    """The 8b model on fake tensors, in bf16 with fp32 reduction."""
    values: dict[str, Any] = {"workload": "llama", "model": "8b", "sequence_length": 8192, "precision": Precision.BF16}
    return world_cell(backend, world_size, virtual=True, fake_tensors=True, **values)


def large(launcher: Launcher, folder: Path, world_size: int, *backends: str) -> dict[str, Any]:
    """What backends do with the 8b model."""
    return measure(launcher, folder, [large_cell(name, world_size) for name in backends])


def test_8b_in_1024_ranks_takes_less_than_2_gib(launcher: Launcher, tmp_path: Path) -> None:
    found = large(launcher, tmp_path, 1024, "fsdp2-deferred")["fsdp2-deferred"]
    size = SIZES["8b"]
    assert found["num_parameters"] == size.num_parameters
    assert found["memory"]["held_gradients_unsharded"] == 4 * size.num_parameters
    assert calls(found, "all_gather")[0] == N * (2 * size.num_layers + 1)
    assert calls(found, "reduce_scatter")[0] == size.num_layers + 1
    assert found["peak_rss"] < 2 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["deepspeed-zero2-eager", "deepspeed-zero3-eager"])
def test_zero_at_8b_in_1024_ranks_takes_no_more_memory(launcher: Launcher, tmp_path: Path, backend: str) -> None:
    found = large(launcher, tmp_path, 1024, backend)[backend]
    cell = large_cell(backend, 1024)
    layout = layout_of(cell)
    assert layout is not None
    expected = expect(cell, layout)
    assert expected is not None
    assert found["collectives"] == [dataclasses.asdict(row) for row in expected.collectives]
    assert found["memory"]["held_gradients_sharded"] == expected.held["gradients"]
    assert found["peak_rss"] < 2 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [8, 64])
def test_what_deferring_costs_at_8b(launcher: Launcher, tmp_path: Path, world_size: int) -> None:
    """fsdp2-torchtitan.md, C8 and C10: 26.17 GiB at W = 8, 29.45 at W = 64, and 14.96 more for whole parameters."""
    names = ("fsdp2-eager", "fsdp2-deferred", "fsdp2-deferred-resident")
    trials = large(launcher, tmp_path, world_size, *names)
    eager, deferred, resident = (trials[name]["memory"]["held"] for name in names)
    parameters = SIZES["8b"].num_parameters
    assert deferred - eager == 4 * parameters * (world_size - 1) // world_size
    assert resident - deferred == 2 * parameters
    assert (deferred - eager) / 2**30 == pytest.approx({8: 26.17, 64: 29.45}[world_size], abs=0.01)


def test_a_device_draws_the_weights_of_llama_and_of_no_other_model() -> None:
    llama = load(make_cell(model="micro"), None)
    for workload, drawn in (("llama", "meta"), ("mine:Own", "cpu")):
        made = tensors(make_cell(workload=workload), torch.device("meta")).model(llama.model)
        assert {parameter.device.type for parameter in made.parameters()} == {drawn}
    here = tensors(make_cell(model="micro"), torch.device("cpu")).model(llama.model).state_dict()
    assert all(torch.equal(value, here[name]) for name, value in llama.model().state_dict().items())
