"""Peaks for MFU: NVIDIA's dense numbers by name, and none that would be a guess."""

from __future__ import annotations

import pytest

from bench.run.machine import peak_flops

KNOWN = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
}


@pytest.mark.parametrize("name", [*KNOWN, "cpu", "", "NVIDIA GeForce RTX 4090", "NVIDIA H20", "NVIDIA A10"])
def test_peaks_are_known_or_none(name: str) -> None:
    assert peak_flops(name, "bf16") == KNOWN.get(name)
    assert peak_flops(name, "fp32") is None
