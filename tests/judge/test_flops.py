"""Peaks for MFU: NVIDIA's dense numbers by name, and none where it would be a guess."""

from __future__ import annotations

import pytest

from bench.judge.tables import products_rate
from bench.run.machine import peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
    ],
)
def test_known_gpus(name: str, peak: float) -> None:
    assert peak_flops(name, "bf16") == peak
    assert peak_flops(name, "fp32") is None


@pytest.mark.parametrize(
    "name", ["cpu", "", "NVIDIA GeForce RTX 4090", "NVIDIA H20", "NVIDIA A10", "AMD Instinct MI300X"]
)
def test_no_peak_is_guessed(name: str) -> None:
    assert peak_flops(name, "bf16") is None


def test_the_rate_of_products_is_that_of_all_ranks_together() -> None:
    entries = [
        {"world_size": 2, "flops_per_s": {"bf16": [1e12, 3e12]}},
        {"world_size": 4, "flops_per_s": {}},
    ]
    assert products_rate(entries, 2, "bf16") == 4e12
    assert products_rate(entries, 2, "fp32") is None
    assert products_rate(entries, 4, "bf16") is None
    assert products_rate(entries, 8, "bf16") is None
    assert products_rate([], 2, "bf16") is None
