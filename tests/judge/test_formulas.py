"""Formulas as arithmetic: layouts against built models, published and hand-made cases, padding, buckets, held bytes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.backends.base import EXTRA_BACKENDS, Backend, registry
from bench.backends.deepspeed import DeepSpeedZero3Eager
from bench.backends.plain import Reference
from bench.backends.zero_options import zero_options
from bench.errors import InputError
from bench.judge import formulas
from bench.judge.formulas import Expectation, expect, layout_of, wire_bytes
from bench.plan.cell import Device, Precision
from bench.plan.models import SIZES
from bench.workload.layout import Layout, llama_layout, record
from tests import worlds
from tests.factories import make_backend, make_cell

P_8B = SIZES["8b"].num_parameters
G_8B = SIZES["8b"].num_layers + 1
GIB = 2**30
PERSISTENT = 3 + 4 * 6
"""Parameters of the tiny model of at most 1e5 elements."""


def of(backend: str, layout: Layout | None = None, rank: int = 0, **changes: Any) -> Expectation:
    """The expectation of one cell; of the tiny model unless a layout is given."""
    cell = make_cell(backend=backend, **changes)
    found = expect(cell, layout or layout_of(cell) or worlds.layout(cell), rank=rank)
    assert found is not None
    return found


def calls(expectation: Expectation, op: str, dtype: str = "float32") -> tuple[int, int]:
    """Calls and payload bytes of one operation."""
    rows = [row for row in expectation.collectives if (row.op, row.dtype) == (op, dtype)]
    return sum(row.calls for row in rows), sum(row.payload_bytes for row in rows)


def of_8b(backend: str, **changes: Any) -> Expectation:
    """At the scale of 8 billion parameters, in bf16."""
    values: dict[str, Any] = {
        "model": "8b",
        "precision": Precision.BF16,
        "accumulate": 4,
        "world_size": 8,
    }
    return of(backend, **(values | changes))


@pytest.mark.torch
@pytest.mark.parametrize("tied", [False, True])
def test_the_layout_of_the_tiny_model_is_that_of_the_built_one(tied: bool) -> None:
    from bench.workload import WorkloadSpec
    from bench.workload.llama import LlamaWorkload

    workload = LlamaWorkload(WorkloadSpec(model="tiny", sequence_length=4, seed=0, corpus=None))
    workload._size = dataclasses.replace(SIZES["tiny"], num_layers=3, tied=tied)
    model = workload.model()
    assert record(model, workload.blocks(model), workload.loss, workload.data(1)) == llama_layout(
        workload._size
    )
    assert all(p.grad is None for p in model.parameters()), "recording leaves no gradients"


@pytest.mark.torch
@pytest.mark.parametrize("name", SIZES)
def test_names_and_shapes_are_those_of_the_built_model(name: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = SIZES[name]
    config = LlamaConfig(
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        intermediate_size=size.intermediate_size,
        vocab_size=size.vocab_size,
        tie_word_embeddings=size.tied,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    layout = llama_layout(size)
    assert {p.name: p.shape for p in layout.parameters} == {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }
    assert [p.name for p in layout.parameters] == [n for n, _ in model.named_parameters()]
    assert [size for _, size in layout.buffers] == [b.nbytes for b in model.buffers()]
    assert layout.num_parameters == size.num_parameters
    assert layout.block_parameters == size.num_block_parameters
    assert len(layout.units) == size.num_layers + 1


def test_every_built_in_backend_has_a_formula_and_a_plugin_none() -> None:
    for name, backend in registry().items():
        if backend.__module__.startswith("bench.backends."):
            expectation = of(name)
            assert set(expectation.held) == {
                "parameters",
                "gradients",
                "optimizer_state",
                "communication",
            }
    assert expect(make_cell(backend="somebodys"), llama_layout(SIZES["tiny"])) is None
    assert layout_of(make_cell(workload="mine:Own")) is None


PLUGIN = """
from bench.backends.plain import DDPDeferred


def sends(backend, cell, layout, rank, settings):
    held = {{"parameters": 4 * layout.num_parameters, "gradients": 0, "optimizer_state": 0, "communication": 0}}
    return [("all_reduce", "float32", layout.num_parameters, cell.accumulate)], held


class Mine(DDPDeferred):
    name = "somebodys"
    {formula}
"""


@pytest.mark.parametrize(
    ("formula", "calls"),
    [("formula = sends", 4), ("formula = 'made_plugin:sends'", 4), ("framework = 'its own'", None)],
)
def test_a_backend_of_another_package_may_bring_its_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formula: str, calls: int | None
) -> None:
    """It does not inherit one: nobody knows what the package has changed."""
    (tmp_path / "made_plugin.py").write_text(PLUGIN.format(formula=formula))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "made_plugin", raising=False)
    monkeypatch.setenv(EXTRA_BACKENDS, "made_plugin:Mine")
    formulas._of_another_package.cache_clear()
    layout = llama_layout(SIZES["tiny"])
    found = expect(make_cell(backend="somebodys", accumulate=4), layout)
    formulas._of_another_package.cache_clear()
    assert (found and [(row.op, row.calls) for row in found.collectives]) == (
        calls and [("all_reduce", calls)]
    )


def test_a_formula_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Any:
        raise KeyError("zero_optimization")

    made = make_backend("made")
    made.formula = fails
    monkeypatch.setattr(formulas, "_of_another_package", lambda name, extra: made)
    with pytest.raises(
        InputError, match=r"backend 'made': its formula fails \('zero_optimization'\)"
    ):
        expect(make_cell(backend="made"), llama_layout(SIZES["tiny"]))


def test_a_formula_that_cannot_be_loaded_is_named() -> None:
    made = make_backend("made")
    made.formula = "no_such_package:formula"
    with pytest.raises(
        InputError, match="backend 'made': its formula 'no_such_package:formula' cannot be loaded"
    ):
        formulas.formula_of(made)


@pytest.mark.parametrize("base", [base for base in formulas.FORMULAS if base is not Reference])
def test_a_formula_refuses_a_backend_of_another_class(base: type[Backend]) -> None:
    formula = formulas.FORMULAS[base]
    with pytest.raises(TypeError, match=f"Reference is not made from {base.__name__}"):
        formula(Reference, make_cell(), llama_layout(SIZES["tiny"]), 0, {})


@pytest.mark.parametrize("n", [1, 4, 16])
def test_c1_c2_c6_at_8b(n: int) -> None:
    """Reduce-scatters NG or G of 4P; all-gathers N(2G - 1) of 2P, the root's part once per micro-batch."""
    eager, deferred = of_8b("fsdp2-eager", accumulate=n), of_8b("fsdp2-deferred", accumulate=n)
    assert calls(eager, "reduce_scatter") == (n * G_8B, n * 4 * P_8B)
    assert calls(deferred, "reduce_scatter") == (G_8B, 4 * P_8B)
    root = 2 * 128_256 * 4096 + 4096
    assert calls(eager, "all_gather", "bfloat16") == (n * (2 * G_8B - 1), n * 2 * (2 * P_8B - root))
    assert calls(deferred, "all_gather", "bfloat16") == calls(eager, "all_gather", "bfloat16")
    kept = of_8b("fsdp2-zero2-eager", accumulate=n)
    assert calls(kept, "all_gather", "bfloat16") == (n * G_8B, n * 2 * P_8B)


@pytest.mark.parametrize(("world_size", "padding"), [(8, 0), (64, 0), (1024, 2 * 768 * 4096)])
def test_c7_to_c9_held_gradients_at_8b(world_size: int, padding: int) -> None:
    """Up to the rows that embedding and head are padded by: 128,256 is no multiple of 1024."""
    eager = of_8b("fsdp2-eager", world_size=world_size).held
    deferred = of_8b("fsdp2-deferred", world_size=world_size).held
    assert eager["gradients"] * world_size == 4 * (P_8B + padding)
    assert deferred["gradients"] == 4 * P_8B, "deferred does not shrink with W"
    assert of_8b("fsdp2-deferred", world_size=world_size, accumulate=64).held == deferred
    if world_size == 8:
        assert (deferred["gradients"] - eager["gradients"]) / GIB == pytest.approx(26.17, abs=0.01)


def test_held_bytes_at_8b_are_those_of_the_research() -> None:
    held = of_8b("fsdp2-eager").held
    found = {name: round(size / GIB, 2) for name, size in held.items()}
    assert found == {
        "parameters": 3.74,
        "gradients": 3.74,
        "optimizer_state": 7.48,
        "communication": 0,
    }
    resident = of_8b("fsdp2-deferred-resident").held["parameters"] - held["parameters"]
    assert resident == 2 * P_8B, "C10"


@pytest.mark.parametrize(
    ("op", "factor"),
    [("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_reduce", 1.5), ("broadcast", 1.0)],
)
def test_wire_bytes_of_a_ring(op: str, factor: float) -> None:
    assert wire_bytes(op, 800, 4) == 800 * factor
    assert wire_bytes(op, 800, 1) == 0


def test_zero3_gathers_a_block_at_a_time_or_as_deepspeed_does() -> None:
    """By hand, tiny: two gathers of each of 4 blocks, and of what is outside three; by default all in one.

    Parameters of up to 1e5 elements stay gathered there, and each is gathered again after an update: of a block all
    but queries, output and the MLP's three.
    """
    for n in (1, 3):
        assert calls(of("deepspeed-zero3-eager", accumulate=n), "all_gather")[0] == n * (2 * 4 + 3)
        assert (
            calls(of("deepspeed-zero3-defaults-eager", accumulate=n), "all_gather")[0]
            == n + PERSISTENT
        )
    small = [p.numel for p in llama_layout(SIZES["tiny"]).parameters if p.numel <= 1e5]
    assert len(small) == PERSISTENT
    kept = [of(f"deepspeed-zero3-{form}eager").held["parameters"] for form in ("", "defaults-")]
    assert kept[1] - kept[0] == 4 * sum(small)


@pytest.mark.parametrize("form", ["", "defaults-"])
def test_buckets_of_zero2_are_those_of_ddp_or_of_deepspeed(form: str) -> None:
    """8b in bf16: 25 MiB of fp32 elements hold less than half of a block."""
    sent, _ = calls(of_8b(f"deepspeed-zero2-{form}eager", accumulate=1), "all_reduce")
    assert (sent > P_8B / (2**25)) == (form == ""), sent


@pytest.mark.parametrize("n", [2, 4])
def test_ddp_holds_its_buckets_once_and_deferred_sums_beside_them(n: int) -> None:
    whole = 4 * SIZES["tiny"].num_parameters
    held = {
        name: of(name, accumulate=n).held
        for name in ("ddp-eager", "ddp-deferred", "hf-trainer-ddp")
    }
    assert {name: (of["gradients"], of["communication"]) for name, of in held.items()} == {
        "ddp-eager": (whole, 0),
        "ddp-deferred": (2 * whole, 0),
        "hf-trainer-ddp": (whole, whole),
    }


@pytest.mark.parametrize("n", [1, 4])
def test_what_fsdp2_offloads_by_hand(n: int) -> None:
    """Shards in fp32, copied for each of N(2G - 1) gathers, gradients once per reduction; W = 8 divides 8b."""
    shard, root = 4 * P_8B // 8, 4 * (2 * 128_256 * 4096 + 4096) // 8
    eager, deferred = (
        of_8b(f"fsdp2-offload-{sync}", accumulate=n, device=Device.CUDA)
        for sync in ("eager", "deferred")
    )
    assert eager.held == dict.fromkeys(eager.held, 0)
    assert deferred.held["gradients"] == 4 * P_8B
    for found, reductions in ((eager, n), (deferred, 1)):
        assert found.beside["copied_to_device"] == n * (2 * shard - root)
        assert found.beside["copied_to_host"] == reductions * shard
        assert found.beside["host_held_parameters"] == shard
    assert eager.beside["host_held_pinned"] == 2 * shard
    on_cpu = of_8b("fsdp2-offload-eager", accumulate=n)
    assert (on_cpu.held, on_cpu.beside) == (of_8b("fsdp2-eager", accumulate=n).held, {})


def test_what_zero_offloads_by_hand() -> None:
    """On one rank nothing is padded: 4P of masters, their gradient and, in fp32, sums of every micro-batch."""
    whole = 4 * SIZES["tiny"].num_parameters
    zero2 = of("deepspeed-zero2-offload", accumulate=3, world_size=1, device=Device.CUDA).beside
    assert zero2["host_held_gradients"] == 2 * whole
    assert zero2["copied_to_host"] == 3 * whole + whole
    assert zero2["copied_to_device"] == 2 * whole + whole
    zero3 = of("deepspeed-zero3-offload", accumulate=3, world_size=1, device=Device.CUDA).beside
    assert zero3["copied_to_host"] == 3 * whole + whole
    assert zero3["host_held_pinned"] == 3 * whole


def test_a_trial_is_held_against_the_settings_that_it_had() -> None:
    """Runs from before a setting changed stay checked."""
    layout = llama_layout(SIZES["tiny"])
    eager, zero3 = make_cell(backend="ddp-eager"), make_cell(backend="deepspeed-zero3-eager")
    found = expect(eager, layout, settings={"runtime_statistics": False})
    assert found and found.held["communication"] == 4 * layout.num_parameters
    options = dict(
        zero_options(DeepSpeedZero3Eager, zero3, layout.block_parameters, layout.num_parameters)
    )
    del options["leaf_module"]
    by_module = expect(zero3, layout, settings={"zero_optimization": options})
    assert by_module and calls(by_module, "all_gather")[0] == 44 * zero3.accumulate
    checkpointed = dataclasses.replace(zero3, activation_checkpointing=True)
    assert expect(checkpointed, layout, settings={"zero_optimization": options}) is None
    assert expect(checkpointed, layout) == expect(zero3, layout), (
        "a block is gathered as one, recomputed or not"
    )


@pytest.mark.torch
def test_what_zero3_gathers_for_a_module_that_reads_a_parameter_of_another_has_no_formula() -> None:
    import torch

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(batch.to(self.last.weight.dtype))).mean()  # type: ignore[no-any-return]

    model = Reads()
    layout = record(model, [model.first], lambda model, batch: model(batch), torch.ones(1, 2))
    assert [layout.parameters[p].name for p in layout.read_elsewhere] == ["last.weight"]
    changes = {"workload": "mine:Own"}
    assert expect(make_cell(backend="deepspeed-zero3-eager", **changes), layout) is None
    assert expect(make_cell(backend="deepspeed-zero2-eager", **changes), layout)
