"""The GPUs that are visible here, and locks that keep other benches off them. Does not import torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.errors import InputError
from bench.files import held, private
from bench.launch.nvml import Nvml, NvmlUnavailableError
from bench.launch.torch_facts import ask_torch


@contextlib.contextmanager
def hold_gpus(uuids: Sequence[str]) -> Iterator[None]:
    """Lock these GPUs against other benches of this user. Raises BusyError naming the holder of one of them."""
    with contextlib.ExitStack() as every:
        for uuid in sorted(set(uuids)):
            path = runtime_folder() / f"gpu-{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock"
            every.enter_context(
                held(path, f"GPU {uuid}", "wait for it, or choose others with CUDA_VISIBLE_DEVICES")
            )
        yield


def runtime_folder() -> Path:
    """A private folder for files that mean nothing after a reboot. Raises InputError if others can write to it."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(tempfile.gettempdir()) / f"accumulation-bench-{os.getuid()}"
    if given and Path(given).is_dir() and os.access(given, os.W_OK):
        folder = Path(given) / "accumulation-bench"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        alone = private(folder)
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be made ({error.strerror}); set XDG_RUNTIME_DIR to a folder"
        ) from error
    if not alone:
        raise InputError(
            f"{folder}: is not a folder that you alone can write; remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


def gpus() -> list[dict[str, Any]]:
    """The visible GPUs: index, name, uuid, memory_bytes, driver. NVML is asked, or where it does not answer, torch.

    NVIDIA's are those that CUDA_VISIBLE_DEVICES leaves visible. A MIG instance that is named there
    has its own name and memory, and its UUID as ``mig``; ``uuid`` is that of its GPU. Does not
    initialize CUDA in this process.
    """
    try:
        with Nvml() as nvml:
            found = [
                {**gpu.about(), "driver": nvml.driver, "instances": gpu.instances()}
                for gpu in nvml.gpus
            ]
    except NvmlUnavailableError:
        if has_driver():
            return [dict(gpu) for gpu in _torch_gpus()]
        return []
    chosen = [dict(gpu) for gpu in _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))]
    for gpu in chosen:
        del gpu["instances"]
    return chosen


def has_driver() -> bool:
    """Whether there is a driver of GPUs that torch could use: AMD's, or NVIDIA's, also without NVML."""
    if Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # loading it does not initialize CUDA
    except OSError:
        return False
    return True


@functools.cache
def _torch_gpus() -> list[dict[str, Any]]:
    facts, _ = ask_torch()
    if facts is None:
        return []
    keys = ("index", "name", "uuid", "memory_bytes")
    return [{**{key: gpu[key] for key in keys}, "driver": ""} for gpu in facts.devices]


def _visible(found: list[dict[str, Any]], setting: str | None) -> list[dict[str, Any]]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES (indices or UUID prefixes) names, in its order.

    A process that is given a MIG instance sees only that one (NVIDIA's MIG user guide, "CUDA Device
    Enumeration").
    """
    if setting is None:
        return found
    chosen = []
    for entry in filter(None, map(str.strip, setting.split(","))):
        if entry.startswith("MIG-"):
            return _instance(found, entry)
        for gpu in found:
            if str(gpu["index"]) == entry or gpu["uuid"].startswith(entry):
                chosen.append(gpu)
                break
        else:
            break  # as in CUDA, the first invalid entry ends the list
    return chosen


def _instance(found: list[dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    """The first MIG instance whose UUID has this prefix; empty if there is none."""
    for gpu in found:
        for instance in gpu["instances"]:
            if instance["mig"].startswith(prefix):
                return [gpu | instance]
    return []
