"""A virtual world: one process is rank 0 of W ranks, over torch's process group that only pretends to communicate.

Shards, buckets and calls are those of rank 0 of a real world, and so are their bytes; no other rank exists. What would
come from the others is made of what this rank has (``FakeProcessGroup`` of torch >= 2.13: a gather repeats the own
shard, a reduction keeps the own values), so all numbers are finite and none means anything. A step takes what it would
if communication took no time.

With fake tensors nothing is allocated either: tensors have shapes, dtypes and storages of a size, and no memory.
"""

from __future__ import annotations

from bench.backends.base import Backend
from bench.plan.cell import Cell

PASSES = {False: ("time", "collectives", "memory"), True: ("collectives", "memory")}
"""The passes that mean something in a virtual world, by whether tensors are fake. None compares values."""


def refusal(cell: Cell, backend: type[Backend]) -> str:
    """Why there cannot be such a virtual world, in one line; empty if there can, and for a cell that is none."""
    if cell.fake_tensors and not cell.virtual:
        return "fake tensors have no values to send to another rank: they need a virtual world"
    if not cell.virtual:
        return ""
    if backend.not_virtual:
        return f"{backend.name} cannot be in a virtual world: {backend.not_virtual}"
    if cell.fake_tensors and backend.not_fake:
        return f"{backend.name} cannot run on fake tensors: {backend.not_fake}"
    return ""


def passes(cell: Cell, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the passes that mean something for this cell, in order."""
    return tuple(name for name in asked if not cell.virtual or name in PASSES[cell.fake_tensors])
