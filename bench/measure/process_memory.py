"""What this process has allocated outside torch's CUDA allocator, as the C library counts it.

On the CPU torch has no statistics of its own: it takes every tensor from ``malloc``, as numpy and
other libraries do. glibc counts the bytes of all threads, exactly and whether or not they were
touched. Small objects of Python are not among them, since its own allocator maps their pages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and newer (malloc.h)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def bytes_in_use() -> int | None:
    """Bytes that are allocated now, in heaps and in mappings of their own; None without glibc."""
    read = _reader()
    if read is None:
        return None
    found = read()
    return int(found.uordblks) + int(found.hblkhd)


@cache
def _reader() -> Callable[[], _Mallinfo2] | None:
    try:
        read = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    read.restype = _Mallinfo2
    return read
