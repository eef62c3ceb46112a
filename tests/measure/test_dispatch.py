"""What a window costs the host: launches in synthetic traces, operators by hand, windows in turn, and the real pass."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations import sdpa_attention

from bench.backends.base import Backend, Job, registry
from bench.backends.plain import DDPEager
from bench.judge.formulas import BUILT_IN
from bench.judge.tables import build
from bench.launch.launcher import Launcher
from bench.measure.dispatch import NUMBERS, OTHER_WORK, CpuTime, HostCost, Launches, Operators, merge, num_launches
from bench.measure.operators import OperatorCounter
from bench.measure.taps import EventKind
from bench.measure.trial import RankTrial
from bench.plan import task
from bench.plan.cell import Device, Precision, Sync
from bench.plan.task import SETTLED_WINDOWS, Spec, extra_passes
from bench.run.record import merge_ranks, wrong
from tests.factories import make_cell, make_failure, make_manifest, make_rank, make_record
from tests.virtual_worlds import measure

COST = {"cpu_s": 0.5, "num_operators": 2000, "num_launches": 1000}


class Event:
    """One of Kineto's."""

    def __init__(self, name: str, correlation: int, device: str = "CPU", annotation: bool = False) -> None:
        self._name, self._correlation, self._device, self._annotation = name, correlation, device, annotation

    def name(self) -> str:
        return self._name

    def correlation_id(self) -> int:
        return self._correlation

    def device_type(self) -> Any:
        return SimpleNamespace(name=self._device)

    def is_user_annotation(self) -> bool:
        return self._annotation


def gemm(correlation: int) -> Event:
    return Event("sm90_xmma_gemm_bf16bf16_bf16f32", correlation, "CUDA")


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([], 0),
        ([Event("cudaLaunchKernel", 1), gemm(1), Event("cudaLaunchKernel", 2), gemm(2)], 2),
        ([Event("cudaLaunchKernelExC", 1), Event("cuLaunchKernelEx", 2), Event("cuLaunchKernel", 3)], 3),
        ([Event("cudaLaunchCooperativeKernel", 4), Event("cuLaunchCooperativeKernel", 5)], 2),
        ([Event("cudaGraphLaunch", 1), gemm(1), gemm(1), gemm(1)], 1),
        ([Event("cudaLaunchKernelExC", 7), Event("cuLaunchKernelEx", 7), gemm(7)], 1),
        ([Event("cudaLaunchKernel", 0), Event("cudaLaunchKernel", 0)], 2),
        ([Event("cudaMemcpyAsync", 1), Event("Memcpy DtoD", 1, "CUDA"), Event("cudaMemsetAsync", 2)], None),
        ([Event("cudaMemcpyAsync", 1), Event("cudaDeviceSynchronize", 2), Event("cudaLaunchHostFunc", 3)], 0),
        ([gemm(1), gemm(2)], None),
        ([Event("cudaLaunchKernel in my range", 1, "CUDA", annotation=True)], 0),
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
        torch.nn.functional.linear(b, b)  # composite: t and mm, or one operator, but never linear and what is in it
        assert counter.count in {3, 4}
    torch.ones(1)
    assert counter.count in {3, 4}


def test_operators_of_backward_are_counted() -> None:
    a = torch.ones(4, 4, requires_grad=True)
    operators = Operators()
    loss = (a @ a).sum()
    assert operators.count is None
    operators.start()
    loss.backward()
    operators.stop()
    assert operators.count is not None and operators.count >= 4  # expand, two products, their sum
    found = operators.count
    torch.ones(2)
    assert operators.count == found


def test_a_step_over_dtensors_is_counted_on_the_local_tensors(lonely_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    counts = []
    mesh = init_device_mesh("cpu", (1,))
    for spread in (False, True):
        torch.manual_seed(0)
        plain = [torch.randn(3), torch.randn(5)]
        made = [distribute_tensor(one, mesh, [Replicate()]) if spread else one for one in plain]
        parameters = [torch.nn.Parameter(one) for one in made]
        optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=True)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # DTensor works out and keeps what is sharded how
        with OperatorCounter() as counter:
            optimizer.step()
        counts.append(counter.count)
    assert counts[0] == counts[1] > 0


# Forward and backward, held against the plain model's.


@pytest.mark.parametrize(
    ("precision", "checkpointed"), [(Precision.FP32, False), (Precision.BF16, False), (Precision.BF16, True)]
)
def test_every_backend_does_the_plain_models_work(tmp_path: Path, precision: Precision, checkpointed: bool) -> None:
    """In a virtual world of two ranks, where all that a framework does around the model is done."""
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
        for name, backend in BUILT_IN.items()
        if not backend.not_virtual
        and not (precision is Precision.BF16 and backend.framework == "DeepSpeed" and backend.sync is Sync.DEFERRED)
    ]
    with Launcher(Device.CPU) as launcher:
        found = measure(launcher, tmp_path, cells, ("dispatch",))
    assert {name: one["dispatch"]["other_work"] for name, one in found.items()} == {cell.backend: "" for cell in cells}


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
            r"aten._scaled_dot_product_\w+.default of {q} {k} {k} ran 0 times in 3 micro-batches, 6 were due",
        ),
        (LooksTwice, r"aten.pow.Tensor_Scalar of \[2, 16, 64\] ran 45 times in 6 micro-batches, 60 were due"),
    ],
)
def test_other_work_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: type[Backend], words: str
) -> None:
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "0")
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", lambda *_: False)
    cell = make_cell(model="micro", world_size=1, accumulate=3, global_batch_size=6, sequence_length=16)
    spec = Spec(cell=cell, passes=("dispatch",), folder=str(tmp_path), reference="")
    found = RankTrial(spec, 0, torch.device("cpu"), backend).run()
    expected = words.format(q=r"\[2, 2, 16, 32\]", k=r"\[2, 1, 16, 32\]")
    assert re.fullmatch(expected, found["dispatch"]["other_work"])
    assert wrong([{**make_rank(cell), **found}], ("dispatch",)) == ""


# The windows, and who measures which.


def test_cpu_time_is_that_of_the_process_and_not_of_sleep() -> None:
    clock = CpuTime(cuda=False)
    assert clock.seconds is None
    clock.start()
    time.sleep(0.2)
    clock.stop()
    assert clock.seconds is not None and clock.seconds < 0.15
    clock.start()
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    clock.stop()
    assert clock.seconds >= 0.05


class Noted:
    """An instrument that says when it was started and stopped."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name, self._notes = name, notes

    def start(self) -> None:
        self._notes.append(f"{self._name} starts")

    def stop(self) -> None:
        self._notes.append(f"{self._name} stops")


def noted(accumulate: int, names: str = "abc") -> tuple[HostCost, list[str]]:
    notes: list[str] = []
    cost = HostCost(accumulate, cuda=False)
    cost._instruments = [Noted(name, notes) for name in names]
    return cost, notes


@pytest.mark.parametrize(("accumulate", "inner"), [(1, 1), (3, 1), (2, 3)])
def test_each_instrument_has_a_window_after_the_settled_ones(accumulate: int, inner: int) -> None:
    cost, notes = noted(accumulate)
    at = []
    with cost:
        for window in range(cost.windows):
            for _ in range(accumulate):
                cost.see(EventKind.FETCH)
                cost.see(EventKind.LOSS)
            for _ in range(inner):  # ZeRO steps its groups one by one
                cost.see(EventKind.STEP)
            at.append((window, list(notes)))
    assert cost.windows == SETTLED_WINDOWS + 3
    assert notes == [f"{name} {what}" for name in "abc" for what in ("starts", "stops")]
    assert at[SETTLED_WINDOWS - 2][1] == []
    assert at[SETTLED_WINDOWS - 1][1] == ["a starts"]
    assert at[-1][1] == notes, "the last one is stopped by the last step, not by the end"


def test_an_instrument_is_stopped_when_training_ends_in_its_window() -> None:
    cost, notes = noted(1)

    def train() -> None:
        with cost:
            for _ in range(SETTLED_WINDOWS):
                cost.see(EventKind.LOSS)
                cost.see(EventKind.STEP)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        train()
    assert notes == ["a starts", "a stops"]


def test_a_training_without_a_step_has_no_cost() -> None:
    cost = HostCost(2, cuda=False)
    with cost:
        for _ in range(20):
            cost.see(EventKind.LOSS)
    assert cost.result == dict.fromkeys(NUMBERS)


def test_on_cuda_the_device_is_idle_at_the_start_and_launches_have_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    trace = [Event("cudaLaunchKernel", 1), gemm(1), Event("cudaLaunchKernel", 2), gemm(2)]

    class Profile:
        def __init__(self, activities: list[Any]) -> None:
            assert [activity.name for activity in activities] == ["CUDA"]
            self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: trace))

        def start(self) -> None:
            calls.append("start")

        def stop(self) -> None:
            calls.append("stop")

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    cost = HostCost(1, cuda=True)
    assert Launches().count is None
    with cost:
        for _ in range(cost.windows):
            cost.see(EventKind.LOSS)
            cost.see(EventKind.STEP)
    assert calls == [*["synchronize"] * task.CPU_WINDOWS, "synchronize", "start", "synchronize", "stop"]
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
    trials = build([make_record(cell, dispatch=merged), later, make_failure(cell, 2)], make_manifest([cell])).trials
    for name, value in (("cpu_s", 0.1875), ("num_operators", 500), ("num_launches", 250)):
        column = trials[f"{name}_per_micro_batch"]
        assert column.tolist()[:2] == [value] * 2 and column.isna().tolist()[2]


def test_what_one_rank_could_not_tell_is_not_known() -> None:
    merged = merge([COST, {**COST, "num_launches": None}])
    assert merged == {**COST, "num_launches": None}


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        {},
        {**COST, "cpu_s": "much"},
        {**COST, "num_operators": -1},
        {**COST, "other_work": 1},
        {"cpu_s": 1.0, "num_operators": 1},
    ],
)
def test_a_damaged_result_is_named(damaged: Any) -> None:
    assert "dispatch is none" in wrong([make_rank(make_cell(), dispatch=damaged)], ("dispatch",))


def test_the_work_of_the_first_rank_that_differs_is_told() -> None:
    ranks = [{**COST, OTHER_WORK: words} for words in ("", "aten.mm", "aten.bmm")]
    assert merge(ranks)[OTHER_WORK] == "aten.mm"
    assert merge(ranks[:1])[OTHER_WORK] == ""


def test_every_real_cell_has_the_pass_and_no_virtual_one() -> None:
    assert "dispatch" in extra_passes(make_cell())
    assert "dispatch" not in extra_passes(make_cell(virtual=True))


@pytest.mark.usefixtures("lonely_group")
def test_the_pass_of_a_real_training(tmp_path: Path) -> None:
    """Twice as many micro-batches have twice their operators; the optimizer's are added once."""
    counts = {}
    for accumulate in (1, 2, 3):
        cell = make_cell(
            model="micro",
            world_size=1,
            accumulate=accumulate,
            global_batch_size=accumulate,
            sequence_length=4,
            warmup_windows=1,
            timed_windows=1,
        )
        spec = Spec(cell=cell, passes=("dispatch",), folder=str(tmp_path), reference="")
        found = RankTrial(spec, 0, torch.device("cpu"), registry()["ddp-eager"]).run()["dispatch"]
        assert found.keys() == {*NUMBERS, OTHER_WORK}
        assert found["num_launches"] is None
        assert 0 < found["cpu_s"] < 60
        counts[accumulate] = found["num_operators"]
    # The first micro-batch of a window makes gradients, the others add to them.
    assert counts[3] - counts[2] == counts[2] - counts[1] > 100
    assert counts[2] < 2 * counts[1]
