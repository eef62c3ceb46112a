"""Runs on GPUs that are not there: every pass of every backend, and every way in which a run may end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.backends.base import registry
from bench.backends.deepspeed import ZeroBackend
from bench.judge.gates import known_defect
from bench.plan.cell import Sharding
from bench.run.journal import Journal, read_manifest
from bench.run.manifest import GpuSharing
from tests.conftest import ROOT
from tests.cuda import tables
from tests.cuda.cells import NEVER, NEVER_ALONE
from tests.cuda.conftest import Machine

SMOKE = ("run", "--matrix", "smoke", "--device", "cuda", "--timeout", "600")
BATCH = ("--batch", "12")
"""Divides by three micro-batches on each of four GPUs."""
ON_H100 = ("--accumulate", "2", "--batch", "4")
"""As the committed runs were made."""
DDP = ("--backend", "ddp-deferred")
UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(NEVER_ALONE, "wraps no model in DDP on one GPU"),
    "torchtitan-eager": r"needs torch>=2\.13, not 2\.11",
    **dict.fromkeys(
        [name for name in NEVER if name.startswith("deepspeed")], "sums in the model's dtype, bf16"
    ),
    "deepspeed-zero3-defaults-eager": "release their parameters while",
}
"""Why a backend may be unsupported in the smoke matrix on CUDA: a pattern for its reason, by name."""

SAME = ("collectives", "accumulation")
"""Passes that find the same on every device."""


def told(records: list[dict[str, Any]]) -> list[str]:
    """What every trial came to, to be read where a test fails."""
    return [
        f"{record['cell']['backend']} W={record['cell']['world_size']}: {record['status']} {record['reason']}"
        for record in records
    ]


def is_expected(record: dict[str, Any]) -> bool:
    """Whether a trial is right, or unsupported for the known reason."""
    pattern = UNSUPPORTED.get(record["cell"]["backend"])
    is_known = pattern is not None and re.search(pattern, record["reason"] or "") is not None
    return record["status"] == "ok" or (record["status"] == "unsupported" and is_known)


def unexpected(records: list[dict[str, Any]]) -> list[str]:
    """The trials that did not end as all should."""
    return told([record for record in records if not is_expected(record)])


def judged(machine: Machine) -> list[str]:
    """What the gates found wrong, but for documented defects of frameworks."""
    trials = pd.read_parquet(machine.folder / "run" / "trials.parquet")
    invalid = trials[trials["status"] == "invalid"].to_dict("records")
    manifest = read_manifest(machine.folder / "run")
    causes = ("backend", "status", "failed_gates", "update_causes")
    wrong = [row for row in invalid if not known_defect(manifest, *(row[name] for name in causes))]
    return [f"{row['backend']}: {row['reason']}" for row in wrong]


VARIANTS: Mapping[str, tuple[str, ...]] = {
    "one": ("--world-size", "1"),
    "two": ("--world-size", "2"),
    "four": ("--world-size", "4"),
    "bf16": ("--world-size", "2", "--precision", "bf16"),
    "clipped": ("--world-size", "2", "--clip-norm", "0.5"),
    "checkpointed": ("--world-size", "2", "--activation-checkpointing", "on"),
    "selective": (
        "--world-size",
        "2",
        "--activation-checkpointing",
        "on",
        "--selective-checkpointing",
        "on",
    ),
    "fused": ("--world-size", "2", "--optimizer", "adamw-fused"),
    "shared": ("--world-size", "2", "--share-gpu"),
}


def largest(run: Path) -> tuple[int, float, float]:
    """How many trials are right; of them, the largest error of an update, and the largest deviation of a loss."""
    trials = pd.read_parquet(run / "trials.parquet")
    right = trials[(trials["status"] == "ok") & (trials["backend"] != "reference")]
    return len(right), float(right["update_error"].max()), float(right["max_loss_deviation"].max())


def row_of_values(machine: Machine, variant: str) -> dict[str, str]:
    """What that run found on CUDA, and the same on the CPU, where no ranks share a GPU."""
    options = [option for option in VARIANTS[variant] if option != "--share-gpu"]
    machine.bench(*SMOKE, *options, *BATCH, "--device", "cpu", "--out", "cpu")
    trials, update_error, deviation = largest(machine.folder / "run")
    _, update_error_on_cpu, deviation_on_cpu = largest(machine.folder / "cpu")
    return {
        "options": " ".join(VARIANTS[variant]),
        "trials": str(trials),
        "update_error": f"{update_error:.1e}",
        "update_error_on_cpu": f"{update_error_on_cpu:.1e}",
        "loss_deviation_nats": f"{deviation:.1e}",
        "loss_deviation_on_cpu_nats": f"{deviation_on_cpu:.1e}",
    }


@pytest.mark.parametrize(
    "variant",
    [name if name == "one" else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS],
)
def test_every_backend_passes_every_gate(
    machine: Machine, variant: str, request: pytest.FixtureRequest
) -> None:
    gpus = 1 if variant == "shared" else 4
    process = machine.bench(*SMOKE, *VARIANTS[variant], *BATCH, "--out", "run", gpus=gpus)
    records = machine.records()
    assert len(records) > 15, process.stdout + process.stderr
    assert process.returncode == 0 and not unexpected(records) and not judged(machine), (
        process.stdout
    )
    if request.config.getoption("--gpu-tables"):
        tables.write_values(row_of_values(machine, variant))
    for record in (record for record in records if record["status"] == "ok"):
        allocator = record["time"]["cuda_memory"]
        assert 0 < allocator["allocated"] <= allocator["active"] <= allocator["reserved"]
        assert (
            record["device_name"] == "NVIDIA H100 80GB HBM3"
            and len(record["time"]["step_seconds"]) == 3
        )
        assert set(record) >= set(record["passes"])
        if "memory" in record["passes"]:
            assert record["memory"]["peak_allocator_allocated"] > 0
            assert record["memory"]["held_allocator_reserved"] > 0


def first_trials(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The finished trials by backend, without that of the A/A twin."""
    return {
        r["cell"]["backend"]: r for r in records if r["status"] == "ok" and not r["cell"]["twin"]
    }


def allocated(trial: dict[str, Any]) -> int:
    """Bytes at the peak of torch's allocator."""
    return int(trial["memory"]["peak_allocator_allocated"])


@pytest.mark.parametrize(
    ("options", "runs", "nats"),
    [
        pytest.param(("--backend", "ddp-deferred,fsdp2-eager"), ("h100",), 1e-6, id="few"),
        pytest.param((), ("h100", "h100-rest"), 1e-6, id="all", marks=pytest.mark.slow),
        pytest.param(
            ("--precision", "bf16", "--optimizer", "adamw-fused"), ("h100-bf16",), 1e-3, id="bf16"
        ),
    ],
)
def test_a_trial_finds_what_it_found_on_an_h100(
    machine: Machine, options: tuple[str, ...], runs: tuple[str, ...], nats: float
) -> None:
    there = first_trials(
        record for name in runs for record in Journal(ROOT / "results" / name).read()
    )
    if "--backend" not in options:
        options += ("--backend", ",".join(there.keys() - {"reference"}))
    machine.bench(*SMOKE, "--world-size", "1", *ON_H100, *options, "--out", "run")
    here = first_trials(machine.records())
    assert here.keys() == {"reference", *options[options.index("--backend") + 1].split(",")}
    for backend, stub in here.items():
        h100 = there[backend]
        assert stub["time"]["losses"] == pytest.approx(h100["time"]["losses"], abs=nats), backend
        assert (
            stub["time"]["micro_batches_per_update"] == h100["time"]["micro_batches_per_update"]
        ), backend
        if backend != "reference":
            assert [stub[key] for key in SAME] == [h100[key] for key in SAME], backend
            if registry()[backend].sharding is Sharding.PARAMS and issubclass(
                registry()[backend], ZeroBackend
            ):  # then each pass left its engine behind for the next, in untracked memory
                assert stub["memory"]["peak"] == h100["memory"]["peak"], backend
                continue
            more = 6144 if backend == "lightning-fsdp2" else 0
            assert allocated(h100) - allocated(stub) == more, backend


def test_the_doctor_finds_the_gpus_good(machine: Machine) -> None:
    process = machine.bench("doctor", gpus=2)
    assert "NVIDIA H100 80GB HBM3" in process.stdout, process.stdout + process.stderr
    assert "cuda can run" in process.stdout
    bad = [
        line for line in process.stdout.splitlines() if line.lstrip().lower().startswith("error")
    ]
    assert not bad and process.returncode == 0, process.stdout


def test_without_nvml_a_run_is_sound_and_says_why_it_has_no_telemetry(
    machine: Machine, stub: Path
) -> None:
    """As on ROCm, whose GPUs torch alone sees."""
    libraries = machine.folder / "lib"
    shutil.copytree(stub / "lib", libraries, symlinks=True)
    (libraries / "libnvidia-ml.so.1").unlink()
    without = {"LD_LIBRARY_PATH": str(libraries)}
    backends = "ddp-deferred,fsdp2-eager,deepspeed-zero2-eager"
    process = machine.bench(
        *SMOKE, "--backend", backends, "--world-size", "1", "--out", "run", **without
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert not unexpected(machine.records()), told(machine.records())
    trials = pd.read_parquet(machine.folder / "run" / "trials.parquet")
    assert (trials["device_name"] == "NVIDIA H100 80GB HBM3").all() and trials[
        "step_time_s"
    ].notna().all()
    for column in (
        "energy_j_per_step",
        "sm_clock_mhz",
        "power_w",
        "clock_slowdowns",
        "foreign_gpu_processes",
    ):
        assert trials[column].isna().all(), column
    assert (
        "no telemetry: NVMLError_LibraryNotFound"
        in machine.bench("check", "run", "--json", **without).stdout
    )
    doctor = machine.bench("doctor", **without).stdout
    assert "cuda can run" in doctor and "because NVML does not answer" in doctor


def test_a_model_that_computes_otherwise_under_autocast_is_invalid(machine: Machine) -> None:
    """DDP computes in autocast, FSDP2 with bf16 copies; the plain model has bf16 parameters."""
    options = (
        "--workload",
        "tests.cuda.repeating:repeating",
        "--model",
        "micro",
        "--precision",
        "bf16",
    )
    process = machine.bench(
        *SMOKE,
        *options,
        "--backend",
        "ddp-deferred,fsdp2-deferred",
        "--world-size",
        "1",
        "--out",
        "run",
    )
    found = {line.split(":")[0] for line in judged(machine) if "attention" in line}
    assert found == {"ddp-deferred"}, process.stdout + "\n".join(judged(machine))


def test_a_virtual_world_on_a_gpu(machine: Machine) -> None:
    backends = "ddp-deferred,fsdp2-deferred,deepspeed-zero3-eager"
    machine.bench(
        *SMOKE, "--virtual-world", "8", "--micro-batch", "1", "--backend", backends, "--out", "run"
    )
    records = machine.records()
    assert {record["cell"]["backend"] for record in records} == set(backends.split(","))
    assert not unexpected(records), told(records)
    assert all(
        record["cell"]["virtual"] and record["cell"]["world_size"] == 8 for record in records
    )


SHARING = "ddp-deferred,fsdp2-eager,deepspeed-zero2-eager,lightning-deepspeed-zero3"


def shared_records(machine: Machine, **settings: str) -> list[dict[str, Any]]:
    """The trials of two ranks that share a GPU, which are as they should be."""
    options = ("--share-gpu", "--world-size", "2", "--backend", SHARING)
    process = machine.bench(*SMOKE, *options, "--out", "run", **settings)
    records = [record for record in machine.records() if record["cell"]["backend"] != "reference"]
    assert {record["cell"]["backend"] for record in records} == set(SHARING.split(",")), (
        process.stderr
    )
    assert not unexpected(records), told(records)
    return records


@pytest.mark.parametrize(
    "visible", ["0", "GPU-11111111-1111-1111-1111-111111111111"], ids=["index", "uuid"]
)
def test_ranks_that_share_a_gpu(machine: Machine, visible: str) -> None:
    """Over NCCL, for which each rank is a host of its own, so their collectives overlap with computing as elsewhere."""
    records = shared_records(machine, CUDA_VISIBLE_DEVICES=visible, NCCL_PROTO="Simple")
    assert read_manifest(machine.folder / "run").sharing == GpuSharing(over="NCCL")
    assert all(
        record["cell"]["shared_nccl"] and "exposure" in record["passes"] for record in records
    )
    trials = (
        pd.read_parquet(machine.folder / "run" / "trials.parquet")
        .set_index("backend")
        .loc[SHARING.split(",")]
    )
    assert trials[["step_time_s", "exposed_s", "collective_s"]].isna().all(axis=None), (
        "they took turns on the GPU"
    )


def test_ranks_that_share_a_gpu_use_gloo_where_nccl_fails(machine: Machine) -> None:
    records = shared_records(machine, FAKE_NCCL_KILL="1:2")
    sharing = read_manifest(machine.folder / "run").sharing
    assert sharing is not None and sharing.over == "gloo"
    assert "rank 1" in sharing.reason and "SIGKILL" in sharing.reason
    assert not any(
        record["cell"]["shared_nccl"] or "exposure" in record["passes"] for record in records
    )


def test_a_cell_that_does_not_fit_is_a_row_that_says_so(machine: Machine) -> None:
    """600 MiB are the context's, and cuBLAS wants 32 for forward and 32 for backward."""
    process = machine.bench(
        *SMOKE, *DDP, "--world-size", "1", "--try-all", "--out", "run", FAKE_MEM_MIB="660"
    )
    rows = {record["cell"]["backend"]: record for record in machine.records()}
    assert rows["ddp-deferred"]["status"] == "oom", told(machine.records())
    assert "out of memory" in rows["ddp-deferred"]["reason"]
    assert process.returncode == 1


def test_a_rank_killed_inside_nccl_ends_its_trial_and_no_other(machine: Machine) -> None:
    began = time.monotonic()
    machine.bench(*SMOKE, *DDP, "--world-size", "2", "--out", "run", gpus=2, FAKE_NCCL_KILL="1:9")
    rows = [record for record in machine.records() if record["cell"]["backend"] == "ddp-deferred"]
    assert rows and all(row["status"] == "crashed" for row in rows), told(rows)
    assert all("rank 1" in row["reason"] and "SIGKILL" in row["reason"] for row in rows), told(rows)
    reference = next(
        record for record in machine.records() if record["cell"]["backend"] == "reference"
    )
    assert reference["status"] == "ok"
    assert time.monotonic() - began < 300, "the other rank waits in NCCL for ever, and was ended"


def ended(machine: Machine) -> list[dict[str, Any]]:
    """The trials that were not interrupted; those that were are run again."""
    return [record for record in machine.records() if record["status"] != "interrupted"]


def test_an_interrupted_run_is_resumed(machine: Machine) -> None:
    command = [sys.executable, "-m", "bench", *SMOKE, *DDP, "--world-size", "1", "--out", "run"]
    process = subprocess.Popen(
        command,
        cwd=machine.folder,
        env=machine.environment(1, values=True),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    journal = machine.folder / "run" / "trials.jsonl"
    while not (journal.exists() and journal.read_bytes().count(b"\n")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    finished = len(ended(machine))
    machine.bench("run", "--resume", "run")
    records = ended(machine)
    assert len(records) > finished and not unexpected(records), told(records)
    assert sorted(record["cell"]["backend"] for record in records) == [
        "ddp-deferred",
        "ddp-deferred",
        "reference",
    ]
