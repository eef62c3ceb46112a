"""Twenty bugs that other benchmark suites had, and the tests here that fail if one of them is put in.

The list is that of research/benchmark-suites.md, section 1c. Tests without a file's name stand below.

 1  Volume of all steps over the time of one
    test_tokens_per_second_and_mfu_are_of_one_step
    judge/test_tables.py::test_a_sound_trial_by_hand
    judge/test_tables.py::test_step_time_is_the_median
 2  The timer stops before the device is synchronized
    test_steps_on_a_device_take_its_own_time_however_far_the_host_runs_ahead
 3  A micro-step is called a step
    test_broken_loops_are_invalid
    measure/test_taps.py::test_updates
    measure/test_taps.py::test_inner_steps_with_no_micro_batch_between_are_one_update
    judge/test_verdicts.py::TestSides::test_micro_batches_are_no_steps
 4  The flag that defers does nothing under this wrapper
    test_a_deferral_that_does_nothing_is_seen_in_the_collectives
    backends/test_backends.py::test_deferred_fsdp2_reduce_scatters_once
    backends/test_backends.py::test_ddp_all_reduces_the_gradient_once_or_n_times
    backends/test_backends.py::test_deepspeed_reduces_once_or_n_times
 5  The last micro-batch is not synchronized, or off by one
    test_a_window_tells_which_micro_batch_is_its_last
    test_broken_loops_are_invalid
    backends/test_backends.py::test_fp32_update_and_losses_equal_the_reference
 6  Only the last micro-batch counts
    test_broken_loops_are_invalid
    test_a_sound_loop_is_valid
    test_failures.py::test_each_failure_is_a_row_with_its_status_and_reason
    backends/test_backends.py::test_fp32_update_and_losses_equal_the_reference
 7  The peak of memory is that of the initialization
    test_peak_memory_is_of_a_settled_window_only
    test_peak_memory_of_a_device_is_of_the_timed_steps_only
 8  The peak of memory is polled
    test_peak_memory_is_of_a_settled_window_only
    test_peak_memory_of_a_device_is_of_the_timed_steps_only
    measure/test_probes.py::test_ledger_counts_births_and_deaths
 9  Rank 0 instead of the maximum over ranks
    run/test_record.py::test_slowest_rank_and_largest_memory_count
    run/test_record.py::test_cuda_memory_is_the_maximum_of_each_kind
10  An unknown GPU has the peak of another
    judge/test_flops.py::test_no_peak_is_guessed
    judge/test_flops.py::test_known_gpus
11  NVML counts all GPUs, CUDA_VISIBLE_DEVICES renumbers them or names UUIDs
    run/test_machine.py::test_visible_gpus
    run/test_machine.py::test_settings_of_gpus_and_what_a_card_cannot_tell
12  A rank without memory leaves the others waiting
    test_failures.py::test_peers_of_a_failed_rank_end_at_once
13  Failed runs are not in the table
    judge/test_tables.py::test_failed_trials_stay
    judge/test_verdicts.py::TestCompare::test_failed_trials_are_not_dropped_in_silence
    judge/test_verdicts.py::TestSides::test_failed_trials_are_counted
14  A standard deviation with the runs that the mean leaves out
    judge/test_statistics.py::TestBootstrap::test_what_the_mean_leaves_out_does_not_widen_the_interval
15  The incomplete last window is a step under one strategy and not under another
    test_an_incomplete_window_is_a_window
    test_broken_loops_are_invalid
16  Two cells of one name
    test_cells_whose_names_run_together_are_two
    plan/test_cell.py::test_id_depends_on_every_field
17  "OOM" is found in some text
    test_out_of_memory_is_a_type_and_no_word
    test_failures.py::test_each_failure_is_a_row_with_its_status_and_reason
18  A resumed run keeps rows of another driver or GPU
    test_no_run_goes_on_with_another_gpu_driver_or_build
    run/test_runner.py::test_reopen_refuses_another_machine
    run/test_runner.py::test_reopen_refuses_other_packages
    run/test_machine.py::test_visible_gpus
19  Cells of different precision are compared
    test_bf16_is_no_speed_up_over_an_fp32_reference
    test_cells_that_compute_otherwise_are_not_comparable
    judge/test_verdicts.py::TestCompare::test_not_comparable
20  The parent waits busily on a core of the run
    test_who_waits_for_a_trial_uses_no_core
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import psutil
import pytest
import torch
import torch.distributed as dist

from bench.backends.base import Backend, Job, Window, registry
from bench.backends.plain import DDPDeferred, DDPEager
from bench.errors import InputError
from bench.judge import gates, tables
from bench.judge.sides import side
from bench.judge.verdicts import Reason, Verdict, compare, judge_all
from bench.launch import rank
from bench.launch.launcher import Launcher
from bench.measure.trial import RankTrial
from bench.plan.cell import REFERENCE, Cell, Device, Sharding, Status, Sync
from bench.plan.estimates import peak_flops
from bench.plan.expand import expand
from bench.plan.task import SETTLED_WINDOWS, Spec
from bench.report import figures
from bench.run import machine, start
from bench.run.record import merge_ranks
from tests.factories import make_backend, make_cell, make_manifest, make_matrix, make_record

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
            self.step()

    def setup(self, job: Job) -> None:
        self.model = job.build()
        self.optimizer = job.optimizer(self.model.parameters())

    def backward(self, job: Job, batch: Any, window: int) -> None:
        (job.loss(self.model, batch) / job.accumulate).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_parameters(self) -> dict[str, Any]:
        return dict(self.model.named_parameters())


class StepsEveryMicroBatch(Sound):
    def backward(self, job: Job, batch: Any, window: int) -> None:
        super().backward(job, batch, window)
        self.step()

    def train(self, job: Job) -> None:
        self.setup(job)
        for batch in job.loader:
            self.backward(job, batch, 0)


class KeepsTheLast(Sound):
    def backward(self, job: Job, batch: Any, window: int) -> None:
        self.optimizer.zero_grad()
        super().backward(job, batch, window)


class SkipsTheLast(Sound):
    """The gradient of the window's last micro-batch is not in its update."""

    def train(self, job: Job) -> None:
        self.setup(job)
        for window in job.each_window():
            for batch, last in window:
                loss = job.loss(self.model, batch)
                if not last:
                    (loss / job.accumulate).backward()
            self.step()


class StepsAtZero(Sound):
    """Counts micro-batches from 0: the first window has one, and three are left over at the end."""

    def train(self, job: Job) -> None:
        self.setup(job)
        for index, batch in enumerate(job.loader):
            self.backward(job, batch, 0)
            if index % job.accumulate == 0:
                self.step()


class LeavesTheLastWindow(Sound):
    """Steps when the next window begins, which never happens to the last one."""

    def train(self, job: Job) -> None:
        self.setup(job)
        for index, batch in enumerate(job.loader):
            if index and index % job.accumulate == 0:
                self.step()
            self.backward(job, batch, 0)


def small_cell(backend: str, **changes: Any) -> Cell:
    """A cell that trains within milliseconds on one rank: 5 windows of 4 micro-batches of 2 samples of 8 tokens."""
    values = {"workload": "tests.own_workload:Cycle", "model": "perceptron", "world_size": 1, "global_batch_size": 8}
    return make_cell(**({"backend": backend, "sequence_length": 8, **values} | changes))


def trial_of(folder: Path, cell: Cell, backend: type[Backend], *passes: str) -> RankTrial:
    """One trial in this process, whose only rank is 0."""
    spec = Spec(cell=cell, passes=passes, folder=str(folder), reference=str(folder / "reference.safetensors"))
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
    trials = gates.judge(tables.build([reference, record], make_manifest())).trials
    assert trials["status"].iloc[0] == "ok", trials["reason"].iloc[0]
    return trials.iloc[1]


def killers() -> dict[int, list[str]]:
    """The names of tests in this file's docstring, by the mutant's number."""
    found: dict[int, list[str]] = {}
    for number, name in re.findall(r"^([ \d]\d)  |^    ((?:[\w/]+\.py::)?[\w:]+)$", str(__doc__), re.MULTILINE):
        if number:
            found[int(number)] = []
        else:
            found[max(found)].append(name)
    return found


def test_every_mutant_has_a_test() -> None:
    assert list(killers()) == list(range(1, 21))
    assert all(killers().values())


@pytest.mark.parametrize("name", sorted({name for names in killers().values() for name in names}))
def test_every_named_test_exists(name: str) -> None:
    file, _, inside = name.rpartition(".py::")
    found: Any = importlib.import_module("tests." + (file or "test_mutants").replace("/", "."))
    for part in inside.split("::"):
        found = getattr(found, part)
    assert callable(found) and found.__name__.startswith("test_")


def test_tokens_per_second_and_mfu_are_of_one_step(tmp_path: Path) -> None:  # mutant 1
    record = record_of(tmp_path, small_cell("sound"), Sound, "time")
    assert len(record["time"]["step_seconds"]) == 3
    peak = peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    assert peak is not None
    cell = small_cell("sound", world_size=2, precision="bf16")
    counted = make_record(cell, flops_per_step=1e12, device_name="NVIDIA H100 80GB HBM3")
    measured, computed = (tables.build([one], make_manifest()).trials.iloc[0] for one in (record, counted))
    # 8 samples of 8 tokens, in a window like any other.
    assert measured["tokens_per_s"] == pytest.approx(64 / statistics.median(record["time"]["step_seconds"]))
    assert computed["mfu"] == pytest.approx(1e12 / statistics.median(counted["time"]["step_seconds"]) / (2 * peak))


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

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.forget_peak)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: Stats())
        monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)

    def synchronize(self, device: Any = None) -> None:
        self.synchronized_at.append(self.queued)
        if self.done < self.queued:
            time.sleep(0.2)
        self.done = self.queued

    def forget_peak(self, device: Any = None) -> None:
        self.peak = 0

    def use(self, size: int) -> None:
        """Allocate and free."""
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


def test_steps_on_a_device_take_its_own_time_however_far_the_host_runs_ahead(on_device: RankTrial) -> None:  # mutant 2
    assert on_device.time()["step_seconds"] == pytest.approx([1.0, 1.0, 1.0])
    assert Queued.cuda.synchronized_at[0] == 5 * 4 * 0.25, "nothing waits for the device before the end"
    assert on_device.training_s > 0.2, "training ends when the device is done"


def test_the_timed_stretch_is_when_the_device_took_the_timed_steps(on_device: RankTrial) -> None:
    before = time.monotonic()
    found = on_device.time()
    assert found["ended"] - found["began"] == pytest.approx(sum(found["step_seconds"]))
    assert before < found["ended"] <= time.monotonic()


def test_peak_memory_of_a_device_is_of_the_timed_steps_only(on_device: RankTrial) -> None:  # mutants 7 and 8
    memory = on_device.time()["cuda_memory"]
    assert {memory[name] for name in ("allocated", "active", "reserved")} == {10}


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (StepsEveryMicroBatch, "20 optimizer steps were taken, 5 were due"),  # mutant 3
        (SkipsTheLast, "samples were lost"),  # mutant 5
        (StepsAtZero, "updates used 1,4 micro-batches each, 4 were due"),  # mutants 5 and 15
        (KeepsTheLast, "samples were lost"),  # mutant 6
        (LeavesTheLastWindow, "4 optimizer steps were taken, 5 were due"),  # mutant 15
    ],
)
def test_broken_loops_are_invalid(truth: tuple[Path, dict[str, Any]], backend: type[Backend], reason: str) -> None:
    row = judged(truth, backend)
    assert row["status"] == "invalid" and reason in row["reason"]


def test_a_sound_loop_is_valid(truth: tuple[Path, dict[str, Any]]) -> None:
    row = judged(truth, Sound)
    assert row["status"] == "ok", row["reason"]
    assert row["max_loss_deviation"] < 1e-5, "the mean of a window's losses is the loss of the whole batch"


@pytest.fixture
def lonely_group(tmp_path: Path) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class DefersInNameOnly(DDPDeferred):
    """The wrapper's ``no_sync`` does nothing."""

    def again(self, job: Job) -> None:
        self.model.no_sync = nullcontext  # type: ignore[method-assign]
        super().again(job)


@pytest.mark.usefixtures("lonely_group")
def test_a_deferral_that_does_nothing_is_seen_in_the_collectives(tmp_path: Path) -> None:  # mutant 4
    size = {}
    for backend in (DDPEager, DDPDeferred, DefersInNameOnly):
        trial = trial_of(tmp_path, small_cell(backend.name), backend, "collectives")
        rows = trial.collectives()
        size[backend] = sum(row["payload_bytes"] for row in rows if row["op"] == "all_reduce")
    assert size[DDPDeferred] == 4 * trial.num_parameters
    assert size[DDPEager] == size[DefersInNameOnly] == 4 * size[DDPDeferred]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_window_tells_which_micro_batch_is_its_last(size: int) -> None:  # mutant 5
    batches: Any = iter(range(size))
    assert list(Window(size, batches)) == [(index, index == size - 1) for index in range(size)]


@pytest.mark.parametrize(("length", "sizes"), [(8, [4, 4]), (9, [4, 4, 1]), (10, [4, 4, 2]), (3, [3])])
def test_an_incomplete_window_is_a_window(length: int, sizes: list[int]) -> None:  # mutant 15
    given: dict[str, Any] = {"loader": list(range(length)), "accumulate": 4}
    missing = {
        field.name: None
        for field in dataclasses.fields(Job)
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in given
    }
    windows = [[batch for batch, _ in window] for window in Job(**missing, **given).each_window()]
    assert [len(window) for window in windows] == sizes
    assert [batch for window in windows for batch in window] == list(range(length))


class Spends(Sound):
    """Makes a large tensor and drops it at once."""

    when: ClassVar[str]

    def setup(self, job: Job) -> None:
        super().setup(job)
        if self.when == "init":
            torch.empty(LARGE // 4)

    def backward(self, job: Job, batch: Any, window: int) -> None:
        super().backward(job, batch, window)
        if self.when == "every window" or (self.when == "first windows" and window < SETTLED_WINDOWS):
            torch.empty(LARGE // 4)


@pytest.mark.parametrize(
    ("when", "counts"), [("never", False), ("init", False), ("first windows", False), ("every window", True)]
)
def test_peak_memory_is_of_a_settled_window_only(  # mutants 7 and 8
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, counts: bool
) -> None:
    monkeypatch.setattr(Spends, "when", when, raising=False)
    peak = trial_of(tmp_path, small_cell("sound"), Spends, "memory").memory()["peak"]
    assert LARGE <= peak < 2 * LARGE if counts else 0 < peak < LARGE // 10


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), Status.CRASHED),
        (KeyError("OOM"), Status.CRASHED),
        (ValueError("the log of another rank says: torch.OutOfMemoryError: no"), Status.CRASHED),
        (torch.OutOfMemoryError("nothing left"), Status.OOM),
        (MemoryError(), Status.OOM),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_out_of_memory_is_a_type_and_no_word(error: Exception, status: Status) -> None:  # mutant 17
    assert rank.failure(error)["status"] == status


GPU = {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-0", "memory_bytes": 150_000_000_000, "driver": "570.1"}
SETTINGS = {"uuid": "GPU-0", "power_limit_w": 700.0, "ecc": True}


@pytest.mark.parametrize(
    ("function", "key", "now"),
    [
        ("machine", "gpus", [GPU | {"driver": "580.2"}]),
        ("machine", "gpus", [GPU | {"uuid": "GPU-1"}]),
        ("machine", "gpus", [GPU | {"name": "NVIDIA H100"}]),
        ("machine", "gpus", [GPU, GPU]),
        ("machine", "gpus", []),
        ("machine", "gpu_settings", [SETTINGS | {"power_limit_w": 500.0}]),
        ("torch_build", "cuda", "13.0"),
        ("environment", "NCCL_ALGO", "Tree"),
    ],
)
def test_no_run_goes_on_with_another_gpu_driver_or_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, key: str, now: Any
) -> None:  # mutant 18
    then = {
        "machine": {**machine.machine(), "gpus": [GPU], "gpu_settings": [SETTINGS]},
        "torch_build": {"cuda": "12.8"},
        "environment": {"NCCL_ALGO": "Ring"},
    }
    for name, value in then.items():
        monkeypatch.setattr(machine, name, lambda value=value: value)
    backends = {name: make_backend(name) for name in (REFERENCE, "b0")}
    made = make_matrix(backend=["b0"], accumulate=[2])
    start.create(tmp_path / "run", made, expand(made, backends, 0), backends, cold=False)
    assert start.reopen(tmp_path / "run", backends), "nothing has changed yet"
    monkeypatch.setattr(machine, function, lambda: then[function] | {key: now})
    with pytest.raises(InputError, match=f"{function} '{key}' was .* start a new one"):
        start.reopen(tmp_path / "run", backends)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"accumulate": 1, "world_size": 16}, {"accumulate": 11, "world_size": 6}),
        ({"backend": "ddp", "workload": "deferred"}, {"backend": "ddpdeferred", "workload": ""}),
        ({"backend": "a", "model": "b"}, {"backend": "b", "model": "a"}),
        ({"clip_norm": 1.0}, {"clip_norm": 1.0, "seed": 1}),
        ({"learning_rate": 1e-3}, {"learning_rate": 1e-3 + 1e-15}),
    ],
)
def test_cells_whose_names_run_together_are_two(one: dict[str, Any], other: dict[str, Any]) -> None:  # mutant 16
    assert make_cell(**one).cell_id != make_cell(**other).cell_id


def test_bf16_is_no_speed_up_over_an_fp32_reference() -> None:  # mutant 19
    cells = {name: make_cell(precision=name) for name in ("fp32", "bf16")}
    records = [make_record(cell) for cell in (cells["fp32"].reference(), *cells.values())]
    made = gates.judge(tables.build(records, make_manifest([*cells.values()])))
    assert (made.trials["status"] == "ok").all()
    (drawn,) = (one for one in figures.figures(made, make_manifest([*cells.values()])) if one.stem == "speed_up")
    speed_up = drawn.data.reset_index().set_index("cell_id")["speed_up"]
    assert speed_up[cells["fp32"].cell_id] == pytest.approx(1.0)
    assert pd.isna(speed_up[cells["bf16"].cell_id])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "bf16"}, Reason.PRECISION),
        ({"accumulation_dtype": "bf16"}, Reason.ACCUMULATION),
        ({"optimizer": "adamw-fused"}, Reason.WORK),
        ({"global_batch_size": 32}, Reason.WORK),
    ],
)
def test_cells_that_compute_otherwise_are_not_comparable(changes: dict[str, str], reason: Reason) -> None:  # mutant 19
    cells = [make_cell(), make_cell(backend="ddp-eager"), make_cell(**changes)]
    made = tables.build([make_record(cell, repeat) for cell in cells for repeat in range(5)], make_manifest(cells))
    ours, like, unlike = (side(made, cell.cell_id) for cell in cells)
    assert compare(ours, like, None).blocked is None
    for pair in ((ours, unlike), (unlike, ours)):
        found = judge_all([compare(*pair, None)])[0]
        assert (found.verdict, found.reason) == (Verdict.NOT_COMPARABLE, reason)


IDLE = '''
"""What a rank does for the test below: nothing, for a while."""

import json
import time
from pathlib import Path


def idle(payload):
    time.sleep(3)
    (Path(json.loads(payload)) / "rank0.json").write_text(json.dumps({"status": "ok"}))
'''


@dataclasses.dataclass
class Idle:
    """A task whose only rank sleeps."""

    folder: str
    entry: ClassVar[str] = "idle_rank:idle"
    backend: str = "ddp-eager"
    world_size: int = 1

    def to_json(self) -> str:
        return json.dumps(self.folder)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU time of some processes, without that of their children."""
    times = [process.cpu_times() for process in processes if process.is_running()]
    return sum(one.user + one.system for one in times)


def test_who_waits_for_a_trial_uses_no_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # mutant 20
    (tmp_path / "idle_rank.py").write_text(IDLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Launcher(Device.CPU) as launcher:
        first = launcher.run(Idle(str(tmp_path / "first")), 120)
        assert first.status == "ok", first.reason
        (tmp_path / "again").mkdir()
        waiting = [psutil.Process(), *psutil.Process().children(recursive=True)]
        before, began = cpu_seconds(waiting), time.monotonic()
        assert launcher.run(Idle(str(tmp_path / "again")), 120).status == "ok"
        used, wall = cpu_seconds(waiting) - before, time.monotonic() - began
    assert wall > 3
    assert used < 0.3 * wall, "the parent and the agent sleep while the rank does"
