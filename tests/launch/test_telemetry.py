"""GPU telemetry: with a pretended NVML in all its moods, and the reduction of recordings on numbers made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from bench.launch import telemetry
from bench.launch.telemetry import Telemetry, descends, summarize
from tests.fake_nvml import FakeNvml, failing

UUIDS = ["GPU-00", "GPU-11"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return module


def record(seconds: float = 0.0) -> dict[str, Any]:
    running = Telemetry(interval_s=0.005)
    running.start()
    time.sleep(seconds)
    running.stop()
    assert running.recording is not None
    assert json.loads(json.dumps(running.recording)) == running.recording
    return running.recording


def test_all_gpus_are_sampled_until_the_end(fake: FakeNvml) -> None:
    begin = time.monotonic()
    recording = record(0.1)
    end = time.monotonic()
    samples = recording["samples"]
    assert {sample["uuid"] for sample in samples} == set(UUIDS)
    assert len(samples) >= 6 and all(begin <= sample["time"] <= end for sample in samples)
    first, last = samples[1], samples[-1]
    assert first["pids"] == last["pids"] == [os.getpid()] and recording["own_pids"] == [os.getpid()]
    assert sum("pids" in sample for sample in samples) < len(samples), (
        "processes are listed more rarely"
    )
    assert {k: v for k, v in first.items() if k not in {"time", "energy_j", "pids"}} == {
        "uuid": "GPU-11",
        "power_w": 650.0,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "temperature_c": 62,
        "throttle": ["SwPowerCap"],
    }
    assert recording["notes"] == []
    assert fake.open == 0, "the library is left as it was found"
    number = len(fake.asked)
    time.sleep(0.03)
    assert len(fake.asked) == number, "nothing is asked after the end"

    summary = summarize(recording, samples[0]["time"], samples[-2]["time"])
    assert summary is not None
    assert [gpu["uuid"] for gpu in summary["gpus"]] == UUIDS
    duration = samples[-2]["time"] - samples[0]["time"]
    assert summary["gpus"][0]["energy_j"] == pytest.approx(700 * duration, rel=0.2)
    assert summary["gpus"][0]["other_processes"] == 0


def test_what_is_not_supported_is_asked_once_and_noted(fake: FakeNvml) -> None:
    fake.set("TotalEnergyConsumption", failing())
    fake.remove("PowerUsage")
    fake.remove("MPSComputeRunningProcesses")  # known to few drivers: nothing to note
    recording = record(0.05)
    assert fake.asked.count("TotalEnergyConsumption") == len(UUIDS)
    assert all(
        sample["energy_j"] is None and sample["power_w"] is None for sample in recording["samples"]
    )
    assert recording["notes"][0] == "GPU-00: no energy_j: Not Supported"
    assert "GPU-00: no power_w: " in recording["notes"][1] and len(recording["notes"]) == 4
    summary = summarize(
        recording, recording["samples"][0]["time"], recording["samples"][-1]["time"]
    )
    assert summary is not None
    assert summary["gpus"][0]["energy_j"] is None and summary["gpus"][0]["power_w"] is None
    assert summary["gpus"][0]["sm_clock_mhz"] == 1980 and summary["notes"] == recording["notes"]


def test_a_driver_that_hangs_holds_nobody_up(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "STOP_S", 0.05)
    hang, inside = threading.Event(), threading.Event()
    running = Telemetry(interval_s=0.005)
    running.start()

    def wait(*_: Any) -> int:
        inside.set()
        hang.wait(30)
        return 0

    fake.set("PowerUsage", wait)
    assert inside.wait(30)
    recording = running.stop()
    hang.set()
    assert recording is not None and recording["samples"]
    assert recording["notes"] == ["NVML did not answer within 0.05 s"]


def test_without_nvml_the_recording_says_why_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that torch alone sees, as on ROCm."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(telemetry.gpus, "gpus", lambda: [{"uuid": "GPU-00"}])
    recording = record()
    assert recording["samples"] == []
    (note,) = recording["notes"]
    assert note.startswith("no telemetry: ModuleNotFoundError")
    assert summarize(recording, 0.0, 1.0) == {"gpus": [], "notes": [note]}


def test_own_processes_are_those_that_descend_from_this_one() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert descends(child.pid, os.getpid()) and descends(os.getpid(), os.getpid())
        assert not descends(os.getpid(), child.pid) and not descends(os.getppid(), os.getpid())
    finally:
        child.communicate()
    assert not descends(child.pid, os.getpid()), "it has ended"


def sample(at: float, uuid: str = "GPU-aa", **changes: Any) -> dict[str, Any]:
    return {
        "uuid": uuid,
        "time": at,
        "energy_j": 500.0 * at,
        "power_w": 500.0,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "temperature_c": 60,
        "throttle": [],
    } | changes


def recorded(*samples: dict[str, Any], ours: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"interval_s": 1.0, "samples": list(samples), "own_pids": list(ours), "notes": []}


def only(recording: dict[str, Any], begin: float, end: float) -> dict[str, Any]:
    summary = summarize(recording, begin, end)
    assert summary is not None and len(summary["gpus"]) == 1
    gpu: dict[str, Any] = summary["gpus"][0]
    return gpu


def test_a_summary_is_of_the_window_alone() -> None:
    recording = recorded(
        sample(0.0, sm_clock_mhz=300, power_w=90.0, temperature_c=99, throttle=["GpuIdle"]),
        sample(1.0, sm_clock_mhz=1980, power_w=400.0, temperature_c=50, throttle=["SwPowerCap"]),
        sample(
            2.0,
            sm_clock_mhz=1700,
            power_w=600.0,
            temperature_c=70,
            throttle=["SwPowerCap", "0x800"],
        ),
        sample(
            3.0,
            sm_clock_mhz=1900,
            power_w=500.0,
            temperature_c=60,
            throttle=["ApplicationsClocksSetting"],
        ),
        sample(3.5, sm_clock_mhz=None, memory_clock_mhz=None),
        sample(4.0, sm_clock_mhz=300, power_w=90.0, throttle=["HwSlowdown"]),
    )
    assert only(recording, 0.5, 3.75) == {
        "uuid": "GPU-aa",
        "num_samples": 4,
        "sm_clock_mhz": 1900,
        "sm_clock_min_mhz": 1700,
        "sm_clock_max_mhz": 1980,
        "memory_clock_mhz": 3201,
        "power_w": 500.0,
        "temperature_c": 70,
        "throttle": {"0x800": 0.25, "ApplicationsClocksSetting": 0.25, "SwPowerCap": 0.5},
        "slowdowns": ["0x800", "SwPowerCap"],
        "energy_j": pytest.approx(500.0 * 3.25),
        "other_processes": None,
    }


def test_gpus_that_the_ranks_did_not_have_are_left_out() -> None:
    recording = recorded(
        sample(0.0, "GPU-aa"), sample(1.0, "GPU-bb", sm_clock_mhz=345), sample(2.0, "GPU-aa")
    )
    for used, told in (
        (["GPU-aa"], ["GPU-aa"]),
        (["GPU-bb", "GPU-aa"], ["GPU-aa", "GPU-bb"]),
        (["GPU-of-a-MIG-instance"], ["GPU-aa", "GPU-bb"]),
        ([], ["GPU-aa", "GPU-bb"]),
    ):
        summary = summarize(recording, 0.0, 2.0, used)
        assert summary is not None and [gpu["uuid"] for gpu in summary["gpus"]] == told


@pytest.mark.parametrize(
    ("ours", "others"),
    [
        ((10, 11), 2),  # 30 was there at the start, 40 came later
        ((), 1),  # another namespace of pids: 10, 11 and 40 may all be ours
    ],
)
def test_foreign_processes(ours: tuple[int, ...], others: int) -> None:
    recording = recorded(
        sample(0.0, pids=[20, 30]),
        sample(1.0, pids=[10, 30]),
        sample(2.0),
        sample(3.0, pids=[10, 11, 30, 40]),
        sample(9.0, pids=[50]),
        ours=ours,
    )
    assert only(recording, 0.5, 5.0)["other_processes"] == others
