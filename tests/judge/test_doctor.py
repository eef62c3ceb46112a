"""The doctor's checks on made-up machines; what it gathers here, and with a pretended NVML."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from bench import cli
from bench.judge import health
from bench.judge.health import DEFECTS, examine
from bench.judge.integrity import Level
from bench.launch import gpus
from bench.run import surroundings
from bench.run.surroundings import Card, Facts, Torch, ask_nvml, ask_torch, gather
from tests.conftest import ROOT

GIB = 2**30
CPU_TORCH = Torch(
    version="2.13.0+cpu",
    built_for=None,
    gloo_error="",
    cuda_error="",
    num_devices=0,
    capabilities=(),
    architectures=(),
    no_peers=(),
    nccl=False,
)
LAPTOP = Facts(
    python=(3, 12, 4),
    packages={"torch": "2.13.0+cpu", "lightning": "2.6.6", "deepspeed": "0.19.8", "transformers": "5.23.0"},
    torch=CPU_TORCH,
    torch_error="",
    device_nodes=0,
    nvml_error="NVMLError: Driver Not Loaded",
    driver="",
    driver_cuda=None,
    cards=(),
    environment={},
    num_cores=8,
    governor=None,
    memory_bytes=16 * GIB,
    shm_bytes=64 * 2**20,
    disk_bytes=100 * GIB,
    loopback_error="",
    foreign_cores=0.1,
    stolen_cores=0.0,
    missing={"cpu": {"ddp-eager": "", "fsdp2-eager": ""}, "cuda": {"ddp-eager": "", "fsdp2-eager": ""}},
)
"""Good, without a GPU."""
CARD = Card(name="NVIDIA H100", uuid="GPU-aa", visible=True, num_processes=0, mig=False)
CUDA_TORCH = replace(
    CPU_TORCH,
    version="2.13.0+cu130",
    built_for="13.0",
    num_devices=2,
    capabilities=((9, 0), (9, 0)),
    architectures=("sm_80", "sm_90", "compute_90"),
    nccl=True,
)
SERVER = replace(
    LAPTOP,
    packages={**LAPTOP.packages, "torch": "2.13.0+cu130", "nvidia-ml-py": "13.0"},
    torch=CUDA_TORCH,
    device_nodes=2,
    nvml_error="",
    driver="580.65",
    driver_cuda=(13, 0),
    cards=(CARD, replace(CARD, uuid="GPU-bb")),
    shm_bytes=8 * GIB,
)
"""Good, with two GPUs."""


def told(facts: Facts, level: Level) -> list[str]:
    return [f"{one.topic}: {one.text}" for one in examine(facts) if one.level is level]


@pytest.mark.parametrize("facts", [LAPTOP, SERVER])
def test_a_good_machine_is_good(facts: Facts) -> None:
    assert {one.level for one in examine(facts)} == {Level.GOOD}
    assert any("cpu can run ddp-eager, fsdp2-eager" in text for text in told(facts, Level.GOOD))


def on(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, **changes)


def with_torch(facts: Facts, **changes: Any) -> Facts:
    assert facts.torch is not None
    return replace(facts, torch=replace(facts.torch, **changes))


def with_package(name: str, version: str) -> Facts:
    return replace(LAPTOP, packages={**LAPTOP.packages, name: version})


CASES: dict[str, tuple[Facts, Level, str, str]] = {
    "old python": (on(LAPTOP, python=(3, 10, 1)), Level.ERROR, "python", "install Python 3.11 to 3.13"),
    "new python": (on(LAPTOP, python=(3, 15, 0)), Level.WARNING, "python", "newer than what is tested"),
    "no torch": (on(LAPTOP, packages={}, torch=None), Level.ERROR, "torch", "pip install 'torch>=2.11'"),
    "no lightning": (on(LAPTOP, packages={"torch": "2.13.0"}), Level.WARNING, "lightning", "pip install"),
    "old torch": (with_package("torch", "2.4.0"), Level.ERROR, "torch", "pip install 'torch>=2.11'"),
    "new torch": (with_package("torch", "2.17.0"), Level.WARNING, "torch", "newer than what was tested"),
    "odd torch": (with_package("torch", "here"), Level.WARNING, "torch", "is not a version"),
    "zero-2 loses": (with_package("deepspeed", "0.18.1"), Level.ERROR, "deepspeed", "only the last micro-batch"),
    "zero-2 in bf16": (with_package("deepspeed", "0.19.7"), Level.ERROR, "deepspeed", "grad_accum_dtype"),
    "monitor raises": (with_package("lightning", "2.2.0"), Level.ERROR, "lightning", "ThroughputMonitor"),
    "broken torch": (on(LAPTOP, torch=None, torch_error="OSError: libc10.so"), Level.ERROR, "torch", "libc10.so"),
    "gloo": (with_torch(LAPTOP, gloo_error="no route"), Level.ERROR, "gloo", "GLOO_SOCKET_IFNAME=lo"),
    "loopback": (on(LAPTOP, loopback_error="unreachable"), Level.ERROR, "loopback", "ip link set lo up"),
    "full disk": (on(LAPTOP, disk_bytes=2**20), Level.ERROR, "disk", "--out"),
    "small disk": (on(LAPTOP, disk_bytes=GIB), Level.WARNING, "disk", "4 B a parameter"),
    "small memory": (on(LAPTOP, memory_bytes=GIB), Level.WARNING, "memory", "--world-size 1"),
    "one core": (on(LAPTOP, num_cores=1), Level.WARNING, "cores", "--world-size 1"),
    "slow clocks": (on(LAPTOP, governor="powersave"), Level.WARNING, "cores", "cpupower frequency-set -g performance"),
    "busy": (on(LAPTOP, foreign_cores=4.0), Level.WARNING, "idle", "50 % of the CPUs"),
    "stolen": (on(LAPTOP, stolen_cores=2.0), Level.WARNING, "idle", "2 by the hypervisor"),
    "unwatched": (on(LAPTOP, foreign_cores=None), Level.WARNING, "idle", "unknown"),
    "no backend": (on(LAPTOP, missing={"cpu": {"a": "needs b"}}), Level.ERROR, "backends", "cannot run a: needs b"),
    "one backend": (on(LAPTOP, missing={"cpu": {"a": "no", "c": ""}}), Level.WARNING, "backends", "cannot run a"),
    "no driver": (on(LAPTOP, device_nodes=1, packages=SERVER.packages), Level.ERROR, "gpu", "does not answer"),
    "no nvidia-ml-py": (on(LAPTOP, device_nodes=1), Level.ERROR, "gpu", "pip install nvidia-ml-py"),
    "CPU build": (on(SERVER, torch=CPU_TORCH), Level.ERROR, "cuda", "whl/cu130"),
    "CPU build, older driver": (on(SERVER, torch=CPU_TORCH, driver_cuda=(12, 4)), Level.ERROR, "cuda", "whl/cu126"),
    "old driver": (on(SERVER, driver_cuda=(12, 8)), Level.ERROR, "cuda", "update the driver, or pip install"),
    "ancient driver": (on(SERVER, driver_cuda=(11, 4)), Level.ERROR, "cuda", "since no supported torch"),
    "CUDA fails": (with_torch(SERVER, num_devices=0, cuda_error="Error 802"), Level.ERROR, "cuda", "Error 802"),
    "other card": (with_torch(SERVER, architectures=("sm_80", "sm_90a", "sm_100")), Level.GOOD, "cuda", "uses 2"),
    "new card": (with_torch(SERVER, capabilities=((12, 0),), architectures=("sm_90",)), Level.ERROR, "cuda", "newer"),
    "old card": (with_torch(SERVER, capabilities=((6, 1),), architectures=("sm_80",)), Level.ERROR, "cuda", "older"),
    "no NCCL": (with_torch(SERVER, nccl=False), Level.ERROR, "nccl", "built without it"),
    "no P2P": (with_torch(SERVER, no_peers=((0, 1), (1, 0))), Level.WARNING, "p2p", "GPUs 0-1 cannot access"),
    "P2P off": (on(SERVER, environment={"NCCL_P2P_DISABLE": "1"}), Level.WARNING, "p2p", "unset NCCL_P2P_DISABLE"),
    "shm of a container": (on(SERVER, shm_bytes=64 * 2**20), Level.ERROR, "/dev/shm", "--shm-size"),
    "small shm": (on(SERVER, shm_bytes=512 * 2**20), Level.WARNING, "/dev/shm", "remount"),
    "no shm": (on(SERVER, shm_bytes=None), Level.ERROR, "/dev/shm", "does not exist"),
    "neighbour": (on(SERVER, cards=(replace(CARD, num_processes=2),)), Level.WARNING, "gpu", "2 other processes"),
    "unlisted": (on(SERVER, cards=(replace(CARD, num_processes=None),)), Level.WARNING, "gpu", "cannot be listed"),
    "MIG": (on(SERVER, cards=(replace(CARD, mig=True),)), Level.WARNING, "gpu", "nvidia-smi -i GPU-aa -mig 0"),
    "one hidden": (on(SERVER, cards=(CARD, replace(CARD, visible=False))), Level.WARNING, "gpu", "hides 1 of 2"),
    "all hidden": (on(SERVER, cards=(replace(CARD, visible=False),)), Level.ERROR, "gpu", "unset CUDA_VISIBLE"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_said_with_what_mends_it(name: str) -> None:
    facts, level, topic, words = CASES[name]
    assert any(text.startswith(f"{topic}: ") and words in text for text in told(facts, level)), told(facts, level)


def test_every_check_has_a_case_in_which_it_complains() -> None:
    silent = []
    for check in health.CHECKS:
        levels = {one.level for facts, *_ in CASES.values() for one in check(facts)}
        if not levels & {Level.ERROR, Level.WARNING}:
            silent.append(check.__name__)
    assert silent == []


def test_what_needs_no_gpu_is_not_asked_for() -> None:
    assert not [one for one in examine(on(LAPTOP, shm_bytes=None)) if one.level is not Level.GOOD]
    lone = with_torch(on(SERVER, cards=(CARD,), shm_bytes=None), num_devices=1, capabilities=((9, 0),))
    assert {one.level for one in examine(lone)} == {Level.GOOD}
    hidden = on(SERVER, cards=(replace(CARD, visible=False),), torch=CPU_TORCH)
    assert not [one for one in examine(hidden) if one.topic in {"cuda", "nccl", "p2p"}]


MEASURED = {
    "ZeRO-2: micro-batches in each update": "only the last micro-batch",
    "ZeRO-2: bf16, sum of 1024 gradients of 1/1024, grad_accum_dtype fp32": "grad_accum_dtype",
    "log_every_n_steps at N = 4": "ThroughputMonitor",
}
"""How findings of docs/versions.json begin, and what the defect says that they are of."""


@pytest.mark.parametrize("beginning", MEASURED)
def test_a_defect_begins_and_ends_where_it_was_measured(beginning: str) -> None:
    (defect,) = [one for one in DEFECTS if MEASURED[beginning] in one.text]
    seen = set()
    for entry in json.loads((ROOT / "docs" / "versions.json").read_text())["versions"]:
        for finding in entry["findings"]:
            if finding["finding"].startswith(beginning):
                assert entry["package"] == defect.package
                assert SpecifierSet(defect.versions).contains(entry["version"]) is not finding["good"], entry["version"]
                seen.add(finding["good"])
    assert seen == {True, False}


class FakeNvml(types.ModuleType):
    """Two GPUs, on the second of which somebody computes."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0
        answers: dict[str, Callable[..., Any]] = {
            "Name": lambda handle: b"NVIDIA H100",
            "UUID": lambda handle: f"GPU-{'ab'[handle]}",
            "HandleByUUID": lambda uuid: "ab".index(uuid[-1]),
            "HandleByIndex": lambda index: index,
            "Count": lambda: 2,
            "MemoryInfo": lambda handle: types.SimpleNamespace(total=80 * GIB),
            "ComputeRunningProcesses": lambda handle: [types.SimpleNamespace(pid=7)] * handle,
            "MigMode": lambda handle: (handle, handle),
        }
        for name, answer in answers.items():
            setattr(self, f"nvmlDeviceGet{name}", answer)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010


def test_cards_are_asked_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = ask_nvml()
    assert (found["driver"], found["driver_cuda"], found["nvml_error"]) == ("580.65", (13, 1), "")
    first, second = found["cards"]
    assert first == Card(name="NVIDIA H100", uuid="GPU-a", visible=True, num_processes=0, mig=False)
    assert second == Card(name="NVIDIA H100", uuid="GPU-b", visible=False, num_processes=1, mig=True)
    assert fake.open == 0


def test_a_torch_that_does_not_answer_is_a_fact() -> None:
    def python(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    assert ask_torch(python("raise OSError('libc10.so: no such file')")) == (None, "OSError: libc10.so: no such file")
    assert ask_torch(python("print('{}')"))[0] is None
    assert ask_torch(python("import os; os.abort()"))[1].startswith("exit status -")
    assert "no answer within" in ask_torch(python("import time; time.sleep(60)"), timeout_s=0.2)[1]
    assert ask_torch(["/no/such/program"])[0] is None


def test_the_facts_of_this_machine_are_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(surroundings, "LOOK_S", 0.05)
    facts = gather(tmp_path / "no" / "such" / "folder", {"cpu": {}})
    assert facts.torch is not None, facts.torch_error
    assert (facts.torch.version, facts.torch.gloo_error) == (torch.__version__, "")
    assert facts.torch.num_devices == torch.cuda.device_count()
    assert facts.python == sys.version_info[:3] and facts.loopback_error == "" and facts.disk_bytes > 0
    assert facts.packages["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def test_a_run_asks_first_whether_torch_can_use_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one crashed trial after the other, and nothing is left behind."""
    monkeypatch.setattr(gpus, "gpus", lambda: [{"uuid": "GPU-aa", "name": "H100", "memory_bytes": 80 * GIB}])
    monkeypatch.setattr(surroundings, "gather", lambda folder, missing: on(SERVER, driver_cuda=(12, 8)))
    command = ["run", "--matrix", "smoke", "--device", "cuda", "--world-size", "1", "--out", str(tmp_path / "run")]
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench: cuda: torch 2.13.0+cu130 is built for CUDA 13.0, and driver 580.65 supports at most")
    assert "update the driver, or pip install" in line
    assert not (tmp_path / "run").exists()


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [LAPTOP]
    monkeypatch.setattr(surroundings, "gather", lambda folder, missing: asked[0])
    assert cli.main(["doctor"]) == 0
    assert "0 errors, 0 warnings: all is well" in capsys.readouterr().out
    asked[0] = on(LAPTOP, foreign_cores=4.0)
    assert cli.main(["doctor"]) == 0
    assert "runs are possible; mind the warnings" in capsys.readouterr().out
    asked[0] = on(LAPTOP, loopback_error="unreachable")
    assert cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["errors"] == 1 and {"level", "topic", "text"} == found["findings"][0].keys()
