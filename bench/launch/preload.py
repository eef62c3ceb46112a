"""Imported once by a fork server, so that no trial waits for imports. Should never initialize CUDA.

Beside what every trial needs, the packages named in BENCH_PRELOAD are imported, and no others. ``initialized`` tells
whether this process has initialized CUDA: no child that is forked from it can use it then.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from contextlib import suppress

from bench.launch import stragglers

SUCCESS = 0
"""What CUDA's driver says once ``cuInit`` was called, and not before (3, CUDA_ERROR_NOT_INITIALIZED)."""


def initialized() -> bool:
    """Whether ``cuInit`` was called here, by torch, the CUDA runtime or any other library. Initializes nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False  # it was never loaded
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == SUCCESS)


# Its children end with it, and would otherwise keep it alive when the launcher's process is gone.
stragglers.signal_at_parents_end(signal.SIGKILL)

_PARTS = {
    # deepspeed.initialize imports the second one, and it imports all of torch.compile.
    "deepspeed": ("deepspeed", "deepspeed.runtime.zero.muon.original_muon"),
    "lightning": ("lightning.pytorch", "lightning.fabric"),
}
"""What to import of a package of which the name alone would not do."""
_packages = [name for name in os.environ.get("BENCH_PRELOAD", "").split(",") if name]

initialized_by = ""
"""The first module whose import initialized CUDA. There should be none: children of this process cannot use it then."""

for _module in (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    *(part for name in _packages for part in _PARTS.get(name, (name,))),
    "pydantic",
    "safetensors.torch",
    "bench.workload.llama",
    "bench.measure.trial",
):
    with suppress(ImportError):
        __import__(_module)
    if not initialized_by and initialized():
        initialized_by = _module

# A collection would walk a million objects that never die, in every trial and perhaps in a timed window.
gc.collect()
gc.freeze()
