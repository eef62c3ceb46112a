"""What MFU is held against: datasheet peaks, and the rate of matrix products measured in the run (``bench.matmul``).

A device that is not listed has no peak, and its rows have no MFU against one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

PEAK_FLOPS: dict[str, dict[str, float]] = {
    "H100 NVL": {"bf16": 835e12},
    "H100 PCIe": {"bf16": 756e12},
    "H100": {"bf16": 989e12},
    "H200 NVL": {"bf16": 835e12},
    "H200": {"bf16": 989e12},
    "A100": {"bf16": 312e12},
}
"""Dense tensor-core FLOP/s by a part of the device's name and by precision, from NVIDIA's datasheets.

The first name that matches counts, so longer ones stand first. No fp32 peak is listed: what PyTorch does with fp32
matrix products depends on a switch (TF32), and a peak that may not be the one in use would be a guess.
"""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of one device, or None if it is not known."""
    if "MIG" in device_name:
        return None  # a slice has a part of the peak
    for part, peaks in PEAK_FLOPS.items():
        if part in device_name:
            return peaks.get(precision)
    return None


def products_rate(entries: Iterable[Mapping[str, Any]], world_size: int, precision: str) -> float | None:
    """FLOP/s that so many ranks reached together in matrix products; None if that was not measured.

    ``entries`` as run.json has them under ``matmul``; see ``bench.matmul.measure``.
    """
    for entry in entries:
        rates = entry["flops_per_s"]
        if entry["world_size"] == world_size and precision in rates:
            return math.fsum(rates[precision])
    return None
