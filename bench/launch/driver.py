"""Whether this process has initialized CUDA: no child that is forked from it can use it then."""

from __future__ import annotations

import ctypes
import os

SUCCESS = 0
"""What CUDA's driver says once ``cuInit`` was called, and not before (3, CUDA_ERROR_NOT_INITIALIZED)."""


def initialized() -> bool:
    """Whether ``cuInit`` was called here, by torch, the CUDA runtime or any other library. Initializes nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False  # it was never loaded
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == SUCCESS)
