"""Time in collectives and how much of it is exposed: exact traces, a recorded one, and the pass around a training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import runner, virtual
from bench.backends.base import registry
from bench.cell import Device
from bench.probes import exposure as probe
from bench.probes.exposure import Activity, Exposure, WindowProfiler, exposure, from_chrome, from_kineto
from bench.record import merge_ranks, wrong
from bench.spec import EXTRA_PASSES, Spec, extra_passes
from bench.taps import SETTLED_WINDOWS
from bench.trial import Trial
from tests.factories import FakeLauncher, make_backend, make_cell, make_manifest, make_rank, make_record

NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def nccl(start: float, duration: float) -> Activity:
    """A collective's kernel."""
    return Activity(NCCL, start, duration)


@pytest.mark.parametrize(
    ("activities", "found"),
    [
        ([], (0, 0, 0, 0)),
        ([Activity("gemm", 0, 5)], (0, 0, 5, 0)),
        ([nccl(1, 2)], (2, 2, 0, 1)),
        ([Activity("gemm", 0, 10), nccl(1, 2)], (2, 0, 10, 1)),
        ([nccl(0, 4), Activity("gemm", 3, 4)], (4, 3, 4, 1)),
        ([nccl(0, 4), nccl(2, 4)], (6, 6, 0, 2)),
        ([nccl(0, 10), Activity("a", 1, 1), Activity("b", 1.5, 1.5), Activity("c", 8, 9)], (10, 6, 11, 1)),
        ([nccl(0, 4), Activity("Memcpy DtoD", 1, 1, "gpu_memcpy")], (4, 3, 1, 1)),
        ([nccl(0, 4), Activity("aten::mm", 0, 4, "cpu_op")], (4, 4, 0, 1)),
        ([nccl(5, 1), nccl(0, 1), Activity("gemm", 0.5, 5)], (2, 1, 5, 2)),
    ],
)
def test_exposed_is_what_runs_alone(activities: list[Activity], found: tuple[float, float, float, int]) -> None:
    expected = dict(zip(("collective_s", "exposed_s", "compute_s", "num_collectives"), found, strict=True))
    assert exposure(activities) == Exposure(**expected)  # type: ignore[arg-type]


def test_the_share_that_is_exposed() -> None:
    assert exposure([nccl(0, 4), Activity("gemm", 3, 4)]).exposed_share == 0.75
    assert exposure([]).exposed_share == 0


def test_a_trace_in_a_file_is_read_from_its_first_kernel() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 4409282933228.0, "dur": 500.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 4409282933000.0, "dur": 9.0},
        {"ph": "X", "cat": "kernel", "name": "ncclKernel_AllReduce", "ts": 4409282933628.0, "dur": 200.0},
        {"ph": "M", "name": "process_name"},
    ]
    found = exposure(from_chrome({"traceEvents": events}))
    assert found.collective_s == pytest.approx(200e-6)
    assert found.exposed_s == pytest.approx(100e-6)


# The profiler around a window, with a trace that was recorded: events as Kineto gives them, in nanoseconds.


class Event:
    """One of Kineto's."""

    def __init__(self, name: str, start: int, duration: int, device: str = "CUDA", annotation: bool = False) -> None:
        self._name, self._start, self._duration = name, start, duration
        self._device, self._annotation = device, annotation

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._start

    def duration_ns(self) -> int:
        return self._duration

    def device_type(self) -> Any:
        return SimpleNamespace(name=self._device)

    def is_user_annotation(self) -> bool:
        return self._annotation


TRACE = [
    Event("cudaLaunchKernel", 1_000_000_000, 5_000, device="CPU"),
    Event("nccl:_all_gather_base", 1_000_100_000, 400_000, annotation=True),
    Event("ampere_sgemm_128x64_tn", 1_000_100_000, 300_000),
    Event(NCCL, 1_000_200_000, 300_000),
    Event("Memcpy HtoD", 1_000_600_000, 50_000),
]
"""A product of 0.3 ms, a gather from 0.1 to 0.4 ms beside it, a copy; and what ran on the host, or is a range."""
FOUND = {"collective_s": 300e-6, "exposed_s": 100e-6, "compute_s": 350e-6, "num_collectives": 1}


class Profile:
    """As ``torch.profiler.profile``; notes when it was started and stopped."""

    calls: list[str]

    def __init__(self, activities: list[Any]) -> None:
        assert [activity.name for activity in activities] == ["CUDA"]
        self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: TRACE))

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done with the profiler and the device, which are pretended."""
    found: list[str] = []
    monkeypatch.setattr(Profile, "calls", found, raising=False)
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append("synchronize"))
    return found


def test_a_recorded_trace_is_read_on_the_device_and_without_ranges() -> None:
    assert exposure(from_kineto(TRACE)) == Exposure(
        **{name: pytest.approx(value) for name, value in FOUND.items()}  # type: ignore[arg-type]
    )


def test_the_profiler_runs_while_the_window_is_open_and_the_device_has_nothing_else_to_do(calls: list[str]) -> None:
    profiler = WindowProfiler()
    for is_open in (False, False, True, True, True, False, False):
        profiler.see(is_open)
    assert calls == ["synchronize", "start", "synchronize", "stop"]
    assert profiler.result().collective_s == pytest.approx(FOUND["collective_s"])


@pytest.mark.usefixtures("lonely_group")
def test_the_pass_profiles_one_settled_window(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = make_cell(model="micro", world_size=1, accumulate=2, global_batch_size=2, sequence_length=4)
    spec = Spec(cell=cell, passes=("exposure",), folder=str(tmp_path), reference="")
    see, seen = WindowProfiler.see, []
    monkeypatch.setattr(WindowProfiler, "see", lambda self, is_open: (seen.append(is_open), see(self, is_open)))
    result = Trial(spec, 0, torch.device("cpu"), registry()["ddp-eager"]).run()
    assert result["exposure"] == pytest.approx(FOUND)
    assert calls == ["synchronize", "start", "synchronize", "stop"]
    per_window = 2 * 2 + 1  # fetches and losses, and the step
    assert seen == [n in range(SETTLED_WINDOWS * per_window - 1, 3 * per_window - 1) for n in range(3 * per_window)]


def test_only_cells_on_cuda_with_real_ranks_have_the_pass() -> None:
    cuda = make_cell(device=Device.CUDA)
    assert extra_passes(make_cell()) == EXTRA_PASSES
    assert extra_passes(cuda) == (*EXTRA_PASSES, "exposure")
    pretended = make_cell(device=Device.CUDA, virtual=True)
    assert "exposure" not in virtual.passes(pretended, extra_passes(pretended))


def test_a_run_on_cuda_profiles_each_cell_once_and_one_on_the_cpu_none(tmp_path: Path) -> None:
    for device, times in ((Device.CUDA, 1), (Device.CPU, 0)):
        cell = make_cell(backend="b0", device=device)
        launcher = FakeLauncher()
        manifest = make_manifest([cell])
        backends = {"b0": make_backend("b0")}
        observer = SimpleNamespace(**{name: lambda *_, **__: None for name in ("expect", "started", "finished")})
        folder = tmp_path / str(device)
        folder.mkdir()
        run = runner.Runner(folder, manifest, backends, launcher, observer, lambda *_: None)  # type: ignore[arg-type]
        asked = []
        for _ in range(3):
            asked.append(run._passes(cell))
            run._note_extras({"cell_id": cell.cell_id, "status": "ok", **{name: {} for name in asked[-1]}})
        assert sum("exposure" in passes for passes in asked) == times


def test_the_record_has_the_rank_that_waited_longest_and_the_table_its_times() -> None:
    from bench.tables import build

    cell = make_cell(device=Device.CUDA)
    ranks = [
        make_rank(cell, rank=r, exposure={**FOUND, "exposed_s": seconds}) for r, seconds in enumerate((1e-4, 2e-4))
    ]
    assert wrong(ranks, ("exposure",)) == ""
    assert "exposure is none" in wrong([make_rank(cell, exposure=None)], ("exposure",))
    merged = merge_ranks(ranks)["exposure"]
    assert merged == {**FOUND, "exposed_s": 2e-4} == probe.merge([{**FOUND, "exposed_s": 2e-4}, FOUND])
    records = [make_record(cell, exposure=merged), make_record(cell, repeat=1)]
    trials = build(records, make_manifest([cell])).trials
    assert trials["collective_s"].tolist() == [300e-6, 300e-6]
    assert trials["exposed_s"].tolist() == [2e-4, 2e-4]
    assert build([make_record(make_cell())], make_manifest()).trials["exposed_s"].isna().all()
