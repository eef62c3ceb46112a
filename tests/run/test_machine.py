"""What is stored of the machine: GPUs as CUDA sees them, nothing secret, and nothing that stops a run."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bench.launch import gpus
from bench.launch.torch_facts import TorchFacts
from bench.run import machine, trial_code
from bench.run.manifest import CONNECTION, FINGERPRINT
from tests import factories
from tests.factories import make_backend, make_manifest, manifest_of
from tests.fake_nvml import FakeNvml, failing


@pytest.mark.parametrize(
    ("setting", "visible"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("0,7,1", [0]),
        ("GPU-22,GPU-0", [2, 0]),
        ("GPU-9", []),
    ],
)
def test_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, visible: list[int]
) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert gpus.gpus() == [
        {
            "index": i,
            "name": "NVIDIA H200",
            "uuid": f"GPU-{i}{i}",
            "memory_bytes": 1000 + i,
            "driver": "570.1",
        }
        for i in visible
    ]
    assert nvml.open == 0, "the library is left as it was found"


def with_mig() -> FakeNvml:
    """The second GPU is cut into two instances, in places 0 and 2 of four."""
    nvml = FakeNvml()
    failed = failing()
    name = "NVIDIA H100 80GB HBM3"
    nvml.set("MigMode", lambda handle: failed() if handle == 2 else (int(handle == 1),) * 2)
    nvml.set("MaxMigDeviceCount", lambda handle: 4)
    nvml.set(
        "MigDeviceHandleByIndex",
        lambda handle, place: f"{handle}/{place}" if place in {0, 2} else failed(),
    )
    nvml.set("Name", lambda handle: name + " MIG 1g.10gb" * (handle == "1/2"))
    nvml.set(
        "UUID", lambda handle: f"MIG-{handle[-1]}f" if isinstance(handle, str) else f"GPU-{handle}"
    )
    nvml.set(
        "MemoryInfo",
        lambda handle: types.SimpleNamespace(total=10 if isinstance(handle, str) else 80),
    )
    return nvml


@pytest.mark.parametrize(
    ("setting", "mig", "name"),
    [
        ("MIG-2f", "MIG-2f", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ("MIG-0", "MIG-0f", "NVIDIA H100 80GB HBM3 MIG"),
        ("MIG-2f,MIG-0f", "MIG-2f", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ("0,MIG-2f", "MIG-2f", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
    ],
)
def test_a_mig_instance_is_the_only_one_seen(
    monkeypatch: pytest.MonkeyPatch, setting: str, mig: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", with_mig())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    found = {
        "index": 1,
        "name": name,
        "uuid": "GPU-1",
        "memory_bytes": 10,
        "mig": mig,
        "driver": "570.1",
    }
    assert gpus.gpus() == [found]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    assert gpus.gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu["uuid"] for gpu in gpus.gpus()] == ["GPU-1"]


@pytest.mark.parametrize("has_driver", [True, False])
def test_without_nvml_torch_is_asked_for_gpus_if_there_is_a_driver(
    monkeypatch: pytest.MonkeyPatch, has_driver: bool
) -> None:
    device = {"index": 0, "name": "AMD Instinct MI300X", "uuid": "GPU-ab", "memory_bytes": 192}
    torch = TorchFacts(
        version="2.13.0", cuda=None, hip="7.0", devices=[{**device, "capability": [9, 4]}]
    )
    asked: list[Any] = []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "has_driver", lambda: has_driver)
    monkeypatch.setattr(gpus, "ask_torch", lambda: (asked.append(1) or torch, ""))
    gpus._torch_gpus.cache_clear()
    for _ in range(2):
        assert gpus.gpus() == ([{**device, "driver": ""}] if has_driver else [])
    assert len(asked) == has_driver, "torch is asked once, as it takes seconds"
    gpus._torch_gpus.cache_clear()
    assert machine.gpu_settings() == []


def test_settings_of_gpus_and_what_a_card_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, refuse = FakeNvml(), failing()
    nvml.set("EnforcedPowerLimit", lambda handle: 700_000)
    nvml.set("MaxClockInfo", lambda handle, kind: 1980)
    nvml.set("EccMode", lambda handle: (1, 1))
    nvml.set("NvLinkState", lambda handle, link: 1 if link < 4 else refuse())
    nvml.set("TopologyCommonAncestor", lambda handle, other: 10 * abs(handle - other))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    first, second = machine.gpu_settings()
    assert first == {
        "uuid": "GPU-00",
        "power_limit_w": 700.0,
        "sm_clock_max_mhz": 1980,
        "ecc": True,
        "mig": None,
        "pcie_generation": None,
        "pcie_lanes": None,
        "nvlinks_up": 4,
        "topology": [None, 20],
    }
    assert second["uuid"] == "GPU-22" and second["topology"] == [20, None]
    assert nvml.open == 0, "the library is left as it was found"


def test_no_secret_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for name in (
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "HOME",
        "PATH",
        "USER",
        "GITHUB_TOKEN",
    ):
        monkeypatch.setenv(name, "secret")
    found = machine.environment()
    assert (found["NCCL_DEBUG"], found["OMP_NUM_THREADS"]) == ("INFO", "3")
    assert "secret" not in found.values()
    assert list(found) == sorted(found)


def test_the_code_is_told_by_its_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "bench"
    for name, text in {
        "run/runner.py": "import bench.launch.launcher\nfrom bench.report import page",
        "launch/launcher.py": "WORK = 'bench.measure.trial:work'",
        "measure/trial.py": "steps = 1",
        "report/page.py": "title = 'a typo'",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    monkeypatch.setattr(trial_code, "PACKAGE", package)

    def code() -> dict[str, str]:
        trial_code.modules.cache_clear()
        return machine.code({}, {})

    before = code()
    (package / "report" / "page.py").write_text("title = 'a typo less'")
    (package / "run" / "unused.py").write_text("")
    assert code() == before == {"bench": before["bench"]}, "no measurement depends on these"
    (package / "measure" / "trial.py").write_text("steps = 2")
    assert code() != before
    assert (
        machine.code({"b0": make_backend("b0")}, {})["b0"]
        == hashlib.sha256(Path(factories.__file__).read_bytes()).hexdigest()
    )


def test_only_a_package_that_git_tracks_has_a_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            check=True,
        )

    installed = tmp_path / "venv" / "machine.py"
    installed.parent.mkdir()
    installed.write_text("")
    monkeypatch.setattr(machine, "__file__", str(installed))
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "somebody's project")
    assert machine.git_state() == {"commit": None, "clean": None}, (
        "in an environment inside the project"
    )
    git("add", "venv")
    git("commit", "-q", "-m", "a checkout of the bench")
    assert len(str(machine.git_state()["commit"])) == 40 and machine.git_state()["clean"] is True
    installed.write_text("changed")
    assert machine.git_state()["clean"] is False


def test_nodes_are_compared_without_what_is_each_ones_own() -> None:
    def node(uuid: str, driver: str = "570.1", mtu: int = 9000) -> dict[str, Any]:
        about = {"gpus": [{"uuid": uuid, "driver": driver, "name": "H100"}]}
        parts = {
            "machine": about,
            "packages": {"torch": "2.13.0"},
            "torch_build": {},
            "environment": {},
        }
        return parts | {CONNECTION: {"numa_nodes": "0-1", "mtu": mtu}}

    alone = make_manifest(**node("GPU-1"))
    several = alone | {"nodes": [node("GPU-2"), node("GPU-3", "580.2", 1500)]}
    assert list(machine.unlike_nodes(manifest_of(alone))) == []
    (text,) = machine.unlike_nodes(manifest_of(several))
    driver, mtu = text.split("; ")
    assert driver.startswith("node 2: machine.gpus.0.driver is '580.2', and '570.1'")
    assert mtu.startswith("connection.mtu is 1500, and 9000")


def test_the_connection_of_a_node_is_that_of_the_interface_towards_the_head() -> None:
    found = machine.connection("127.0.0.1")
    assert found["mtu"] == int(Path("/sys/class/net/lo/mtu").read_text())
    assert "mtu" not in machine.connection("no address")


def test_memory_that_the_kernel_keeps_does_not_make_another_machine() -> None:
    """Two starts of one machine differ by some KiB; two machines by more."""

    def of(**about: object) -> dict[str, object]:
        return {part: {} for part in FINGERPRINT} | {"machine": {"cpu": "x", **about}}

    ours = of(memory_bytes=2**34)
    assert machine.differences(ours, of(memory_bytes=2**34 - 12 * 1024)) == []
    (other,) = machine.differences(ours, of(memory_bytes=2**34 - 2**27))
    assert other.key == "machine.memory_bytes"
    (none,) = machine.differences(ours, of())
    assert none.b == machine.NOT_STORED
