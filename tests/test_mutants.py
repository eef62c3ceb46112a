"""Bugs that other benchmark suites had: loops, timers and names that are wrong in a known way, and that are seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from bench.backends.base import Backend, registry
from bench.backends.plain import DDPDeferred, DDPEager
from bench.backends.training_job import Job
from bench.judge import gates
from bench.launch import rank
from bench.measure.trial import RankTrial
from bench.plan.cell import REFERENCE, Cell, Device, Sharding, Status, Sync
from bench.plan.task import SETTLED_WINDOWS, Spec
from bench.run.trial_record import merge_ranks
from tests.extra_backends import (
    AllButLast,
    LastOnly,
    LeavesTheLastWindow,
    StepsOneLate,
    StepsTooOften,
)
from tests.factories import make_cell, make_manifest, make_record, make_tables

LARGE = 2**26
"""Bytes of a tensor that is much larger than all that the small model needs."""


class Sound(Backend):
    """A right loop on one rank."""

    name, framework, sync, sharding = "sound", "made", Sync.EAGER, Sharding.NONE

    def train(self, job: Job) -> None:
        self.setup(job)
        for number, window in enumerate(job.each_window()):
            for batch, _ in window:
                self.backward(job, batch, number)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def setup(self, job: Job) -> None:
        self.model = job.build()
        self.optimizer = job.optimizer(self.model.parameters())

    def backward(self, job: Job, batch: Any, window: int) -> None:
        (job.loss(self.model, batch) / job.accumulate).backward()

    def full_parameters(self) -> dict[str, Any]:
        return dict(self.model.named_parameters())


def small_cell(backend: str, **changes: Any) -> Cell:
    """A cell that trains within milliseconds on one rank: 5 windows of 4 micro-batches of 2 samples of 8 tokens."""
    values = {
        "workload": "tests.own_workload:Cycle",
        "model": "perceptron",
        "world_size": 1,
        "global_batch_size": 8,
    }
    return make_cell(**({"backend": backend, "sequence_length": 8, **values} | changes))


def trial_of(folder: Path, cell: Cell, backend: type[Backend], *passes: str) -> RankTrial:
    """One trial in this process, whose only rank is 0."""
    spec = Spec(
        cell=cell,
        passes=passes,
        folder=str(folder),
        reference=str(folder / "reference.safetensors"),
    )
    return RankTrial(spec, 0, torch.device("cpu"), backend)


def record_of(folder: Path, cell: Cell, backend: type[Backend], *passes: str) -> dict[str, Any]:
    """The journal's record of a trial that was really trained."""
    facts = merge_ranks([trial_of(folder, cell, backend, *passes).run()])
    return make_record(cell) | facts | {"passes": list(passes)}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """As small as the models are, threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder with the reference's update, and its record."""
    folder = tmp_path_factory.mktemp("truth")
    cell = small_cell("sound").reference()
    return folder, record_of(folder, cell, registry()[REFERENCE], "time", "update")


def judged(truth: tuple[Path, dict[str, Any]], backend: type[Backend]) -> Any:
    """The row of a backend in the judged trials table, beside the reference."""
    folder, reference = truth
    record = record_of(folder, small_cell(backend.name), backend, "time", "update")
    trials = gates.judge(make_tables([reference, record], make_manifest())).trials
    assert trials["status"].iloc[0] == "ok", trials["reason"].iloc[0]
    return trials.iloc[1]


class FakeCuda:
    """A device that works on behind the host: every call returns at once, what it takes is only queued."""

    def __init__(self) -> None:
        self.queued = self.done = 0.0
        self.peak = 0
        self.synchronized_at: list[float] = []

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self, stream: Any = None) -> None:
                self.at = cuda.queued

            def elapsed_time(self, later: Any) -> float:
                if max(self.at, later.at) > cuda.done:
                    raise RuntimeError("device not ready")
                return 1e3 * (later.at - self.at)

        class Stats(dict[str, int]):
            def __missing__(self, key: str) -> int:
                return cuda.peak if key.endswith(".peak") else 0

        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch.accelerator, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", self.forget_peak)
        monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device=None: Stats())
        monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)

    def synchronize(self, device: Any = None) -> None:
        self.synchronized_at.append(self.queued)
        if self.done < self.queued:
            time.sleep(0.2)
        self.done = self.queued

    def forget_peak(self, device: Any = None) -> None:
        self.peak = 0

    def use(self, size: int) -> None:
        self.peak = max(self.peak, size)


class Queued(Sound):
    """Trains on the fake device: a quarter of a second per micro-batch; least memory in the timed windows."""

    cuda: ClassVar[FakeCuda]

    def setup(self, job: Job) -> None:
        super().setup(job)
        self.cuda.use(1000)

    def backward(self, job: Job, batch: Any, window: int) -> None:
        super().backward(job, batch, window)
        self.cuda.queued += 0.25
        self.cuda.use(500 if window < job.cell.warmup_windows else 10)


@pytest.fixture
def on_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankTrial:
    """A trial on the fake device, ready for its time pass."""
    monkeypatch.setattr(Queued, "cuda", FakeCuda(), raising=False)
    trial = trial_of(tmp_path, small_cell("sound", device=Device.CUDA), Queued, "time")
    Queued.cuda.patch(monkeypatch)
    trial.device = torch.device("cuda")
    return trial


def test_steps_on_a_device_take_its_own_time_however_far_the_host_runs_ahead(
    on_device: RankTrial,
) -> None:
    assert on_device.time()["step_seconds"] == pytest.approx([1.0, 1.0, 1.0])
    assert Queued.cuda.synchronized_at[0] == 5 * 4 * 0.25, (
        "nothing waits for the device before the end"
    )
    assert on_device.training_s > 0.2, "training ends when the device is done"


def test_peak_memory_of_a_device_is_of_the_timed_steps_only(on_device: RankTrial) -> None:
    memory = on_device.time()["cuda_memory"]
    assert {memory[name] for name in ("allocated", "active", "reserved")} == {10}


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (StepsTooOften, "20 optimizer steps were taken, 5 were due"),
        (AllButLast, "samples were lost"),
        (StepsOneLate, "updates used 1,4 micro-batches each, 4 were due"),
        (LastOnly, "samples were lost"),
        (LeavesTheLastWindow, "4 optimizer steps were taken, 5 were due"),
    ],
)
@pytest.mark.usefixtures("lonely_group")
def test_broken_loops_are_invalid(
    truth: tuple[Path, dict[str, Any]], backend: type[Backend], reason: str
) -> None:
    row = judged(truth, backend)
    assert row["status"] == "invalid" and reason in row["reason"]


def test_a_sound_loop_is_valid(truth: tuple[Path, dict[str, Any]]) -> None:
    row = judged(truth, Sound)
    assert row["status"] == "ok", row["reason"]
    assert row["max_loss_deviation"] < 1e-5, (
        "the mean of a window's losses is the loss of the whole batch"
    )


class Notes(Sound):
    """Notes what it is handed in each pass, and where it ends."""

    handed: ClassVar[list[tuple[int, int, Cell]]] = []
    steps: ClassVar[list[int]] = []

    def train(self, job: Job) -> None:
        self.handed.append((job.windows, len(job.loader), job.cell))
        self.steps.append(0)
        super().train(job)

    def setup(self, job: Job) -> None:
        super().setup(job)
        self.optimizer.register_step_post_hook(lambda *_: self.count())

    def count(self) -> None:
        self.steps[-1] += 1


@pytest.mark.usefixtures("lonely_group")
def test_passes_are_handed_the_same_windows_and_end_where_they_have_enough(
    truth: tuple[Path, dict[str, Any]],
) -> None:
    cell = small_cell("sound")
    passes = ("time", "update", "collectives", "memory", "dispatch")
    record_of(truth[0], cell, Notes, *passes)
    assert set(Notes.handed) == {(cell.windows, cell.windows * cell.accumulate, cell)}
    assert Notes.steps[:2] == [cell.windows, 1]
    assert all(SETTLED_WINDOWS < steps <= cell.windows for steps in Notes.steps[2:])


class DefersInNameOnly(DDPDeferred):
    """The wrapper's ``no_sync`` does nothing."""

    def continue_training(self, job: Job) -> None:
        self.model.no_sync = nullcontext  # type: ignore[method-assign]
        super().continue_training(job)


@pytest.mark.usefixtures("lonely_group")
def test_a_deferral_that_does_nothing_is_seen_in_the_collectives(tmp_path: Path) -> None:
    size = {}
    for backend in (DDPEager, DDPDeferred, DefersInNameOnly):
        trial = trial_of(tmp_path, small_cell(backend.name), backend, "collectives")
        rows = trial.collectives()
        size[backend] = sum(row["payload_bytes"] for row in rows if row["op"] == "all_reduce")
    assert size[DDPDeferred] == 4 * trial.num_parameters
    assert size[DDPEager] == size[DefersInNameOnly] == 4 * size[DDPDeferred]


class Spends(Sound):
    """Makes a large tensor and drops it at once."""

    when: ClassVar[str]

    def setup(self, job: Job) -> None:
        super().setup(job)
        if self.when == "init":
            torch.empty(LARGE // 4)

    def backward(self, job: Job, batch: Any, window: int) -> None:
        super().backward(job, batch, window)
        if self.when == "every window" or (
            self.when == "first windows" and window < SETTLED_WINDOWS
        ):
            torch.empty(LARGE // 4)


@pytest.mark.parametrize(
    ("when", "counts"),
    [("never", False), ("init", False), ("first windows", False), ("every window", True)],
)
def test_peak_memory_is_of_a_settled_window_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, counts: bool
) -> None:
    monkeypatch.setattr(Spends, "when", when, raising=False)
    peak = trial_of(tmp_path, small_cell("sound"), Spends, "memory").memory()["peak"]
    assert LARGE <= peak < 2 * LARGE if counts else 0 < peak < LARGE // 10


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), Status.CRASHED),
        (torch.OutOfMemoryError("nothing left"), Status.OOM),
        (MemoryError(), Status.OOM),
    ],
)
def test_out_of_memory_is_a_type_and_no_word(error: Exception, status: Status) -> None:
    assert rank.failure(error)["status"] == status
