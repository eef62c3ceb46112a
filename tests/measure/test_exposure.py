"""Time in collectives and how much of it is exposed: exact traces, a recorded one, and the pass around a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.backends.base import registry
from bench.measure.exposure import WindowProfiler, exposure
from bench.measure.taps import EventKind, Taps
from bench.measure.trial import RankTrial
from bench.plan.cell import Device
from bench.plan.task import EXTRA_PASSES, SETTLED_WINDOWS, Spec, passes
from tests.factories import make_cell
from tests.measure.kineto import Event, profile

NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


TRACE = [
    Event("cudaLaunchKernel", 1_000_000_000, 5_000, "cuda_runtime"),
    Event("nccl:_all_gather_base", 1_000_100_000, 400_000, "gpu_user_annotation"),
    Event("ampere_sgemm_128x64_tn", 1_000_100_000, 300_000),
    Event(NCCL, 1_000_200_000, 300_000),
    Event("Memcpy HtoD (Pageable -> Device)", 1_000_600_000, 50_000, "gpu_memcpy"),
]
"""A product of 0.3 ms, a gather from 0.1 to 0.4 ms beside it, a copy; and what ran on the host, or is a range."""
FOUND = {"collective_s": 300e-6, "exposed_s": 100e-6, "compute_s": 350e-6, "num_collectives": 1}
REDUCE = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COPY_IN = "void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**, float*)"
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
TRACES = {
    # FSDP2 on two streams of collectives: the gather of the next block and the reduction of the last one overlap for
    # 40 us, and a product runs beside them from 20 to 100 us. Waiting streams, as sync events show them, are no work.
    "two streams": (
        [
            Event("FSDP::all_gather", 0, 120_000, "user_annotation"),
            Event("nccl:_all_gather_base", 0, 120_000, "gpu_user_annotation"),
            Event(NCCL, 0, 60_000),
            Event(REDUCE, 20_000, 100_000),
            Event(GEMM, 20_000, 80_000),
            Event("Stream Wait Event", 0, 120_000, "cuda_sync"),
            Event("Stream Sync", 0, 130_000, "cuda_sync"),
            Event(COPY_IN, 130_000, 10_000),
            Event("Memset (Device)", 140_000, 1_000, "gpu_memset"),
            Event("cudaStreamSynchronize", 0, 200_000, "cuda_runtime"),
        ],
        (120e-6, 40e-6, 91e-6, 2),
    ),
    # DDP: buckets are reduced one after the other while the backward runs; the last one waits alone.
    "buckets": (
        [
            Event(
                "ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevKernelArgsStorage<4096ul>)",
                10_000,
                30_000,
            ),
            Event(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                40_000,
                30_000,
            ),
            Event(GEMM, 0, 25_000),
            Event(GEMM, 25_000, 25_000),
            Event(
                "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f32(ncclSymkDevWorkArgs4K)", 90_000, 10_000
            ),
            Event(
                "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
                200_000,
                5_000,
            ),
        ],
        (75e-6, 35e-6, 50e-6, 4),
    ),
}
"""Realistic traces, and of each: collective_s, exposed_s, compute_s and num_collectives, by hand."""


@pytest.mark.parametrize(
    ("events", "by_hand"),
    [
        *TRACES.values(),
        ([Event(GEMM, 0, 5_000)], (0, 0, 5e-6, 0)),
    ],
)
def test_exposed_is_what_runs_alone_in_old_and_new_torch(
    events: list[Event], by_hand: tuple[float, float, float, int]
) -> None:
    expected = dict(
        zip(("collective_s", "exposed_s", "compute_s", "num_collectives"), by_hand, strict=True)
    )
    for form in (events, [event.older for event in events]):
        assert exposure(form) == pytest.approx(expected)


def test_a_profiler_that_saw_nothing_says_nothing() -> None:
    assert exposure([Event("cudaLaunchKernel", 0, 5_000, "cuda_runtime")]) is None


@pytest.mark.usefixtures("lonely_group")
def test_the_pass_profiles_one_settled_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = profile(monkeypatch, TRACE)
    cell = make_cell(
        model="micro", world_size=1, accumulate=2, global_batch_size=2, sequence_length=4
    )
    spec = Spec(cell=cell, passes=("exposure",), folder=str(tmp_path), reference="")
    events: list[EventKind] = []
    seen = {}
    for name in ("start", "stop"):
        run = getattr(WindowProfiler, name)
        monkeypatch.setattr(
            WindowProfiler,
            name,
            lambda self, name=name, run=run: (seen.update({name: len(events)}), run(self)),
        )
    record = Taps.record
    monkeypatch.setattr(
        Taps,
        "record",
        lambda self, kind, mark=None: (events.append(kind), record(self, kind, mark)),
    )
    result = RankTrial(spec, 0, torch.device("cpu"), registry()["ddp-eager"]).run()
    assert result["exposure"] == pytest.approx(FOUND)
    assert calls == ["synchronize", "start", "synchronize", "stop"]
    per_window = 2 * 2 + 1  # fetches and losses, and the step
    assert seen == {
        "start": SETTLED_WINDOWS * per_window,
        "stop": (SETTLED_WINDOWS + 1) * per_window,
    }


def test_on_cuda_what_watches_every_operator_runs_at_one_n() -> None:
    """The smallest that accumulates, or the one that other backends have too; on the CPU at every N."""
    every = ("time", *EXTRA_PASSES)
    cells = [make_cell(accumulate=n) for n in (1, 2, 4)]
    assert set(passes(cells).values()) == {every}
    cuda = [replace(cell, device=Device.CUDA) for cell in cells]
    twin, other = replace(cuda[2], twin="again"), replace(cuda[2], backend="ddp-eager")
    few, all_of_them = ("time", "update", "exposure"), (*every, "exposure")
    found = passes([*reversed(cuda), twin, cuda[0].reference()])
    assert [found[cell.cell_id] for cell in cuda] == [few, all_of_them, few]
    assert found[twin.cell_id] == few
    found = passes([*cuda, twin, other])
    assert [found[cell.cell_id] for cell in (*cuda, other)] == [
        few,
        few,
        all_of_them,
        all_of_them,
    ], "side by side"
    assert found[twin.cell_id] == few
    assert passes([cuda[0].reference()])[cuda[0].reference().cell_id] == ("time", "update")
    assert passes(cuda[:1]) == {cuda[0].cell_id: all_of_them}
    shared = [replace(cell, shared_gpu=True) for cell in cuda]
    assert set(passes(shared).values()) == {every}, "over gloo no kernel communicates"
    over_nccl = passes([replace(cell, shared_nccl=True) for cell in shared])
    assert list(over_nccl.values()) == [few, all_of_them, few]
