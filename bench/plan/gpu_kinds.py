"""Kinds of GPUs by NVIDIA's datasheets: what their tensor cores can do, and their links.

None of it is part of a trial: it says what was reached of what can be, or predicts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLinks:
    """The rates of a kind of machine, in each direction; collectives reach less."""

    intra_bytes_per_s: float
    inter_bytes_per_s: float
    """Of a rank: its share of the node's network cards."""
    node_size: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuKind:
    """A kind of GPU."""

    bf16_flops: float
    """FLOP/s of dense products."""
    source: str
    links: GpuLinks | None = None
    """Of the machine that NVIDIA builds around it; None if there is no one kind."""


GPUS = {
    "A10": GpuKind(bf16_flops=125e12, source="A10: 125 TFLOP/s, 250 with sparsity"),
    "A30": GpuKind(bf16_flops=165e12, source="A30: 165 TFLOP/s, 330 with sparsity"),
    "A40": GpuKind(bf16_flops=149.7e12, source="A40: 149.7 TFLOP/s, 299.4 with sparsity"),
    "A100": GpuKind(
        bf16_flops=312e12,
        source="A100: 312 TFLOP/s, 624 with sparsity",
        links=GpuLinks(
            intra_bytes_per_s=300e9,
            inter_bytes_per_s=25e9,
            node_size=8,
            source=(
                "datasheets: NVLink of an A100 has 600 GB/s in both directions together, a DGX "
                "A100 8 cards of 200 Gbit/s"
            ),
        ),
    ),
    "L4": GpuKind(bf16_flops=121e12, source="L4: 242 TFLOP/s with sparsity"),
    "L40": GpuKind(bf16_flops=181.05e12, source="L40: 181.05 TFLOP/s, 362.1 with sparsity"),
    "L40S": GpuKind(bf16_flops=362.05e12, source="L40S: 362.05 TFLOP/s, 733 with sparsity"),
    "H100 NVL": GpuKind(bf16_flops=835e12, source="H100 NVL: 1,671 TFLOP/s with sparsity"),
    "H100 PCIe": GpuKind(bf16_flops=756e12, source="H100 PCIe: 1,513 TFLOP/s with sparsity"),
    "H100": GpuKind(
        bf16_flops=989e12,
        source="H100 SXM: 1,979 TFLOP/s with sparsity",
        links=GpuLinks(
            intra_bytes_per_s=450e9,
            inter_bytes_per_s=50e9,
            node_size=8,
            source=(
                "datasheets: NVLink of an H100 SXM has 900 GB/s in both directions together, a "
                "DGX H100 8 cards of 400 Gbit/s"
            ),
        ),
    ),
    "GH200": GpuKind(bf16_flops=990e12, source="GH200: 990 TFLOP/s, 1,979 with sparsity"),
    "H200 NVL": GpuKind(bf16_flops=835e12, source="H200 NVL: 1,671 TFLOP/s with sparsity"),
    "H200": GpuKind(
        bf16_flops=989e12,
        source="H200 SXM: 1,979 TFLOP/s with sparsity",
        links=GpuLinks(
            intra_bytes_per_s=450e9,
            inter_bytes_per_s=50e9,
            node_size=8,
            source=(
                "datasheets: NVLink of an H200 SXM has 900 GB/s in both directions together, a "
                "DGX H200 8 cards of 400 Gbit/s"
            ),
        ),
    ),
    "B200": GpuKind(
        bf16_flops=2250e12,
        source="HGX B200: 4.5 PFLOP/s of a GPU with sparsity",
        links=GpuLinks(
            intra_bytes_per_s=900e9,
            inter_bytes_per_s=50e9,
            node_size=8,
            source=(
                "datasheets: NVLink of a B200 has 1.8 TB/s in both directions together, a DGX "
                "B200 8 cards of 400 Gbit/s"
            ),
        ),
    ),
    "GB200": GpuKind(bf16_flops=2500e12, source="GB200 NVL72: 5 PFLOP/s of a GPU with sparsity"),
    "B300": GpuKind(bf16_flops=2250e12, source="HGX B300: 36 PFLOP/s of 8 GPUs with sparsity"),
    "GB300": GpuKind(
        bf16_flops=2500e12, source="GB300 NVL72: 360 PFLOP/s of 72 GPUs with sparsity"
    ),
}
"""By words of the name that NVML and CUDA give it, in any case.

With sparsity it is twice as much.
"""
LINKED = {name: gpu.links for name, gpu in GPUS.items() if gpu.links is not None}
"""The links of those that have some."""
NCCL_LATENCY_S = 32e-6
"""Assumed for a collective on GPUs: a ring of 8 over NVLink by NCCL's own cost model
(src/graph/tuning.cc, the protocol Simple: 8.4 us, and 3.4 us for each of 7 steps). A ring over more
ranks takes longer."""


def kind_of(device_name: str) -> str | None:
    """The kind that has most words in the name of a device, in any case; None if none has.

    The kind by its name in GPUS, for a name that NVML, CUDA or a user gives.
    """
    words = {*re.split(r"[ -]", device_name.casefold())}
    found = [name for name in GPUS if words.issuperset(name.casefold().split())]
    return max(found, key=lambda name: len(name.split()), default=None)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense FLOP/s of a device: those of its kind.

    None if that is unknown, or a MIG instance, which has only part of them. No fp32 peak is known,
    because the TF32 switch decides which one applies.
    """
    if precision != "bf16" or "mig" in device_name.casefold():
        return None
    kind = kind_of(device_name)
    if kind is None:
        return None
    return GPUS[kind].bf16_flops
