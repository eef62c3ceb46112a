"""Imported once by a fork server, so that trials need not wait for imports.

It must not initialize CUDA. Loads what every trial needs; ``load_all`` loads what a backend names
(``Backend.preloaded``). If that initializes CUDA, no forked child can use it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal

from bench.backends.base import load
from bench.launch import stragglers

SUCCESS = 0
"""Return code of CUDA's driver after ``cuInit``; before, it is 3 (CUDA_ERROR_NOT_INITIALIZED)."""


def initialized() -> bool:
    """Whether torch, the CUDA runtime or another library has called ``cuInit`` in this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False  # it was never loaded
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == SUCCESS)


# Otherwise its children would keep it alive after the launcher's process has ended. They end with
# it.
stragglers.signal_at_parents_end(signal.SIGKILL)


def load_all(*names: str) -> str:
    """Load modules, and call functions of modules; the first that initialized CUDA, or nothing."""
    initialized_by = ""
    for name in names:
        load(name)
        if not initialized_by and initialized():
            initialized_by = name
    # Otherwise the garbage collector would walk a million immortal objects in every trial, perhaps
    # in a timed window.
    gc.collect()
    gc.freeze()
    return initialized_by


initialized_by = load_all(
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "pydantic",
    "safetensors.torch",
    "bench.workload.llama",
    "bench.measure.trial",
)
"""The first module whose import initialized CUDA; empty if none did."""
