"""The doctor's checks on made-up machines; what it gathers here, and with a made-up NVML."""

from __future__ import annotations

import json
import sys
import tomllib
import types
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.commands import doctor
from bench.commands.doctor import (
    backends,
    cores,
    disk,
    gloo,
    idle,
    loopback,
    memory,
    packages,
    python,
)
from bench.findings import Finding, Level
from bench.launch import gpu_checks, gpus
from bench.launch.gpu_checks import GpuFacts
from bench.launch.torch_facts import TorchFacts, ask_torch
from tests.conftest import ROOT
from tests.fake_nvml import FakeNvml

GIB = 2**30
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
METADATA = {
    "Requires-Python": [PROJECT["requires-python"]],
    "Classifier": PROJECT["classifiers"],
    "Requires-Dist": PROJECT["dependencies"]
    + [
        f"{needed}; extra == '{name}'"
        for name, extra in PROJECT["optional-dependencies"].items()
        for needed in extra
    ],
}
"""As the installed project has it."""
INSTALLED = {
    "torch": "2.13.0+cpu",
    "lightning": "2.6.6",
    "deepspeed": "0.19.8",
    "transformers": "5.23.0",
    "Pydantic": "2.14",
    "filelock": "4.2",
    "psutil": "7.2",
}
CPU_TORCH = TorchFacts(version="2.13.0+cpu", cuda=None, hip=None)
LAPTOP = GpuFacts(
    torch=CPU_TORCH, nvml_error="NVMLError: Driver Not Loaded", environment={}, shm_bytes=64 * 2**20
)
"""Good, without a GPU."""
CARD = {"name": "NVIDIA H100", "uuid": "GPU-aa", "visible": True, "num_processes": 0, "mig": False}
CUDA_TORCH = TorchFacts(
    version="2.13.0+cu130",
    cuda="13.0",
    hip=None,
    devices=[{"index": index, "capability": [9, 0]} for index in range(2)],
    architectures=("sm_80", "sm_90", "compute_90"),
    nccl=True,
)
SERVER = GpuFacts(
    torch=CUDA_TORCH,
    device_nodes=2,
    driver="580.65",
    driver_cuda=(13, 0),
    gpus=(CARD, {**CARD, "uuid": "GPU-bb"}),
    environment={},
    shm_bytes=8 * GIB,
)
"""Good, with two GPUs."""
LOAD = {"foreign_cores": 0.1, "stolen_cores": 0.0}


def examined(facts: GpuFacts) -> list[Finding]:
    return [finding for check in gpu_checks.CHECKS for finding in check(facts)]


def with_torch(**changes: Any) -> GpuFacts:
    return replace(SERVER, torch=replace(CUDA_TORCH, **changes))


def card(*capability: int) -> dict[str, Any]:
    return {"index": 0, "capability": list(capability)}


def with_gpu(**changes: Any) -> GpuFacts:
    return replace(SERVER, gpus=({**CARD, **changes},))


def with_package(name: str, version: str) -> Iterator[Finding]:
    return packages({**INSTALLED, name: version}, METADATA)


@pytest.mark.parametrize("facts", [LAPTOP, SERVER])
def test_a_good_machine_is_good(facts: GpuFacts) -> None:
    found = [
        *examined(facts),
        *python((3, 12, 4), METADATA),
        *packages(INSTALLED, METADATA),
        *gloo(CPU_TORCH, ""),
    ]
    found += [*loopback(""), *cores(8, None), *memory(16 * GIB), *disk(100 * GIB), *idle(LOAD, 8)]
    found += backends({"cpu": {"ddp-eager": ""}}, has_gpu=False)
    assert {finding.level for finding in found} == {Level.GOOD, Level.NOTE}, found
    assert found[-1].text == "cpu can run ddp-eager"


ERROR, WARNING = Level.ERROR, Level.WARNING
CASES: dict[str, tuple[Iterable[Finding], Level, str, str]] = {
    "old python": (python((3, 10, 1), METADATA), ERROR, "python", "install Python <3.14,>=3.11"),
    "new python": (python((3, 15, 0), METADATA), ERROR, "python", "install Python <3.14,>=3.11"),
    "not installed": (packages(INSTALLED, {}), WARNING, "packages", "pip install -e ."),
    "no torch": (packages({}, METADATA), ERROR, "torch", "pip install 'torch>=2.11'"),
    "no lightning": (packages({"torch": "2.13.0"}, METADATA), WARNING, "lightning", "pip install"),
    "old torch": (with_package("torch", "2.4.0"), ERROR, "torch", "pip install 'torch>=2.11'"),
    "old optional package": (
        with_package("accelerate", "1.0"),
        ERROR,
        "accelerate",
        "'accelerate>=1.15'",
    ),
    "new torch": (
        with_package("torch", "2.17.0"),
        WARNING,
        "torch",
        "newer than what was tested (>=2.11,<2.16)",
    ),
    "odd torch": (with_package("torch", "here"), WARNING, "torch", "is not a version"),
    "zero-2 loses": (
        with_package("deepspeed", "0.18.1"),
        ERROR,
        "deepspeed",
        "the last micro-batch of a window alone",
    ),
    "zero-2 in bf16": (
        with_package("deepspeed", "0.19.7"),
        ERROR,
        "deepspeed",
        "pip install 'deepspeed>=0.19.8'",
    ),
    "monitor raises": (with_package("lightning", "2.2.0"), ERROR, "lightning", "ThroughputMonitor"),
    "broken torch": (gloo(None, "OSError: libc10.so"), ERROR, "torch", "libc10.so"),
    "gloo": (
        gloo(replace(CPU_TORCH, gloo_error="no route"), ""),
        ERROR,
        "gloo",
        "GLOO_SOCKET_IFNAME=lo",
    ),
    "loopback": (loopback("unreachable"), ERROR, "loopback", "ip link set lo up"),
    "full disk": (disk(2**20), ERROR, "disk", "--out"),
    "small disk": (disk(GIB), WARNING, "disk", "4 B a parameter"),
    "small memory": (memory(GIB), WARNING, "memory", "--world-size 1"),
    "one core": (cores(1, None), WARNING, "cores", "--world-size 1"),
    "slow clocks": (
        cores(8, "powersave"),
        WARNING,
        "cores",
        "cpupower frequency-set -g performance",
    ),
    "busy": (idle({**LOAD, "foreign_cores": 4.0}, 8), WARNING, "idle", "50 % of the CPUs"),
    "stolen": (idle({**LOAD, "stolen_cores": 2.0}, 8), WARNING, "idle", "2 by the hypervisor"),
    "unwatched": (idle(None, 8), WARNING, "idle", "unknown"),
    "no backend": (
        backends({"cpu": {"a": "no"}}, has_gpu=False),
        ERROR,
        "backends",
        "cannot run a: no",
    ),
    "one backend": (
        backends({"cpu": {"a": "no", "c": ""}}, has_gpu=False),
        WARNING,
        "backends",
        "cannot run a",
    ),
}
GPU_CASES: dict[str, tuple[GpuFacts, Level, str, str]] = {
    "no driver": (
        replace(LAPTOP, device_nodes=1),
        ERROR,
        "gpu",
        "does not answer (NVMLError: Driver Not Loaded)",
    ),
    "no nvidia-ml-py": (
        replace(LAPTOP, device_nodes=1, nvml_error="ModuleNotFoundError: No module named 'pynvml'"),
        *(ERROR, "gpu", "pip install nvidia-ml-py"),
    ),
    "no NVML": (
        replace(SERVER, nvml_error="no library", driver="", driver_cuda=None),
        WARNING,
        "gpu",
        "are unknown",
    ),
    "CPU build": (replace(SERVER, torch=CPU_TORCH), ERROR, "cuda", "whl/cu130"),
    "CPU build, older driver": (
        replace(SERVER, torch=CPU_TORCH, driver_cuda=(12, 4)),
        ERROR,
        "cuda",
        "whl/cu126",
    ),
    "old driver": (
        replace(SERVER, driver_cuda=(12, 8)),
        ERROR,
        "cuda",
        "update the driver, or pip install",
    ),
    "ancient driver": (
        replace(SERVER, driver_cuda=(11, 4)),
        ERROR,
        "cuda",
        "since no supported torch",
    ),
    "CUDA fails": (with_torch(devices=(), device_error="Error 802"), ERROR, "cuda", "Error 802"),
    "other card": (
        with_torch(architectures=("sm_80", "sm_90a", "sm_100")),
        Level.GOOD,
        "cuda",
        "uses 2",
    ),
    "new card": (
        with_torch(devices=[card(12, 0)], architectures=("sm_90",)),
        ERROR,
        "cuda",
        "newer",
    ),
    "old card": (
        with_torch(devices=[card(6, 1)], architectures=("sm_80",)),
        ERROR,
        "cuda",
        "older",
    ),
    "no NCCL": (with_torch(nccl=False), ERROR, "nccl", "built without it"),
    "no P2P": (with_torch(no_peers=((0, 1), (1, 0))), WARNING, "p2p", "GPUs 0-1 cannot access"),
    "P2P off": (
        replace(SERVER, environment={"NCCL_P2P_DISABLE": "1"}),
        *(WARNING, "p2p", "unset NCCL_P2P_DISABLE"),
    ),
    "shm of a container": (replace(SERVER, shm_bytes=64 * 2**20), ERROR, "/dev/shm", "--shm-size"),
    "small shm": (replace(SERVER, shm_bytes=512 * 2**20), WARNING, "/dev/shm", "remount"),
    "no shm": (replace(SERVER, shm_bytes=None), ERROR, "/dev/shm", "does not exist"),
    "neighbour": (with_gpu(num_processes=2), WARNING, "gpu", "2 other processes"),
    "unlisted": (with_gpu(num_processes=None), WARNING, "gpu", "cannot be listed"),
    "MIG": (with_gpu(mig=True), WARNING, "gpu", "nvidia-smi -i GPU-aa -mig 0"),
    "one hidden": (
        replace(SERVER, gpus=(CARD, {**CARD, "visible": False})),
        WARNING,
        "gpu",
        "hides 1 of 2",
    ),
    "all hidden": (with_gpu(visible=False), ERROR, "gpu", "unset CUDA_VISIBLE"),
}
CASES |= {name: (examined(facts), *expected) for name, (facts, *expected) in GPU_CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_said_with_what_mends_it(name: str) -> None:
    findings, level, topic, words = CASES[name]
    found = list(findings)
    assert any(
        (finding.level, finding.topic) == (level, topic) and words in finding.text
        for finding in found
    ), found


def test_what_needs_no_gpu_is_not_asked_for() -> None:
    assert {finding.level for finding in examined(replace(LAPTOP, shm_bytes=None))} == {Level.GOOD}
    lone = replace(
        SERVER,
        gpus=(CARD,),
        shm_bytes=None,
        torch=replace(CUDA_TORCH, devices=CUDA_TORCH.devices[:1]),
    )
    assert {finding.level for finding in examined(lone)} == {Level.GOOD}
    hidden = replace(with_gpu(visible=False), torch=CPU_TORCH)
    assert not [finding for finding in examined(hidden) if finding.topic in {"cuda", "nccl", "p2p"}]


def test_on_rocm_the_gpus_are_those_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    device = {
        "index": 0,
        "name": "MI300X",
        "uuid": "GPU-0",
        "memory_bytes": 192,
        "capability": [9, 4],
    }
    rocm = TorchFacts(
        version="2.13.0",
        cuda=None,
        hip="7.0",
        devices=[device],
        architectures=["gfx942"],
        nccl=True,
    )
    found = [(finding.level, finding.topic) for finding in examined(gpu_checks.gather(rocm))]
    assert (Level.GOOD, "cuda") in found and (Level.GOOD, "nccl") in found
    assert [topic for level, topic in found if level is not Level.GOOD] == ["gpu"], (
        "what NVML would tell is unknown"
    )


def test_what_versions_may_do_is_a_note_and_what_the_bench_meets_an_error() -> None:
    installed = {**INSTALLED, "deepspeed": "0.18.9", "trl": "1.5.1"}
    found = list(packages(installed, METADATA))
    assert any(
        f.level is ERROR and "0.18.9: ZeRO-2 adds bf16 gradients in bf16" in f.text for f in found
    )
    notes = {f.topic: f.text for f in found if f.level is Level.NOTE}
    assert (
        "deepspeed-zero2-offload" in notes["deepspeed"]
        and "docs/known-bad.md" in notes["deepspeed"]
    )
    assert (
        "deepspeed-zero2-bf16-sum" not in notes["deepspeed"]
        and "trl-dapo-normalizer" in notes["trl"]
    )
    assert "known defect" not in "".join(f.text for f in packages({"torch": "2.99"}, METADATA))


def test_gpus_are_asked_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    fake.set("ComputeRunningProcesses", lambda handle: [types.SimpleNamespace(pid=7)] * handle)
    fake.set("MigMode", lambda handle: (handle, handle))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = gpu_checks.gather(CUDA_TORCH)
    assert (found.driver, found.driver_cuda, found.nvml_error) == ("570.1", (13, 1), "")
    first, second, _ = found.gpus
    gpu = {
        "name": "NVIDIA H200",
        "uuid": "GPU-00",
        "visible": True,
        "num_processes": 0,
        "mig": False,
    }
    assert first == gpu
    assert second == {**gpu, "uuid": "GPU-11", "visible": False, "num_processes": 1, "mig": True}
    assert fake.open == 0


def test_a_torch_that_does_not_answer_is_a_fact() -> None:
    def asked(code: str, timeout_s: float = 60) -> tuple[TorchFacts | None, str]:
        return ask_torch(command=[sys.executable, "-c", code], timeout_s=timeout_s)

    assert asked("raise OSError('libc10.so: no such file')") == (
        None,
        "OSError: libc10.so: no such file",
    )
    assert asked("print('{}')")[0] is None
    assert asked("import os; os.abort()")[1].startswith("exit status -")
    assert "no answer within" in asked("import time; time.sleep(60)", timeout_s=0.2)[1]
    assert ask_torch(command=["/no/such/program"])[0] is None


def test_the_findings_on_this_machine_are_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(doctor, "LOAD_S", 0.05)
    found = {
        finding.topic: finding
        for finding in doctor.examine(tmp_path / "no/such/folder", {"cpu": {"a": ""}})
    }
    for topic in ("python", "gloo", "loopback", "backends"):
        assert found[topic].level is Level.GOOD, found[topic]
    facts, _ = ask_torch()
    assert facts is not None
    assert (facts.version, len(facts.devices)) == (torch.__version__, torch.cuda.device_count())


def test_a_run_asks_first_whether_torch_can_use_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one crashed trial after the other, and nothing is left behind."""
    monkeypatch.setattr(
        gpus, "gpus", lambda: [{"uuid": "GPU-aa", "name": "H100", "memory_bytes": 80 * GIB}]
    )
    monkeypatch.setattr("bench.launch.torch_facts.ask_torch", lambda: (CUDA_TORCH, ""))
    monkeypatch.setattr(gpu_checks, "gather", lambda torch: replace(SERVER, driver_cuda=(12, 8)))
    command = [
        "run",
        "--matrix",
        "smoke",
        "--device",
        "cuda",
        "--world-size",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench: cuda: torch 2.13.0+cu130 is built for CUDA 13.0, ")
    assert "driver 580.65" in line and "update the driver, or pip install" in line
    assert not (tmp_path / "run").exists()


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Finding] = [Finding(Level.GOOD, "gpu", "none")]
    monkeypatch.setattr(doctor, "examine", lambda folder, missing: found)
    assert cli.main(["doctor"]) == 0
    assert "0 errors, 0 warnings: all is well" in capsys.readouterr().out
    found += idle({**LOAD, "foreign_cores": 4.0}, 8)
    assert cli.main(["doctor"]) == 0
    assert "runs are possible; mind the warnings" in capsys.readouterr().out
    found += loopback("unreachable")
    assert cli.main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["errors"] == 1 and {"level", "topic", "text"} == told["findings"][0].keys()
