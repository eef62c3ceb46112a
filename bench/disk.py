"""Space on the disk: how much a run needs, whether it is there, and what to say when it is not."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.cell import Cell
from bench.errors import InputError
from bench.folders import existing
from bench.workload.sizes import SIZES

RESERVE_BYTES = 16 * 2**20
"""What has to be free before a trial starts: logs, its record, and the tables and plots at the end."""
RECORD_BYTES, STEP_BYTES, RANK_STEP_BYTES = 6_000, 60, 14
"""Of a trial's record: what it has beside its steps, per step, and per step and rank. Rounded up."""


def needed(cells: Sequence[Cell], repeats: int) -> int:
    """Bytes that a run will write, roughly. References of models that are not shipped are not known, and left out."""
    total = RESERVE_BYTES
    for cell in cells:
        total += repeats * (RECORD_BYTES + cell.windows * (STEP_BYTES + RANK_STEP_BYTES * cell.world_size))
        if cell.is_reference and cell.workload == "llama":
            total += SIZES[cell.model].num_parameters * 4 * (2 if cell.clip_norm else 1)
    return total


def free(folder: Path) -> int:
    """Bytes that may be written into a folder, which need not exist yet."""
    return shutil.disk_usage(existing(folder)).free


def require(folder: Path, cells: Sequence[Cell], repeats: int, place: str) -> None:
    """Raise InputError that names ``place`` if the folder has no room for such a run."""
    need, have = needed(cells, repeats), free(folder)
    if have < need:
        raise InputError(
            f"{place}: the run needs about {need / 2**20:,.0f} MiB, and {have / 2**20:,.0f} MiB are free; "
            "free some, or name another folder"
        )


def is_short(folder: Path) -> bool:
    """Whether too little is left for another trial."""
    return free(folder) < RESERVE_BYTES


def full(folder: Path) -> OSError:
    """The error that a write there would end with."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def is_full(error: OSError) -> bool:
    """Whether an error means that the disk, or this user's share of it, is full."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}
