"""What machine this is, and what is installed on it: stored with every run. Nothing here imports torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "lightning",
    "deepspeed",
    "transformers",
    "numpy",
    "pandas",
    "scipy",
    "matplotlib",
    "pyarrow",
    "safetensors",
)
"""Packages whose versions are stored: all that can change a number."""
ENVIRONMENT_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES", "DS_")
"""Environment variables that are stored; no others, so that no secret gets in."""


def num_cores() -> int:
    """Cores that this process may use: by its affinity, and by the quota of its control group (version 2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or no quota ("max")
        return cores


def peak_memory_bytes() -> int | None:
    """The most memory that this process has had resident; None where the system does not tell.

    Not getrusage: its maximum includes what the process that started this one had resident before the exec.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def gpus() -> list[dict[str, Any]]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible: name, uuid, memory_bytes. Initializes no CUDA."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no nvidia-ml-py or no driver: both mean that no GPU can be used
        return []
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        found.append(
            {
                "index": index,
                "name": _text(pynvml.nvmlDeviceGetName(handle)),
                "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
                "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            }
        )
    driver = _text(pynvml.nvmlSystemGetDriverVersion())
    pynvml.nvmlShutdown()
    return [{**gpu, "driver": driver} for gpu in _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))]


def _visible(found: list[dict[str, Any]], setting: str | None) -> list[dict[str, Any]]:
    """Those of ``found`` that a value of CUDA_VISIBLE_DEVICES (indices or UUID prefixes) names, in its order."""
    if setting is None:
        return found
    chosen = []
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        match = [gpu for gpu in found if str(gpu["index"]) == entry or gpu["uuid"].startswith(entry)]
        if not match:
            break  # as CUDA does: the first entry that is wrong ends the list
        chosen.append(match[0])
    return chosen


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def machine() -> dict[str, Any]:
    """The hardware and the system; no host name and no path."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def packages() -> dict[str, str]:
    """Version of each package in PACKAGES that is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, str]:
    """The environment variables that can change a number."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT_PREFIXES)}


def git_state() -> dict[str, Any]:
    """Commit of the bench's own checkout and whether its tree was clean; both None if it is not a checkout."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    status = git("status", "--porcelain", "--", str(folder))
    return {"commit": git("rev-parse", "HEAD"), "clean": None if status is None else not status}
