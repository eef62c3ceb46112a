"""What a window costs the host: launches in synthetic traces, operators by hand, windows in turn, and the real pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import sdpa_attention

from bench.backends.base import Backend
from bench.backends.plain import DDPEager
from bench.backends.training_job import Job
from bench.judge.formulas import BUILT_IN
from bench.launch.launcher import Launcher
from bench.measure.dispatch import HostCost, merge, num_launches
from bench.measure.operators import OperatorCounter
from bench.measure.taps import EventKind, SettledWindows
from bench.measure.trial import RankTrial
from bench.plan import task
from bench.plan.cell import Device, Precision, Sync
from bench.plan.task import Spec
from bench.run.trial_record import merge_ranks, wrong
from tests.conftest import asked, first
from tests.factories import (
    make_cell,
    make_failure,
    make_manifest,
    make_rank,
    make_record,
    make_tables,
)
from tests.measure.kineto import Event, profile
from tests.worlds import measure

COST = {"cpu_s": 0.5, "num_operators": 2000, "num_launches": 1000}


def called(name: str, correlation: int) -> Event:
    """A call of CUDA's runtime or driver on the host."""
    return Event(name, category="cuda_runtime", correlation=correlation)


def gemm(correlation: int) -> Event:
    return Event("sm90_xmma_gemm_bf16bf16_bf16f32", correlation=correlation)


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([], 0),
        ([called("cudaLaunchKernel", 1), gemm(1), called("cudaLaunchKernel", 2), gemm(2)], 2),
        (
            [
                called("cudaLaunchKernelExC", 1),
                called("cuLaunchKernelEx", 2),
                called("cuLaunchKernel", 3),
            ],
            3,
        ),
        ([called("cudaLaunchCooperativeKernel", 4), called("cuLaunchCooperativeKernel", 5)], 2),
        ([called("cudaGraphLaunch", 1), gemm(1), gemm(1), gemm(1)], 1),
        ([called("cudaLaunchKernelExC", 7), called("cuLaunchKernelEx", 7), gemm(7)], 1),
        ([called("cudaLaunchKernel", 0), called("cudaLaunchKernel", 0)], 2),
        (
            [
                called("cudaMemcpyAsync", 1),
                Event("Memcpy DtoD", category="gpu_memcpy", correlation=1),
                called("cudaMemsetAsync", 2),
            ],
            None,
        ),
        (
            [
                called("cudaMemcpyAsync", 1),
                called("cudaDeviceSynchronize", 2),
                called("cudaLaunchHostFunc", 3),
            ],
            0,
        ),
        ([gemm(1), gemm(2)], None),
        ([Event("cudaLaunchKernel in my range", category="gpu_user_annotation")], 0),
    ],
)
def test_launches_of_a_trace(events: list[Event], count: int | None) -> None:
    assert num_launches(events) == count


# Operators.


def test_operators_are_counted_once_where_a_backend_gets_them() -> None:
    a, b = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    with OperatorCounter() as counter:
        c = a @ b  # mm
        assert counter.count == 1
        c.view(16)  # views are work of the host too
        assert counter.count == 2
        with torch.profiler.record_function("a range"):
            pass
        assert counter.count == 2, "marks are no operators"
        torch.nn.functional.linear(
            b, b
        )  # composite: t and mm, or one operator, but never linear and what is in it
        assert counter.count in {3, 4}
    torch.ones(1)
    assert counter.count in {3, 4}


# Forward and backward, held against the plain model's.

CHOSEN = (
    "ddp-eager",
    "fsdp2-deferred",
    "deepspeed-zero2-eager",
    "deepspeed-zero3-eager",
    "lightning-ddp",
)


@pytest.mark.parametrize(
    "how",
    first(
        [(Precision.BF16, True)],
        [(Precision.FP32, False), (Precision.BF16, False), (Precision.BF16, True)],
    ),
)
def test_every_backend_does_the_plain_models_work(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path: Path, how: tuple[Precision, bool]
) -> None:
    """In a virtual world of two ranks, where all that a framework does around the model is done."""
    precision, checkpointed = how
    cells = [
        make_cell(
            backend=name,
            model="micro",
            precision=precision,
            accumulate=2,
            global_batch_size=8,
            sequence_length=16,
            virtual=True,
            activation_checkpointing=checkpointed,
        )
        for name in asked(request, CHOSEN, BUILT_IN)
        if not (backend := BUILT_IN[name]).refuses.virtual
        and not (
            precision is Precision.BF16
            and backend.framework == "DeepSpeed"
            and backend.sync is Sync.DEFERRED
        )
    ]
    found = measure(launcher, tmp_path, cells, "dispatch")
    assert {name: record["dispatch"]["other_work"] for name, record in found.items()} == {
        cell.backend: "" for cell in cells
    }


class RepeatsKeys(DDPEager):
    """Attention as transformers has it where SDPA is not to broadcast: the update is right, the work is not."""

    name = "repeats-keys"

    def train(self, job: Job) -> None:
        build = job.build

        def repeating() -> Any:
            model: Any = build()
            model.config._attn_implementation = "sdpa"
            return model

        job.build = repeating
        super().train(job)


class LooksTwice(DDPEager):
    """Computes each loss once more, without gradients."""

    name = "looks-twice"

    def train(self, job: Job) -> None:
        loss = job.loss

        def twice(model: Any, batch: Any) -> Any:
            with torch.no_grad():
                loss(model, batch)
            return loss(model, batch)

        job.loss = twice
        super().train(job)


@pytest.mark.usefixtures("lonely_group")
@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (DDPEager, ""),
        (
            RepeatsKeys,
            r"aten._scaled_dot_product_\w+.default of {q} {k} {k} ran 0 times .*, 6 .*",
        ),
        (
            LooksTwice,
            r"aten.pow.Tensor_Scalar of \[2, 16, 64\] ran 45 times .*, 60 .*",
        ),
    ],
)
def test_other_work_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: type[Backend], words: str
) -> None:
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "0")
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", lambda *_: False)
    cell = make_cell(
        model="micro", world_size=1, accumulate=3, global_batch_size=6, sequence_length=16
    )
    spec = Spec(cell=cell, passes=("dispatch",), folder=str(tmp_path), reference="")
    found = RankTrial(spec, 0, torch.device("cpu"), backend).run()
    expected = words.format(q=r"\[2, 2, 16, 32\]", k=r"\[2, 1, 16, 32\]")
    assert re.fullmatch(expected, found["dispatch"]["other_work"])
    assert wrong([{**make_rank(cell), **found}], ("dispatch",)) == ""


@pytest.mark.usefixtures("lonely_group")
@pytest.mark.parametrize(
    ("backend", "words"),
    [(DDPEager, ""), (LooksTwice, r"aten.nll_loss_backward.* ran 3 times in 6 .*, 6 were due")],
)
def test_other_work_of_a_users_model_is_seen(
    tmp_path: Path, backend: type[Backend], words: str
) -> None:
    cell = make_cell(
        workload="tests.own_workload:Cycle", world_size=1, accumulate=3, global_batch_size=6
    )
    spec = Spec(cell=cell, passes=("dispatch",), folder=str(tmp_path), reference="")
    found = RankTrial(spec, 0, torch.device("cpu"), backend).run()
    assert re.fullmatch(words, found["dispatch"]["other_work"])


# The windows, and who measures which.


def test_on_cuda_the_device_is_idle_at_the_start_and_launches_have_a_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = [called("cudaLaunchKernel", 1), gemm(1), called("cudaLaunchKernel", 2), gemm(2)]
    calls = profile(monkeypatch, trace)
    cost = HostCost(cuda=True)
    windows = SettledWindows(1, *cost.instruments)
    for _ in range(windows.num_trained + 1):
        windows.on_event(EventKind.LOSS)
        windows.on_event(EventKind.STEP)
    assert calls == [
        *["synchronize"] * task.CPU_WINDOWS,
        "synchronize",
        "start",
        "synchronize",
        "stop",
    ]
    assert cost.result["num_launches"] == 2
    assert cost.result["cpu_s"] >= 0 and cost.result["num_operators"] == 0


# From ranks to the table.


def test_the_record_has_the_most_of_every_number_and_the_table_a_share_per_micro_batch() -> None:
    cell = make_cell(accumulate=4, device=Device.CUDA)
    ranks = [
        make_rank(cell, rank=0, dispatch=COST),
        make_rank(cell, rank=1, dispatch={**COST, "cpu_s": 0.75, "num_operators": 1600}),
    ]
    assert wrong(ranks, ("dispatch",)) == ""
    merged = merge_ranks(ranks)["dispatch"]
    assert merged == {**COST, "cpu_s": 0.75} == merge([rank["dispatch"] for rank in ranks])
    later = make_record(cell, repeat=1)
    del later["dispatch"]
    trials = make_tables(
        [make_record(cell, dispatch=merged), later, make_failure(cell, 2)], make_manifest([cell])
    ).trials
    for name, value in (("cpu_s", 0.1875), ("num_operators", 500), ("num_launches", 250)):
        column = trials[f"{name}_per_micro_batch"]
        assert column.tolist()[:2] == [value] * 2 and column.isna().tolist()[2]
