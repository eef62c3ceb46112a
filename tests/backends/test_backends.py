"""Every backend, trained for real on two gloo ranks, against the single-process full-batch reference."""

from __future__ import annotations

import gc
import inspect
import weakref
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench.backends import fsdp2
from bench.backends.base import EXTRA_BACKENDS, known, registry
from bench.backends.deepspeed import ZeroBackend
from bench.errors import UnsupportedError
from bench.judge.gates import Gate
from bench.judge.update_causes import Cause
from bench.launch.launcher import Launcher
from bench.measure.trial import RankTrial
from bench.plan.cell import REFERENCE, REFERENCES, SHARDED_REFERENCE, Cell, Sharding, Status, Sync
from bench.plan.models import SIZES
from bench.plan.task import Spec
from studies import settings
from tests.conftest import CHECKPOINTED, CLIP, CLIPPED, CLIPPING, IN_BF16, ROOT, WATCHED, Run, first
from tests.factories import make_cell, parsed_records

BACKENDS = sorted(registry())
DEFECTIVE = [name for name, backend in registry().items() if backend.defect]
DDP = ["ddp-eager", "ddp-deferred", "lightning-ddp", "hf-trainer-ddp"]
NOT_IN_BF16 = [name for name, backend in registry().items() if backend.refuses.bf16]
SOUND = [name for name in BACKENDS if name not in DEFECTIVE]
P = SIZES["micro"].num_parameters
N, W, WARMUP, TIMED = 3, 2, 2, 3
WINDOWS = WARMUP + TIMED
GROUPS = SIZES["micro"].num_layers + 1
"""FSDP2's units: the blocks and the root."""


def test_the_run_succeeds_and_has_every_backend_once(fp32_run: Run) -> None:
    assert fp32_run.process.returncode == 0, fp32_run.process.stdout + fp32_run.process.stderr
    names = [
        record["cell"]["backend"] for record in fp32_run.records
    ]  # HSDP on four ranks has a reference of its own
    assert sorted([*names, SHARDED_REFERENCE]) == sorted([*BACKENDS, REFERENCE])
    assert {record["status"] for record in fp32_run.records} == {"ok"}


@pytest.mark.parametrize("backend", SOUND)
def test_fp32_update_and_losses_equal_the_reference(
    fp32_run: Run, bf16_run: Run, backend: str
) -> None:
    trial = (bf16_run if backend == SHARDED_REFERENCE else fp32_run).trial(backend)
    assert trial["status"] == "ok", trial["reason"]
    assert trial["update_error"] < 2e-6
    assert trial["update_scale"] == pytest.approx(1, abs=1e-6)
    assert trial["max_loss_deviation"] < 1e-4
    assert trial["final_loss"] > 1


@pytest.mark.parametrize(
    "backend", first(IN_BF16, [name for name in SOUND if name not in NOT_IN_BF16])
)
def test_bf16_update_and_losses_are_within_tolerance(bf16_run: Run, backend: str) -> None:
    trial = bf16_run.trial(backend)
    assert trial["status"] == "ok", trial["reason"]
    if backend not in REFERENCES:
        assert 1e-4 < trial["update_error"] < 1.5e-2, (
            "bf16 must be in use, and sound; larger models may have more"
        )
        assert trial["update_scale"] == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize("backend", first(IN_BF16, NOT_IN_BF16))
def test_what_would_accumulate_in_bf16_is_refused(bf16_run: Run, backend: str) -> None:
    trial = bf16_run.trial(backend)
    assert trial["status"] == "unsupported"
    assert "sums in the model's dtype" in trial["reason"]


IN_BOTH = [("fp32", name) for name in DEFECTIVE] + first([], [("bf16", name) for name in DEFECTIVE])


@pytest.mark.parametrize("case", IN_BOTH)
def test_the_loss_divided_twice_is_caught(
    request: pytest.FixtureRequest, case: tuple[str, str]
) -> None:
    precision, backend = case
    trial = request.getfixturevalue(f"{precision}_run").trial(backend)
    assert trial["status"] == "invalid"
    assert trial["update_scale"] == pytest.approx(1 / N, rel=1e-2)
    assert trial["update_causes"] == Cause.DIVIDED_TWICE
    assert trial["max_loss_deviation"] < 5e-2, "AdamW hides the wrong scale from the loss curve"


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_is_taken_and_seen_at_the_inner_optimizer(
    fp32_run: Run, bf16_run: Run, backend: str
) -> None:
    timed = (bf16_run if backend == SHARDED_REFERENCE else fp32_run).record(backend)["time"]
    accumulate = 1 if backend in REFERENCES else N
    assert timed["num_updates"] == WINDOWS
    assert timed["num_micro_batches"] == timed["num_fetched"] == WINDOWS * accumulate
    assert timed["micro_batches_per_update"] == [accumulate]
    assert timed["ranks_agree"]
    assert all(steps == WINDOWS for steps in timed["reported"].values())
    framework_counts = "deepspeed" in backend or backend.startswith(
        ("lightning", "hf-trainer", "torchtitan")
    )
    assert bool(timed["reported"]) == framework_counts
    assert len(timed["step_seconds"]) == TIMED
    assert len(timed["losses"]) == WINDOWS


def calls(run: Run, backend: str, op: str, dtype: str = "float32") -> tuple[int, int]:
    """Calls and payload bytes of one operation on one dtype in one settled window."""
    rows = [
        row
        for row in run.record(backend)["collectives"]
        if (row["op"], row["dtype"]) == (op, dtype)
    ]
    return sum(row["calls"] for row in rows), sum(row["payload_bytes"] for row in rows)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in REFERENCES])
def test_eager_backends_reduce_n_times_and_deferred_ones_once(fp32_run: Run, backend: str) -> None:
    """DDP and stage 2 all-reduce; the others reduce-scatter, and HSDP all-reduces halves across its replicas too."""
    kind = registry()[backend]
    is_stage_2 = issubclass(kind, ZeroBackend) and kind.stage == 2
    whole = kind.sharding is Sharding.NONE or is_stage_2
    flag = 4 if is_stage_2 else 0  # the check for overflow
    times = 1 if kind.sync is Sync.DEFERRED else N
    assert (
        calls(fp32_run, backend, "all_reduce" if whole else "reduce_scatter")[1]
        == times * 4 * P + flag
    )
    if kind.replicate:
        assert (
            calls(fp32_run, backend, "all_reduce")[1]
            == (N if kind.sync is Sync.EAGER else 1) * 2 * P
        )


def test_a_sharded_reference_gathers_and_reduces_each_parameter_once(bf16_run: Run) -> None:
    cell = bf16_run.record(SHARDED_REFERENCE)["cell"]
    assert (cell["accumulate"], cell["world_size"], cell["precision"]) == (1, W, "fp32"), (
        "whatever is asked for"
    )
    assert cell["activation_checkpointing"]
    assert calls(bf16_run, SHARDED_REFERENCE, "reduce_scatter") == (GROUPS, 4 * P)
    assert calls(bf16_run, SHARDED_REFERENCE, "all_gather")[0] == 2 * GROUPS - 1


@pytest.mark.parametrize("backend", CHECKPOINTED)
def test_checkpointing_changes_the_peak_alone(
    fp32_run: Run, variants_run: Run, backend: str
) -> None:
    """FSDP2's hooks are outside of what is computed once more, so that nothing is gathered a third time."""
    run = replace(variants_run, only={"activation_checkpointing": True})
    here, there = run.record(backend), fp32_run.record(backend)
    assert here["time"]["losses"] == pytest.approx(there["time"]["losses"], rel=1e-7)
    assert here["update"] == there["update"], (
        "to the last bit the same update, judged by one reference"
    )
    assert run.trial(backend)["status"] == "ok"
    assert here["memory"]["held"] == there["memory"]["held"]
    assert here["memory"]["peak"] <= there["memory"]["peak"]
    assert here["collectives"] == there["collectives"]


def test_the_bench_process_stays_small(fp32_run: Run) -> None:
    assert fp32_run.manifest["parent_peak_bytes"] < 300 * 2**20


def test_the_page_of_settings_is_what_the_backends_have_set(fp32_run: Run) -> None:
    assert settings.page(parsed_records(fp32_run.records)) == (ROOT / settings.DOCS).read_text()


@pytest.mark.parametrize(
    ("package", "function"),
    [
        ("deepspeed", "deepspeed.runtime.zero.config:DeepSpeedZeroConfig"),
        ("lightning", "lightning.pytorch:Trainer"),
        ("transformers", "transformers:TrainingArguments"),
    ],
)
def test_a_setting_that_a_version_does_not_know_is_unsupported(package: str, function: str) -> None:
    pytest.importorskip(package)
    arguments = set(inspect.signature(resolve_name(function)).parameters) - {"self"}
    assert known(resolve_name(function), dict.fromkeys(arguments)), "what it knows is not refused"
    with pytest.raises(
        UnsupportedError, match=rf"^{package} [\d.]+\S* does not know the setting leaf_modules$"
    ):
        known(resolve_name(function), {"leaf_modules": {}})


def cell_here(backend: str, windows: int) -> Cell:
    shape = {"model": "micro", "sequence_length": 8, "global_batch_size": 16, "accumulate": 16}
    return make_cell(
        backend=backend, world_size=1, warmup_windows=1, timed_windows=windows - 1, **shape
    )


@pytest.mark.parametrize("backend", DDP)
def test_ddp_takes_no_statistics(
    lonely_group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str
) -> None:
    """It would of the first ten and the hundredth iteration, and have the host wait for the device for that."""
    made: list[DistributedDataParallel] = []
    initialize = DistributedDataParallel.__init__

    def noted(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        initialize(ddp, *args, **kwargs)
        made.append(ddp)

    monkeypatch.setattr(DistributedDataParallel, "__init__", noted)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # as the launcher has it
    spec = Spec(cell=cell_here(backend, 7), passes=("time",), folder=str(tmp_path), reference="")
    assert RankTrial(spec, 0, torch.device("cpu"), registry()[backend]).time()["num_updates"] == 7
    (ddp,) = made
    assert ddp._get_ddp_logging_data()["iteration"] == 0, "the last that statistics were taken of"


def test_deepspeed_starts_no_compiler_and_writes_out_no_parameter(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXTRA_BACKENDS, WATCHED)
    for backend in ("x-zero3", "x-lightning"):
        spec = Spec(
            cell=cell_here(backend, 2),
            passes=("time",),
            folder=str(tmp_path / backend),
            reference="",
        )
        outcome = launcher.run(spec, 120)
        assert outcome.status is Status.OK, outcome.reason
        assert outcome.ranks[0]["time"]["reported"] == {"processes": 0, "tensors": 0}


@pytest.mark.parametrize("backend", first(CLIPPED[:-1], CLIPPING[4:] + CLIPPED[:-1]))
def test_a_clipped_update_equals_the_clipped_reference(clipped_run: Run, backend: str) -> None:
    """Clipping one rank's shard by its own norm, not by that of the whole gradient, would give another length."""
    trial, truth = clipped_run.trial(backend), clipped_run.trial("reference")
    assert trial["status"] == "ok", trial["reason"]
    assert trial["update_error"] < 2e-6 and trial["unclipped_error"] < 2e-6
    assert trial["gradient_norm"] == pytest.approx(truth["gradient_norm"], rel=1e-5)
    assert truth["gradient_norm"] > 2 * CLIP, "clipping must be active"
    assert trial["max_loss_deviation"] < 1e-4
    assert (trial["optimizer"], trial["clip_norm"]) == ("sgd", CLIP)


def test_the_defect_is_explained_through_clipping_and_still_a_known_one(clipped_run: Run) -> None:
    trial, truth = clipped_run.trial("lightning-deepspeed-zero2"), clipped_run.trial("reference")
    assert trial["status"] == "invalid"
    assert trial["unclipped_scale"] == pytest.approx(1 / N, rel=1e-4)
    assert trial["update_scale"] == pytest.approx(
        min(truth["gradient_norm"] / N, CLIP) / CLIP, rel=1e-4
    )
    assert trial["update_causes"] == Cause.DIVIDED_TWICE and trial["failed_gates"] == Gate.UPDATE
    assert "so losses deviate" in trial["reason"]


def test_fsdp2_gathers_a_parameter_when_it_is_looked_at(
    lonely_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks that each kept 8 G parameters would take 256 GB of the host."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    right = {name: value.detach().clone() for name, value in model.named_parameters()}
    mesh = init_device_mesh("cpu", (1,))
    fsdp2.shard(model, list(model), mesh, bf16=False, reshard_after_forward=True)
    gathered: list[DTensor] = []
    full_tensor = DTensor.full_tensor
    monkeypatch.setattr(
        DTensor, "full_tensor", lambda self: (gathered.append(self), full_tensor(self))[1]
    )
    found = fsdp2.Gathered(model)
    assert found.keys() == right.keys() and len(found) == 4 and not gathered
    assert torch.equal(found["1.bias"], right["1.bias"]) and len(gathered) == 1


ENGINES = ["deepspeed-zero2-eager", "deepspeed-zero3-deferred", "lightning-deepspeed-zero3"]


@pytest.mark.parametrize("name", [*ENGINES, "accelerate-deepspeed-zero2"])
def test_an_engine_goes_with_its_backend(name: str) -> None:
    """On CUDA its hooks keep it, and the whole model's memory, from being freed: 31 MB a pass of the smallest model."""
    released: list[str] = []
    engine = SimpleNamespace(destroy=lambda: released.append(name))
    backend: Any = registry()[name]()
    backend.engine = backend.model = engine
    backend.trainer = SimpleNamespace(strategy=SimpleNamespace(model=engine))
    del backend
    assert released == [name]
    registry()[name]()  # one that failed before it had an engine has none to release
    assert released == [name]


def test_a_pass_of_stage_3_leaves_no_parameters_behind(
    lonely_group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On an H100 ZeRO-3 with 1.2 G parameters ran out of memory in its fourth large pass."""
    monkeypatch.setattr("deepspeed.comm.comm.cdb", None)  # of a group that is gone
    for variable, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)  # as the launcher has it
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    name = "deepspeed-zero3-eager"
    spec = Spec(cell=cell_here(name, 4), passes=("time",), folder=str(tmp_path), reference="")
    trial = RankTrial(spec, 0, torch.device("cpu"), registry()[name])
    engines: list[weakref.ref[Any]] = []
    restore_masters = registry()[name].restore_masters

    def noted(backend: Any, model: torch.nn.Module) -> None:
        restore_masters(backend, model)
        engines.append(weakref.ref(backend.wrapped()))

    monkeypatch.setattr(registry()[name], "restore_masters", noted)
    for _ in range(2):
        assert trial.time()["num_updates"] == 4
    gc.collect()
    assert [engine() for engine in engines] == [None, None]
