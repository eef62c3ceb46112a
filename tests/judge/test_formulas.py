"""Formulas as arithmetic: layouts against built models, published and hand-made cases, padding, buckets, held bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench.backends.base import registry
from bench.judge.formulas import Expectation, expect, layout_of, wire_bytes
from bench.plan.cell import Precision
from bench.plan.models import SIZES
from bench.workload.layout import Layout, llama_layout, record
from tests import worlds
from tests.factories import make_cell

P_8B = SIZES["8b"].num_parameters
G_8B = SIZES["8b"].num_layers + 1
GIB = 2**30


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
    values: dict[str, Any] = {"model": "8b", "precision": Precision.BF16, "accumulate": 4, "world_size": 8}
    return of(backend, **(values | changes))


@pytest.mark.torch
@pytest.mark.parametrize("tied", [False, True])
def test_the_layout_of_the_tiny_model_is_that_of_the_built_one(tied: bool) -> None:
    from bench.workload import WorkloadSpec
    from bench.workload.llama import LlamaWorkload

    workload = LlamaWorkload(WorkloadSpec(model="tiny", sequence_length=4, seed=0, corpus=None))
    workload._size = dataclasses.replace(SIZES["tiny"], num_layers=3, tied=tied)
    model = workload.model()
    assert record(model, workload.blocks(model), workload.loss, workload.data(1)) == llama_layout(workload._size)
    assert all(p.grad is None for p in model.parameters()), "recording leaves no gradients"


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
    assert {p.name: p.shape for p in layout.parameters} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert [p.name for p in layout.parameters] == [n for n, _ in model.named_parameters()]
    assert [size for _, size in layout.buffers] == [b.nbytes for b in model.buffers()]
    assert layout.num_parameters == size.num_parameters
    assert layout.block_parameters == size.num_block_parameters
    assert len(layout.units) == size.num_layers + 1


def test_every_built_in_backend_has_a_formula_and_a_plugin_none() -> None:
    for name, backend in registry().items():
        if backend.__module__.startswith("bench.backends."):
            expectation = of(name)
            assert set(expectation.held) == {"parameters", "gradients", "optimizer_state", "communication"}
    assert expect(make_cell(backend="somebodys"), llama_layout(SIZES["tiny"])) is None
    assert layout_of(make_cell(workload="mine:Own")) is None


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
    assert found == {"parameters": 3.74, "gradients": 3.74, "optimizer_state": 7.48, "communication": 0}
    resident = of_8b("fsdp2-deferred-resident").held["parameters"] - held["parameters"]
    assert resident == 2 * P_8B, "C10"


@pytest.mark.parametrize(
    ("op", "factor"), [("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_reduce", 1.5), ("broadcast", 1.0)]
)
def test_wire_bytes_of_a_ring(op: str, factor: float) -> None:
    assert wire_bytes(op, 800, 4) == 800 * factor
    assert wire_bytes(op, 800, 1) == 0
