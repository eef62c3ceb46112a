"""What a trial does on CUDA alone, without a GPU: its passes over real tensors on the CPU, with torch's functions for
CUDA replaced by ones of the same signatures."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from bench.backends.base import registry
from bench.cell import REFERENCE, Device
from bench.probes import torchprobe
from bench.probes.memory import ALLOCATOR, cuda_peaks
from bench.spec import Spec
from bench.trial import Trial
from tests.factories import make_cell

UUID = "11111111-2222-3333-4444-555555555555"
STEP_MS = 250.0
SIZES = {f"{key}.all.{when}": size for size, key in enumerate(ALLOCATOR.values(), 7) for when in ("peak", "current")}
STATS = {**SIZES, "num_alloc_retries": 0, "num_ooms": 0}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The replaced functions by name."""
    answers = {
        "memory_stats": STATS,
        "get_device_name": "NVIDIA H100",
        "get_device_properties": SimpleNamespace(uuid=UUID),
    }
    names = ("synchronize", "reset_peak_memory_stats", *answers)
    fakes = {name: create_autospec(getattr(torch.cuda, name), return_value=answers.get(name)) for name in names}
    fakes["Event"] = create_autospec(torch.cuda.Event)
    fakes["Event"].return_value.elapsed_time.return_value = STEP_MS
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return fakes


def run(backend: str, folder: Path, *passes: str) -> dict[str, Any]:
    """A trial whose device calls itself CUDA, once its model and tokens are there."""
    cell = make_cell(
        backend=backend,
        device=Device.CUDA,
        accumulate=1 if backend == REFERENCE else 2,
        world_size=1,
        global_batch_size=4,
        model="micro",
        sequence_length=8,
    )
    spec = Spec(cell=cell, passes=passes, folder=str(folder), reference=str(folder / "reference.safetensors"))
    trial = Trial(spec, 0, torch.device("cpu"), registry()[backend])
    trial._initial = copy.deepcopy(trial._unused_model)
    trial.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    return trial.run()


def test_the_passes_of_a_trial_on_cuda(cuda: dict[str, Any], group: None, tmp_path: Path) -> None:
    run(REFERENCE, tmp_path, "update")
    found = run("ddp-deferred", tmp_path, "time", "update", "memory")
    assert found["status"] == "ok"
    assert (found["device_name"], found["device_uuid"]) == ("NVIDIA H100", f"GPU-{UUID}")
    timed, windows = found["time"], make_cell().windows
    assert [*timed["warmup_seconds"], *timed["step_seconds"]] == [STEP_MS / 1e3] * (windows - 1)
    assert timed["ended"] == pytest.approx(timed["began"], abs=5), "moments of the host's clock, before now"
    assert timed["cuda_memory"].keys() == {"allocated", "active", "reserved", "num_alloc_retries", "num_ooms"}
    assert len(timed["losses"]) == windows
    # Once after warm-up, and once for the window of the memory pass.
    assert cuda["reset_peak_memory_stats"].call_count == 2
    assert cuda["Event"].call_args.kwargs == {"enable_timing": True}
    assert found["update"]["error"] < 1e-5, "compared with the weights that were kept on the CPU"
    memory = found["memory"]
    assert memory["peak_allocator_allocated"] == STATS["allocated_bytes.all.peak"]
    assert memory["held_allocator_reserved"] == STATS["reserved_bytes.all.current"]


def test_the_allocators_sizes_are_asked_by_the_names_that_torch_gives_them(cuda: dict[str, Any]) -> None:
    documented = torch.cuda.memory.memory_stats.__doc__ or ""
    for key in ALLOCATOR.values():
        assert f'"{key}.{{all,large_pool,small_pool}}.{{current,peak,allocated,freed}}"' in documented
    assert all(f'"{key}"' in documented for key in ("num_alloc_retries", "num_ooms"))
    assert cuda_peaks()["allocated"] == STATS["allocated_bytes.all.peak"]


def test_what_the_doctor_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "is_available": True,
        "device_count": 2,
        "get_arch_list": ["sm_90"],
        "get_device_capability": (9, 0),
        "can_device_access_peer": False,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, create_autospec(getattr(torch.cuda, name), return_value=answer))
    found = torchprobe.cuda()
    assert (found["cuda_error"], found["num_devices"]) == ("", 2)
    assert (found["capabilities"], found["architectures"]) == ([[9, 0], [9, 0]], ["sm_90"])
    assert found["no_peers"] == [[0, 1], [1, 0]]
