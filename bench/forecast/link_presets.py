"""Rates of links by names of GPUs, and the latency assumed of collectives on GPUs, with sources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkPreset:
    """The rates of a kind of machine, in each direction, by datasheets; collectives reach less."""

    intra_bytes_per_s: float
    inter_bytes_per_s: float
    """Of a rank: its share of the node's network cards."""
    node_size: int
    source: str


PRESETS = {
    "A100": LinkPreset(
        intra_bytes_per_s=300e9,
        inter_bytes_per_s=25e9,
        node_size=8,
        source=(
            "datasheets: NVLink of an A100 has 600 GB/s in both directions together, a DGX A100 "
            "8 cards of 200 Gbit/s"
        ),
    ),
    "H100": LinkPreset(
        intra_bytes_per_s=450e9,
        inter_bytes_per_s=50e9,
        node_size=8,
        source=(
            "datasheets: NVLink of an H100 SXM has 900 GB/s in both directions together, a DGX "
            "H100 8 cards of 400 Gbit/s"
        ),
    ),
    "H200": LinkPreset(
        intra_bytes_per_s=450e9,
        inter_bytes_per_s=50e9,
        node_size=8,
        source=(
            "datasheets: NVLink of an H200 SXM has 900 GB/s in both directions together, a DGX "
            "H200 8 cards of 400 Gbit/s"
        ),
    ),
    "B200": LinkPreset(
        intra_bytes_per_s=900e9,
        inter_bytes_per_s=50e9,
        node_size=8,
        source=(
            "datasheets: NVLink of a B200 has 1.8 TB/s in both directions together, a DGX B200 8 "
            "cards of 400 Gbit/s"
        ),
    ),
}
"""By the name of the GPU."""
NCCL_LATENCY_S = 32e-6
"""Assumed for a collective on GPUs: a ring of 8 over NVLink by NCCL's own cost model
(src/graph/tuning.cc, the protocol Simple: 8.4 us, and 3.4 us for each of 7 steps). A ring over more
ranks takes longer."""
