"""Write the functions that only succeed: what torch's libraries want of CUDA's and the hand-written C lacks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

LIBRARIES = (
    r"(__)?(cuda|cublas|cudnn|cufft|curand|cusparse|cusolver|cupti|cuFile|nccl|nvshmem|nvrtc)"
)
"""How the names begin that the one library stands in for; the driver's (``cuInit``) are in another."""
DRIVER = r"cu(?!File)[A-Z]"
PRODUCT = re.compile(
    r"cublas(?!Set|Get|Create|Destroy|Lt)\w*(gemm|Gemm|gemv|dot|Dot|scal|axpy|trsm)\w*"
)
"""Functions of cuBLAS that launch something."""
ALSO_OF_THE_DRIVER = ("cuGetErrorName", "cuDeviceGetAttribute")
"""Called through the driver's library, though torch does not link them."""


def symbols(files: Iterable[Path], kind: str) -> set[str]:
    """The dynamic symbols of shared libraries: ``--undefined-only`` or ``--defined-only``, without versions."""
    command = ["nm", "--dynamic", kind, *map(str, files)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {fields[-1].split("@")[0] for line in lines if len(fields := line.split()) > 1}


def succeeding(names: Iterable[str]) -> str:
    """C of functions that return 0; products are counted."""
    lines = ['#include "counters.h"', ""]
    for name in sorted(names):
        counted = "count(LIBRARY); " if PRODUCT.fullmatch(name) else ""
        lines.append(f"long {name}(void) {{ {counted}return 0; }}")
    return "\n".join([*lines, ""])


def missing(torch: Path, pattern: str, written: Path, also: Iterable[str] = ()) -> set[str]:
    """What the libraries of an installed torch want, by how the names begin, and the library ``written`` lacks."""
    wanted = symbols(sorted((torch / "lib").glob("*.so*")), "--undefined-only")
    named = {name for name in wanted if re.match(pattern, name)}
    return (named | set(also)) - symbols([written], "--defined-only")
