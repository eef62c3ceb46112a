"""The replay of a window: its ledger, what it holds between micro-batches and at the end, and cases by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.forecast import footprint as module
from bench.forecast.footprint import footprint
from bench.forecast.live import ESTIMATED, HELD, Live, Widths
from bench.forecast.replay_decoder import Decoder
from bench.forecast.replay_frameworks import Framework
from bench.judge.formulas import BUILT_IN, expect, layout_of
from bench.judge.gathers import Coordinator
from bench.launch.launcher import Launcher
from bench.plan.cell import REFERENCES, SGD, Cell, Device, Precision, Sharding, Sync
from bench.plan.models import SIZES, LlamaSize
from bench.workload.layout import llama_layout
from tests.factories import make_cell
from tests.virtual_worlds import measure

BACKENDS = [name for name in BUILT_IN if name not in REFERENCES]
NEAR = 2e-3
"""Relative difference of a replayed and a measured peak: scalars, and labels that a framework keeps."""


def cells(backend: str) -> list[Cell]:
    """Of a backend: at several N and W, and in both precisions if it runs in both."""
    refused = BUILT_IN[backend].framework == "DeepSpeed" and BUILT_IN[backend].sync is Sync.DEFERRED
    precisions = [Precision.FP32] if refused else list(Precision)
    return [cell_of(backend, *at) for at in itertools.product((1, 2, 3, 5), (1, 2, 3, 8), precisions)]


def cell_of(backend: str, n: int, world_size: int, precision: Precision = Precision.FP32, **changes: Any) -> Cell:
    """The tiny model with one sample of 16 tokens; virtual, so that there is only rank 0."""
    values: dict[str, Any] = {"model": "tiny", "sequence_length": 16, "virtual": True} | changes
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


def test_the_ledger_adds_up_and_remembers_the_most() -> None:
    live = Live()
    live.moment = "first"
    live.make("a", "parameters", 5)
    live.make("b", "activations", 7)
    live.moment = "second"
    live.rename("b", "c", "gradients")
    live.drop("a")
    live.make("d", "activations", 1)
    assert (live.peak, live.peak_moment) == (12, "first")
    assert live.peak_parts == dict.fromkeys((*HELD, *ESTIMATED), 0) | {"parameters": 5, "activations": 7}
    assert live.parts() == dict.fromkeys((*HELD, *ESTIMATED), 0) | {"gradients": 7, "activations": 1}
    assert "c" in live and "b" not in live
    live.forget(["b", "c"])
    assert "c" not in live
    with pytest.raises(AssertionError, match="d is alive already"):
        live.make("d", "activations", 1)
    with pytest.raises(KeyError):
        live.drop("a")


def saved_by_block(size: LlamaSize, tokens: int, widths: Widths) -> int:
    """Bytes that autograd saves for a block of the decoder: what two blocks more have more, by half."""
    found = []
    for num_layers in (1, 3):
        of = dataclasses.replace(size, num_layers=num_layers)
        live, layout = Live(), llama_layout(of)
        framework = Framework(live, make_cell(), layout, BUILT_IN["ddp-eager"], 0)
        decoder = Decoder(
            live, framework, layout, of, samples=1, sequence_length=tokens, widths=widths, saved_bytes=None
        )
        decoder.forward()
        found.append(live.parts()["activations"])
    assert (found[1] - found[0]) % 2 == 0
    return (found[1] - found[0]) // 2


def test_activations_by_hand() -> None:
    """As counted by saved_tensors_hooks on the tiny model with 2 x 64 tokens, per block."""
    of = {
        (bf16, autocast): saved_by_block(SIZES["tiny"], 128, Widths.of(bf16=bf16, autocast=autocast))
        for bf16, autocast in ((False, False), (True, False), (True, True))
    }
    assert list(of.values()) == [
        2_624_512,
        1_444_864,
        3_247_104 - 2 * (2**16 + 2**17) - 3 * 360_448,
    ]


def test_autograd_saves_what_is_counted() -> None:
    import torch

    from bench.workload import WorkloadSpec
    from bench.workload.llama import LlamaWorkload

    saved: list[int] = []
    for num_layers in (1, 2):
        workload = LlamaWorkload(WorkloadSpec(model="tiny", sequence_length=16, seed=0, corpus=None))
        workload._size = dataclasses.replace(SIZES["tiny"], num_layers=num_layers)
        model = workload.model()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor, found: dict[int, torch.UntypedStorage] = storages) -> torch.Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = workload.loss(model, workload.data(3))
        saved.append(sum(s.nbytes() for key, s in storages.items() if key not in weights))
        del loss
    assert saved[1] - saved[0] == saved_by_block(SIZES["tiny"], 48, Widths.of(bf16=False, autocast=False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_between_micro_batches_it_holds_what_the_formulas_say(backend: str, watched: list[dict[str, int]]) -> None:
    for cell in cells(backend):
        watched.clear()
        replay(cell)
        layout = layout_of(cell)
        assert layout is not None
        expectation = expect(cell, layout)
        assert expectation is not None
        for between in watched[1:-1]:
            assert between == dict.fromkeys((*HELD, *ESTIMATED), 0) | expectation.held, cell.label


@pytest.mark.parametrize("backend", BACKENDS)
def test_before_the_step_there_are_parameters_and_reduced_gradients(
    backend: str, watched: list[dict[str, int]]
) -> None:
    """Nothing is forgotten anywhere: what was made for a micro-batch is gone."""
    for cell in cells(backend):
        watched.clear()
        replay(cell)
        layout = layout_of(cell)
        assert layout is not None
        expectation = expect(cell, layout)
        assert expectation is not None
        left = {name: size for name, size in watched[-1].items() if size}
        assert left.keys() <= {"parameters", "optimizer_state", "gradients", "communication"}, cell.label
        assert left.get("communication", 0) == expectation.held["communication"]
        sharding = BUILT_IN[backend].sharding
        if sharding is not Sharding.NONE:  # FSDP2's and ZeRO's shards, and what of the parameters lies in a partition
            assert left["gradients"] <= 4 * (layout.num_parameters // cell.world_size + 2 * layout.block_parameters)
        if sharding is Sharding.OPTIMIZER:
            assert left["parameters"] < expectation.held["parameters"], "what was gathered for the window is gone"


def test_ddp_by_hand() -> None:
    """Sixteen tokens: the update is the peak. Five times P in fp32, of which two are moments, and their root."""
    parameters = SIZES["tiny"].num_parameters
    counters = 4 * len(llama_layout(SIZES["tiny"]).parameters)
    found = replay(cell_of("ddp-eager", 4, 2))
    assert found.moment == "step"
    assert found.peak == 6 * 4 * parameters + counters + counters // 2


def test_fsdp2_by_hand() -> None:
    """The backward of the query's product in the second block from the end: all of its gradients but a norm's.

    Gathered are the root, the block, and the one ahead; the reduction of the block before is there. Of tokens x hidden:
    what the norm before saved, three; the gradients of query and residual, the sum of the value's and the key's, and
    the product's own. Of the two blocks to come all that they saved.
    """
    size = SIZES["tiny"]
    layout = llama_layout(size)
    block, root, whole = 4 * layout.block_parameters, 4 * (2 * 256 * 256 + 256), 4 * layout.num_parameters
    tokens, angles = 16 * 4, 2 * 4 * 16 * size.head_size
    found = replay(cell_of("fsdp2-eager", 3, 2, samples=4))
    saved = saved_by_block(size, tokens, Widths.of(bf16=False, autocast=False))
    waiting = 4 * 256 * 256  # the head's gradient; the last norm's has a kibibyte
    assert found.peak == (
        (4 * whole // 2 + 4 * len(layout.parameters))  # shards, gradients, moments
        + (root + block + block)
        + block
        + (block - 4 * 256 + waiting + 4 * 256)
        + (2 * saved + angles + 4 * tokens * (7 * 256 + 1))
    )


def test_a_window_of_more_than_three_micro_batches_takes_no_more() -> None:
    for backend, precision in itertools.product(BACKENDS, Precision):
        assert replay(cell_of(backend, 3, 4, precision)) == replay(cell_of(backend, 9, 4, precision))


def test_without_moments_the_step_needs_no_root() -> None:
    assert replay(cell_of("ddp-deferred", 2, 2, optimizer=SGD)).moment != "step"


def test_lightning_runs_its_first_forward_beside_the_last_window_gradients() -> None:
    late, early = (replay(cell_of(name, 1, 2, samples=64)) for name in ("lightning-ddp", "ddp-deferred"))
    assert late.peak > early.peak
    assert late.moment == "loss" and late.parts["gradients"] == 4 * SIZES["tiny"].num_parameters


@pytest.mark.parametrize("backend", ["deepspeed-zero2-eager", "deepspeed-zero2-deferred"])
def test_of_zero2_the_rank_with_most_is_taken_where_all_exist(backend: str) -> None:
    """The last rank's parameters are reduced first, beside more activations."""
    real, first = (replay(cell_of(backend, 2, 2, virtual=virtual)) for virtual in (False, True))
    assert real.peak >= first.peak
    assert (real.peak > first.peak) == (BUILT_IN[backend].sync is Sync.EAGER)


def test_the_coordinator_tells_what_comes_and_goes() -> None:
    """Everything that is gathered arrives, is forgotten once all of it was asked for, and is released."""
    layout = llama_layout(SIZES["micro"])
    alive: set[int] = set()
    flying: list[tuple[int, ...]] = []

    class Told(Coordinator):
        def gathered(self, parameters: tuple[int, ...]) -> None:
            flying.append(parameters)

        def arrived(self, parameters: tuple[int, ...]) -> None:
            assert parameters in flying and not alive & set(parameters)
            alive.update(parameters)

        def forgotten(self, parameters: tuple[int, ...]) -> None:
            flying.remove(parameters)

        def released(self, parameter: int) -> None:
            alive.remove(parameter)

    told = Told(layout, prefetch=layout.block_parameters, max_live=2 * layout.block_parameters)
    for _ in range(3):
        told.micro_batch()
    told.release_all()
    assert not alive and not flying


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(Device.CPU) as launcher:
        yield launcher


@pytest.mark.parametrize(
    ("precision", "n"),
    [
        (Precision.FP32, 3),
        pytest.param(Precision.FP32, 1, marks=pytest.mark.slow),
        pytest.param(Precision.BF16, 3, marks=pytest.mark.slow),
    ],
)
def test_the_replayed_peak_is_the_measured_one(
    launcher: Launcher, tmp_path: Path, precision: Precision, n: int
) -> None:
    """Of every backend, on the tiny model in a virtual world; but for the tokens that the bench itself holds."""
    chosen = [name for name in BACKENDS if precision in {cell.precision for cell in cells(name)}]
    asked = [cell_of(name, n, 2, precision, samples=4) for name in chosen]
    found = measure(launcher, tmp_path, asked, ("memory",))
    apart = {}
    for cell in asked:
        memory = found[cell.backend]["memory"]
        apart[cell.backend] = replay(cell).peak / (memory["peak"] - memory["peak_other"]) - 1
    assert apart == pytest.approx(dict.fromkeys(apart, 0.0), abs=NEAR)
