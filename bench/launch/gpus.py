"""The GPUs that are visible here, and locks that keep other benches off them. Does not import torch."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.errors import InputError
from bench.files import held, private


@contextlib.contextmanager
def hold_gpus(uuids: Sequence[str]) -> Iterator[None]:
    """Lock these GPUs against other benches of this user. Raises BusyError naming the holder of one of them."""
    with contextlib.ExitStack() as every:
        for uuid in sorted(set(uuids)):
            path = runtime_folder() / f"gpu-{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock"
            every.enter_context(held(path, f"GPU {uuid}", "wait for it, or choose others with CUDA_VISIBLE_DEVICES"))
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
        raise InputError(f"{folder}: cannot be made ({error.strerror}); set XDG_RUNTIME_DIR to a folder") from error
    if not alone:
        raise InputError(f"{folder}: is not a folder that you alone can write; remove it, or set XDG_RUNTIME_DIR")
    return folder


def gpus() -> list[dict[str, Any]]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible: index, name, uuid, memory_bytes, driver.

    Does not initialize CUDA. A MIG instance that is named there has its own name and memory, and its UUID as ``mig``;
    ``uuid`` is that of its GPU.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no nvidia-ml-py or no driver: no GPU can be used
        return []
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        found.append(
            {
                "index": index,
                "name": text(pynvml.nvmlDeviceGetName(handle)),
                "uuid": text(pynvml.nvmlDeviceGetUUID(handle)),
                "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                "instances": _instances(pynvml, handle),
            }
        )
    driver = text(pynvml.nvmlSystemGetDriverVersion())
    pynvml.nvmlShutdown()
    chosen = _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [{key: value for key, value in gpu.items() if key != "instances"} | {"driver": driver} for gpu in chosen]


def _instances(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    """The MIG instances of a GPU: name, memory_bytes, and its own UUID as ``mig``."""
    try:
        places = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if nvml.nvmlDeviceGetMigMode(handle)[0] else 0)
    except Exception:  # most GPUs do not support MIG
        return []
    found = []
    for place in places:
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            name = text(nvml.nvmlDeviceGetName(instance))
            found.append(
                {
                    "name": name if "MIG" in name else f"{name} MIG",
                    "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(instance).total),
                    "mig": text(nvml.nvmlDeviceGetUUID(instance)),
                }
            )
        except Exception:  # no instance at this index
            continue
    return found


def _visible(found: list[dict[str, Any]], setting: str | None) -> list[dict[str, Any]]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES (indices or UUID prefixes) names, in its order.

    A process that is given a MIG instance sees only that one (NVIDIA's MIG user guide, "CUDA Device Enumeration").
    """
    if setting is None:
        return found
    chosen = []
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        if entry.startswith("MIG-"):
            own = [{**gpu, **one} for gpu in found for one in gpu["instances"] if one["mig"].startswith(entry)]
            return own[:1]
        match = [gpu for gpu in found if str(gpu["index"]) == entry or gpu["uuid"].startswith(entry)]
        if not match:
            break  # as in CUDA, the first invalid entry ends the list
        chosen.append(match[0])
    return chosen


def text(value: str | bytes) -> str:
    """A string of NVML, which older versions of its library return as bytes."""
    return value.decode() if isinstance(value, bytes) else value
