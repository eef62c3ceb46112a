"""Gathers facts about this machine for ``doctor``; unknown ones are None or empty.

Torch is asked in another process, ``python -m bench.run.surroundings``, because importing it may fail and a driver may
hang.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.files import existing
from bench.launch import gpus
from bench.measure import host
from bench.measure.host import HostLoad
from bench.run import machine
from bench.run.telemetry import Gpu

PROBE_TIMEOUT_S = 180.0
"""Time limit of the process that imports torch, on a slow disk."""
LOOK_S = 1.0
"""How long the load of the machine is observed."""
GLOO_RANKS, GLOO_TIMEOUT_S = 2, 60.0
"""Ranks of the test of gloo, and its time limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One NVIDIA GPU, as NVML describes it."""

    name: str
    uuid: str
    visible: bool
    """Whether CUDA_VISIBLE_DEVICES makes it visible to the bench."""
    num_processes: int | None
    """Compute processes on it."""
    mig: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """What torch reports in the other process."""

    version: str
    built_for: str | None
    """Version of CUDA; None for a CPU build."""
    gloo_error: str
    cuda_error: str
    num_devices: int
    """Number of usable GPUs."""
    capabilities: Sequence[Sequence[int]]
    """Compute capability (major, minor) of each usable GPU."""
    architectures: Sequence[str]
    """Architectures of its kernels, such as sm_90 or compute_90."""
    no_peers: Sequence[Sequence[int]]
    """Pairs of GPUs that cannot read each other's memory."""
    nccl: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All facts."""

    python: tuple[int, int, int]
    packages: Mapping[str, str]
    """Installed versions by lower-case name."""
    torch: Torch | None
    torch_error: str
    """Why torch did not answer."""
    device_nodes: int
    """Number of GPUs with a device node from the kernel's driver."""
    nvml_error: str
    driver: str
    driver_cuda: tuple[int, int] | None
    """The newest CUDA that the driver can run."""
    cards: Sequence[Card]
    environment: Mapping[str, str]
    num_cores: int
    governor: str | None
    memory_bytes: int
    """Available memory."""
    shm_bytes: int | None
    """Size of /dev/shm."""
    disk_bytes: int
    """Free disk space in the folder of runs."""
    loopback_error: str
    foreign_cores: float | None
    stolen_cores: float | None
    missing: Mapping[str, Mapping[str, str]]
    """By device and backend: why the backend cannot run on it; empty if it can."""


def gather(folder: Path, missing: Mapping[str, Mapping[str, str]]) -> Facts:
    """The facts of this machine, with runs under ``folder``. Takes some seconds, mostly to import torch."""
    torch, torch_error = ask_torch()
    load = _watch()
    driver = ask_nvml()
    return Facts(
        python=sys.version_info[:3],
        packages=machine.distributions(),
        torch=torch,
        torch_error=torch_error,
        device_nodes=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        **driver,
        environment=machine.environment(),
        num_cores=machine.num_cores(),
        governor=machine.governor(),
        memory_bytes=psutil.virtual_memory().available,
        shm_bytes=_size(Path("/dev/shm")),
        disk_bytes=shutil.disk_usage(existing(folder)).free,
        loopback_error=loopback(),
        foreign_cores=None if load is None else load["foreign_cores"],
        stolen_cores=None if load is None else load["stolen_cores"],
        missing=missing,
    )


def ask_torch(command: Sequence[str] = (), timeout_s: float = PROBE_TIMEOUT_S) -> tuple[Torch | None, str]:
    """What torch reports, or why it does not answer."""
    asked = list(command) or [sys.executable, "-m", "bench.run.surroundings"]
    root = str(Path(__file__).resolve().parent.parent.parent)
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            asked,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"no answer within {timeout_s:g} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
    lines = done.stdout.strip().splitlines()
    try:
        return Torch(**json.loads(lines[-1])), ""
    except (IndexError, ValueError, TypeError):
        said = done.stderr.strip().splitlines()
        return None, said[-1] if said else f"exit status {done.returncode}"


def ask_nvml() -> dict[str, Any]:
    """The fields of Facts that come from NVML."""
    found: dict[str, Any] = {"nvml_error": "", "driver": "", "driver_cuda": None, "cards": ()}
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no nvidia-ml-py, no driver, no permission
        return found | {"nvml_error": f"{type(error).__name__}: {error}"}
    try:
        visible = {gpu["uuid"] for gpu in gpus.gpus()}
        version = int(pynvml.nvmlSystemGetCudaDriverVersion())
        every = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return found | {
            "driver": gpus.text(pynvml.nvmlSystemGetDriverVersion()),
            "driver_cuda": (version // 1000, version % 1000 // 10),
            "cards": tuple(_card(pynvml, handle, visible) for handle in every),
        }
    except Exception as error:  # a driver may answer some queries and not others
        return found | {"nvml_error": f"{type(error).__name__}: {error}"}
    finally:
        pynvml.nvmlShutdown()


def _card(nvml: Any, handle: Any, visible: set[str]) -> Card:
    uuid = gpus.text(nvml.nvmlDeviceGetUUID(handle))
    gpu = Gpu(nvml, uuid, [])
    pids = gpu.sample(processes=True)["pids"]
    return Card(
        name=gpus.text(nvml.nvmlDeviceGetName(handle)),
        uuid=uuid,
        visible=uuid in visible,
        num_processes=None if pids is None else len(pids),
        mig=gpu.mig(),
    )


def loopback() -> str:
    """Why connections over 127.0.0.1 do not work; empty if they do."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            server.accept()[0].close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def _watch() -> dict[str, Any] | None:
    """The load of other processes while this one sleeps."""
    with HostLoad() as load:
        time.sleep(LOOK_S)
    return host.merge([load.result])


def _size(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def gloo() -> str:
    """Why forked processes cannot all-reduce over gloo on the loopback device; empty if they can."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.get_context("fork").Pool(GLOO_RANKS) as pool:
        try:
            sums = pool.starmap_async(_sum_over_gloo, [(rank, port) for rank in range(GLOO_RANKS)]).get(GLOO_TIMEOUT_S)
        except multiprocessing.TimeoutError:
            return f"no answer within {GLOO_TIMEOUT_S:g} s"
        except Exception as error:  # any error is the answer
            return " ".join(f"{type(error).__name__}: {error}".split())
    return "" if set(sums) == {GLOO_RANKS} else f"{GLOO_RANKS} ones add up to {sums}"


def _sum_over_gloo(rank: int, port: int) -> float:
    import datetime

    import torch
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=GLOO_TIMEOUT_S / 2)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timeout=limit, rank=rank, world_size=GLOO_RANKS)
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value)


def cuda() -> dict[str, Any]:
    """What torch reports about CUDA."""
    import torch
    import torch.distributed as dist

    facts: dict[str, Any] = {
        "cuda_error": "",
        "num_devices": 0,
        "capabilities": [],
        "architectures": [],
        "no_peers": [],
        "nccl": dist.is_nccl_available(),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        facts["cuda_error"] = "; ".join(" ".join(str(one.message).split()) for one in caught)
        return facts
    try:
        count = facts["num_devices"] = torch.cuda.device_count()
        facts["architectures"] = torch.cuda.get_arch_list()
        facts["capabilities"] = [list(torch.cuda.get_device_capability(i)) for i in range(count)]
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        facts["no_peers"] = [[i, j] for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    except (RuntimeError, AssertionError) as error:
        facts["cuda_error"] = " ".join(str(error).split())
    return facts


if __name__ == "__main__":
    import torch

    # Gloo comes first: processes cannot be forked after CUDA was initialized.
    about = {"version": torch.__version__, "built_for": torch.version.cuda, "gloo_error": gloo()}
    print(json.dumps(about | cuda()))
