"""The cell in which waits and launches are counted."""

from __future__ import annotations

from bench.plan import matrix as matrix_file
from bench.plan.cell import Cell, Device, Precision

N = 4
NEVER = (
    *("deepspeed-zero2-deferred", "deepspeed-zero3-deferred"),
    *("deepspeed-zero2-offload-deferred", "deepspeed-zero3-offload-deferred"),
    "torchtitan-eager",
)
"""Backends that refuse bf16, and one that needs a newer torch than the stub's."""
NEVER_ALONE = ("accelerate-ddp", "accelerate-ddp-eager", "hf-trainer-ddp")
"""Backends that wrap no model in DDP on one GPU."""


def counted_cell(backend: str, world_size: int) -> Cell:
    """The cell that all backends are counted in: 135m as in the matrix for GPUs, 4 samples per micro-batch."""
    return Cell(
        backend=backend,
        model="135m",
        accumulate=N,
        world_size=world_size,
        global_batch_size=4 * N * world_size,
        sequence_length=2048,
        precision=Precision.BF16,
        optimizer="adamw-fused",
        device=Device.CUDA,
        warmup_windows=matrix_file.load("gpu")["training.warmup_windows"],
        timed_windows=2,
    )
