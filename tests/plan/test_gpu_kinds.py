"""Kinds of GPUs, found by the names that NVML gives them."""

from __future__ import annotations

import re

import pytest

from bench.plan import gpu_kinds

PEAKS = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA GH200 480GB": 990,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA B300 SXM6 AC": 2250,
}
UNKNOWN = ["", "cpu", "NVIDIA GeForce RTX 4090", "NVIDIA H20", "NVIDIA A10G", "NVIDIA A100X"]


@pytest.mark.parametrize("name", [*PEAKS, *UNKNOWN])
def test_peaks_are_nvidias_dense_numbers_and_none_that_would_be_a_guess(name: str) -> None:
    expected = PEAKS.get(name)
    found = gpu_kinds.peak_flops(name, "bf16")
    assert found == (expected and pytest.approx(1e12 * expected))
    assert found == gpu_kinds.peak_flops(name.lower(), "bf16"), "as a user may write it"
    assert (
        gpu_kinds.peak_flops(name, "fp32")
        is None
        is gpu_kinds.peak_flops(f"{name} MIG 1g.10gb", "bf16")
    )


SPARSE = re.compile(r"([\d.,]+)(?: ([TP])FLOP/s)?(?: of (\d+|a) GPUs?)? with sparsity")


@pytest.mark.parametrize("name", gpu_kinds.GPUS)
def test_peaks_are_half_of_what_the_datasheet_has_with_sparsity(name: str) -> None:
    sparse = SPARSE.search(gpu_kinds.GPUS[name].source)
    assert sparse is not None
    number, unit, among = sparse.groups()
    flops = float(number.replace(",", "")) * {"P": 1e15}.get(unit, 1e12)
    if among not in (None, "a"):
        flops /= int(among)
    assert gpu_kinds.GPUS[name].bf16_flops == pytest.approx(flops / 2, rel=0.013)
