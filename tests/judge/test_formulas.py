"""Formulas as arithmetic: layouts against built models, published and hand-made cases, padding, buckets, held bytes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from bench.backends.base import registry
from bench.judge import formulas, gathers, zero
from bench.judge.formulas import expect, layout_of, zero_settings
from bench.judge.tally import Expectation, wire_bytes
from bench.plan.cell import REFERENCE, SGD, Cell, Device, Precision, Sync
from bench.plan.models import SIZES
from bench.workload.layout import ROOT, Layout, Parameter, llama_layout
from tests import windows
from tests.factories import make_cell

P_8B = SIZES["8b"].num_parameters
G_8B = SIZES["8b"].num_layers + 1
GIB = 2**30


def of(backend: str, layout: Layout | None = None, rank: int = 0, **changes: Any) -> Expectation:
    """The expectation of one cell; of the tiny model unless a layout is given."""
    cell = make_cell(backend=backend, **changes)
    found = expect(cell, layout or layout_of(cell) or windows.layout(cell), rank=rank)
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


@pytest.mark.parametrize("tied", [False, True])
def test_the_layout_of_the_tiny_model_is_that_of_the_built_one(tied: bool) -> None:
    from bench.workload import WorkloadSpec
    from bench.workload.llama import LlamaWorkload
    from bench.workload.structure import record

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


def test_a_layout_survives_json() -> None:
    layout = llama_layout(SIZES["tiny"])
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_formulas_need_no_torch() -> None:
    code = (
        "import sys; from bench.judge.formulas import expect, layout_of; from bench.plan.cell import Cell; "
        "c = Cell(backend='deepspeed-zero3-eager', accumulate=256, world_size=1024, global_batch_size=2**20, "
        "sequence_length=8, model='8b'); assert expect(c, layout_of(c)).collectives; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_c3_resident_gathers_once() -> None:
    assert calls(of_8b("fsdp2-deferred-resident"), "all_gather", "bfloat16") == (G_8B, 2 * P_8B)


@pytest.mark.parametrize("backend", ["fsdp2-eager", "fsdp2-deferred", "lightning-fsdp2", "fabric-fsdp2-deferred"])
def test_c4_nothing_is_sent_by_one_rank(backend: str) -> None:
    assert of(backend, world_size=1, clip_norm=1.0).collectives == ()


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


UNEVEN = Layout(
    parameters=(
        Parameter(name="table", shape=(7, 3), unit=ROOT),
        Parameter(name="a", shape=(5,), unit=1),
        Parameter(name="b", shape=(1, 4), unit=1),
        Parameter(name="c", shape=(6, 2), unit=2),
    ),
    gradients=(3, 2, 1, 0),
)


def test_fsdp2_pads_first_dimensions() -> None:
    assert formulas.padded(UNEVEN.parameters, 4) == 8 * 3 + 8 + 4 * 4 + 8 * 2
    assert [formulas.local(UNEVEN.parameters, 4, rank) for rank in range(4)] == [6 + 2 + 4 + 4, 6 + 2 + 4, 6 + 1 + 4, 3]
    assert sum(formulas.local(UNEVEN.parameters, 4, rank) for rank in range(4)) == UNEVEN.num_parameters
    eager = of("fsdp2-eager", UNEVEN, world_size=4, accumulate=2)
    assert calls(eager, "reduce_scatter") == (6, 2 * 4 * (24 + 24 + 16))
    assert calls(eager, "all_gather") == (10, 2 * 4 * (24 + 2 * 24 + 2 * 16))


def test_fsdp2_sums_a_norm_per_parameter_to_clip() -> None:
    assert calls(of("fsdp2-eager", UNEVEN, clip_norm=1.0), "all_reduce") == (1, 4 * 4)
    assert calls(of("fsdp2-eager", UNEVEN), "all_reduce") == (0, 0)


def test_fsdp2_resident_parameters_are_padded_as_gathered() -> None:
    held = {name: of(name, UNEVEN, world_size=4).held for name in ("fsdp2-deferred", "fsdp2-deferred-resident")}
    more = held["fsdp2-deferred-resident"]["parameters"] - held["fsdp2-deferred"]["parameters"]
    assert more == 4 * 64


def test_fsdp2_moments_are_not_padded() -> None:
    last = of("fsdp2-eager", UNEVEN, rank=3, world_size=4).held
    assert last["optimizer_state"] == 8 * 3 + 4 * 4
    assert last["parameters"] == last["gradients"] == 4 * 64 // 4


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([], []),
        ([5], [5]),
        ([10], [10]),
        ([9, 1, 1], [10, 1]),
        ([11, 99, 1, 100, 3], [11, 100, 100, 3]),
        ([3, 3, 3, 3], [12]),
        ([9, 200, 200], [209, 200]),
    ],
)
def test_ddp_buckets_are_closed_by_what_fills_them(sizes: list[int], found: list[int]) -> None:
    assert formulas.buckets(sizes, (10, 100)) == found


def test_ddp_at_8b_has_a_bucket_per_large_matrix() -> None:
    layout = llama_layout(SIZES["8b"])
    sizes = [4 * layout.parameters[i].numel for i in layout.gradients]
    eager = of("ddp-eager", layout)
    assert sum(sizes) == 4 * P_8B
    # Head; norm with the last down; then up, gate, norm with o, v with k (16 MiB each), q, norm with the next down.
    per_block = len(["up", "gate", "norm and o", "v and k", "q", "norm and down"])
    assert calls(eager, "all_reduce") == (4 * (2 + 32 * per_block), 4 * 4 * P_8B)
    assert calls(of("ddp-deferred", layout), "all_reduce")[0] * 4 == calls(eager, "all_reduce")[0]


def test_zero_buckets_are_closed_before_what_does_not_fit() -> None:
    assert zero.buckets(UNEVEN, [3, 2, 1, 0], 16) == [[3, 2], [1], [0]]
    assert zero.buckets(UNEVEN, [3, 2, 1, 0], 100) == [[3, 2, 1, 0]]
    assert zero.buckets(UNEVEN, [0, 1], 10) == [[0], [1]], "one larger than a bucket has its own"


def test_zero2_cuts_what_is_larger_than_a_bucket_at_the_partitions() -> None:
    # 42 elements, padded to 48 for 4 ranks: partitions of 12. The table's 21 are cut into 12 and 9.
    assert zero.flat(UNEVEN, 4) == 48
    assert zero.stage2_reductions(UNEVEN, 4, Sync.DEFERRED, 10) == [12, 9, 9, 12]
    assert zero.stage2_reductions(UNEVEN, 4, Sync.DEFERRED, 20) == [21, 9, 12]
    assert sum(zero.stage2_reductions(UNEVEN, 4, Sync.EAGER, 10)) == UNEVEN.num_parameters


def test_zero2_holds_whole_parameters_that_overlap_its_partition_in_fp32_only() -> None:
    # Partitions of 12: [table], [table, a], [a, b, c], [c]
    assert [zero.overlapping(UNEVEN, 4, rank) for rank in range(4)] == [21, 21 + 5, 5 + 4 + 12, 12]
    bf16 = of("deepspeed-zero2-eager", UNEVEN, world_size=4, precision=Precision.BF16).held
    assert bf16["gradients"] == 4 * 12
    assert bf16["parameters"] == 2 * 48 + 4 * 12


def test_zero3_pads_every_parameter() -> None:
    eager = of("deepspeed-zero3-eager", UNEVEN, world_size=4, accumulate=2)
    assert calls(eager, "reduce_scatter")[1] == 2 * 4 * (24 + 8 + 4 + 12)
    assert of("deepspeed-zero3-eager", UNEVEN, world_size=4).held["optimizer_state"] == 8 * 12 + 4


def test_zero3_without_prefetching_gathers_module_by_module() -> None:
    layout = llama_layout(SIZES["tiny"])
    window = gathers.of_window(layout, 3, prefetch=0, max_live=0)
    # Each of the 39 parameters by itself, in forward and again in backward, which comes to the head while the forward
    # has just released it.
    assert len(window) == 3 * 2 * 39
    assert all(len(parameters) == 1 for parameters in window)


def test_zero3_with_room_for_all_gathers_everything_once() -> None:
    layout = llama_layout(SIZES["tiny"])
    window = gathers.of_window(layout, 2, prefetch=10**9, max_live=10**9)
    assert sorted(window[0]) == list(range(39))


def test_a_long_window_costs_no_more_to_replay() -> None:
    layout = llama_layout(SIZES["tiny"])
    block = layout.block_parameters
    short = gathers.of_window(layout, 2, prefetch=block, max_live=2 * block)
    long = gathers.of_window(layout, 1000, prefetch=block, max_live=2 * block)
    assert long[: len(short)] == short
    assert len(long) == 500 * len(short)


def test_settings_are_those_that_the_backend_gives_to_deepspeed() -> None:
    cell = make_cell(backend="deepspeed-zero3-eager", device=Device.CUDA)
    settings = zero_settings(cell, llama_layout(SIZES["tiny"]), 3)
    block = SIZES["tiny"].num_block_parameters
    assert (settings.reduce_bucket, settings.prefetch, settings.max_live) == (block, block, 2 * block)


@pytest.mark.parametrize("virtual", [False, True])
def test_deepspeed_overlaps_where_there_is_something_to_overlap(virtual: bool) -> None:
    """Stage 2 with other ranks, stage 3 always, and nothing on the CPU; the ranks of a virtual world count too."""
    overlapping = {
        (stage, world_size, str(device))
        for stage in (2, 3)
        for world_size in (1, 8)
        for device in Device
        if zero_settings(
            make_cell(world_size=world_size, device=device, virtual=virtual), llama_layout(SIZES["tiny"]), stage
        ).overlap
    }
    assert overlapping == {(2, 8, "cuda"), (3, 1, "cuda"), (3, 8, "cuda")}


def test_lightning_broadcasts_a_flag_per_micro_batch_and_nothing_alone() -> None:
    assert calls(of("lightning-fsdp2", accumulate=8), "broadcast", "int64") == (8, 64)
    assert calls(of("lightning-ddp", world_size=1, accumulate=8), "broadcast", "int64") == (0, 0)
    assert calls(of("fabric-fsdp2-deferred"), "broadcast", "int64") == (0, 0)


def test_the_reference_sends_nothing_and_holds_all() -> None:
    held = of(REFERENCE, accumulate=1, world_size=1, optimizer=SGD).held
    whole = 4 * SIZES["tiny"].num_parameters
    assert held == {"parameters": whole, "gradients": whole, "communication": 0, "optimizer_state": 0}


def test_counters_of_adamw_are_on_the_host_unless_fused() -> None:
    sizes = {
        (device, optimizer): of("ddp-eager", device=device, optimizer=optimizer).held["optimizer_state"]
        for device in Device
        for optimizer in ("adamw-foreach", "adamw-fused")
    }
    moments = 8 * SIZES["tiny"].num_parameters
    assert sizes.pop((Device.CUDA, "adamw-foreach")) == moments
    assert set(sizes.values()) == {moments + 4 * 39}


@pytest.mark.parametrize(
    ("op", "factor"), [("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_reduce", 1.5), ("broadcast", 1.0)]
)
def test_wire_bytes_of_a_ring(op: str, factor: float) -> None:
    assert wire_bytes(op, 800, 4) == 800 * factor
    assert wire_bytes(op, 800, 1) == 0


@pytest.mark.timeout(60)
def test_a_prediction_at_any_scale_takes_no_minutes() -> None:
    cell = Cell(
        backend="deepspeed-zero3-eager",
        accumulate=256,
        world_size=1024,
        global_batch_size=2**18,
        sequence_length=8192,
        model="8b",
        precision=Precision.BF16,
    )
    layout = layout_of(cell)
    assert layout is not None
    assert expect(cell, layout) is not None
