"""The GPUs that are visible here, and locks that keep other benches off them; without torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict, cast

from bench.errors import InputError
from bench.files import held, private
from bench.launch.nvml import MigInstance, Nvml, NvmlUnavailableError
from bench.launch.torch_facts import ask_torch


class VisibleGpu(TypedDict):
    """A GPU that is visible here; plain JSON.

    A MIG instance that CUDA_VISIBLE_DEVICES names has its own name and memory.
    """

    index: int
    name: str
    uuid: str
    """Of an instance: that of its GPU."""
    memory_bytes: int
    driver: str
    """Version; empty if NVML does not answer."""
    mig: NotRequired[str]
    """The instance's own UUID."""


class SplitGpu(VisibleGpu):
    """A GPU with its MIG instances."""

    instances: list[MigInstance]


@contextlib.contextmanager
def hold_gpus(uuids: Sequence[str]) -> Iterator[None]:
    """Lock these GPUs against other benches of this user. Raises BusyError naming one's holder."""
    with contextlib.ExitStack() as every:
        for uuid in sorted(set(uuids)):
            path = runtime_folder() / f"gpu-{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock"
            every.enter_context(
                held(path, f"GPU {uuid}", "wait for it, or choose others with CUDA_VISIBLE_DEVICES")
            )
        yield


def runtime_folder() -> Path:
    """A private folder for files that mean nothing after a reboot.

    Raises InputError if others can write to it.
    """
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


def gpus() -> list[VisibleGpu]:
    """The visible GPUs. NVML is asked, or where it does not answer, torch.

    NVIDIA's are those that CUDA_VISIBLE_DEVICES leaves visible. Does not initialize CUDA in this
    process.
    """
    found: list[SplitGpu] = []
    try:
        with Nvml() as nvml:
            for gpu in nvml.gpus:
                about = gpu.about()
                found.append(
                    {
                        "index": about["index"],
                        "name": about["name"],
                        "uuid": about["uuid"],
                        "memory_bytes": about["memory_bytes"],
                        "driver": nvml.driver,
                        "instances": gpu.instances(),
                    }
                )
    except NvmlUnavailableError:
        if has_driver():
            return [gpu.copy() for gpu in _torch_gpus()]
        return []
    chosen: list[VisibleGpu] = []
    for split in _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES")):
        visible: VisibleGpu = {
            "index": split["index"],
            "name": split["name"],
            "uuid": split["uuid"],
            "memory_bytes": split["memory_bytes"],
            "driver": split["driver"],
        }
        if "mig" in split:
            visible["mig"] = split["mig"]
        chosen.append(visible)
    return chosen


def has_driver() -> bool:
    """Whether there is a driver of GPUs that torch could use: AMD's, or NVIDIA's without NVML."""
    if Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # loading it does not initialize CUDA
    except OSError:
        return False
    return True


@functools.cache
def _torch_gpus() -> list[VisibleGpu]:
    facts, _ = ask_torch()
    if facts is None:
        return []
    found: list[VisibleGpu] = []
    for gpu in facts.devices:
        found.append(
            {
                "index": gpu["index"],
                "name": gpu["name"],
                "uuid": gpu["uuid"],
                "memory_bytes": gpu["memory_bytes"],
                "driver": "",
            }
        )
    return found


def _visible(found: list[SplitGpu], setting: str | None) -> list[SplitGpu]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES (indices or UUID prefixes) names, in its order.

    A process that is given a MIG instance sees only that one (NVIDIA's MIG user guide, "CUDA Device
    Enumeration").
    """
    if setting is None:
        return found
    chosen: list[SplitGpu] = []
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


def _instance(found: list[SplitGpu], prefix: str) -> list[SplitGpu]:
    """The first MIG instance whose UUID has this prefix; empty if there is none."""
    for gpu in found:
        for instance in gpu["instances"]:
            if instance["mig"].startswith(prefix):
                return [cast("SplitGpu", {**gpu, **instance})]
    return []
