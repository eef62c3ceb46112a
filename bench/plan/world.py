"""Worlds that are not real: which cells can be in one, and which passes mean something there.

In a virtual world one process is rank 0 of W ranks; no other exists. Shards, buckets and calls are those of rank 0 of a
real world, and so are their bytes; values mean nothing, and a step takes what it would if communication took no time.
With fake tensors nothing is allocated either: tensors have shapes, dtypes and storages of a size, and no memory.
"""

from __future__ import annotations

from typing import Protocol

from bench.plan.cell import Cell, Device, Sharding, Sync

PASSES = {False: ("time", "collectives", "memory"), True: ("collectives", "memory")}
"""The passes that mean something in a virtual world, by whether tensors are fake. None compares values."""


class Candidate(Protocol):
    """What a plan asks of a backend, a class of ``bench.backends.base.Backend``."""

    name: str
    sync: Sync
    sharding: Sharding
    defect: str
    not_virtual: str
    not_fake: str

    def missing(self, device: Device) -> str: ...


def refusal(cell: Cell, backend: Candidate) -> str:
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
