"""Which training a process belongs to, and its place in it."""

from __future__ import annotations

import os
import platform

import torch.distributed as dist

JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
"""Variables of launchers that tell one training from another."""


def job() -> str:
    """What all processes of a training share, and the next one of the command does not."""
    return ":".join(os.environ.get(name, "") for name in JOB)


def process_name() -> str:
    """Tells processes apart that share a folder; containers and hosts have the same ids."""
    return f"{platform.node()}-{os.getpid()}"


def place_in_world() -> tuple[int, int]:
    """Rank and number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
