"""Worlds: what the ranks of a cell are, and so what can be timed and what has values."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from bench.plan.cell import Device, Sharding, Sync


class World(StrEnum):
    """What the ranks of a cell are. Ask a world what it has, not which it is."""

    REAL = "real ranks"
    """W processes, on GPUs of their own or on the CPU."""
    SHARED_GPU = "shared GPU"
    """W processes that share GPUs and talk over gloo. All is as in a real world but time."""
    VIRTUAL = "virtual world"
    """One process, rank 0 of W; no other exists. Shards, buckets, calls and bytes are those of rank 0 of a real world.
    Values mean nothing, and a step takes as long as it would if communication took no time."""
    FAKE = "fake tensors"
    """The same on tensors that have shapes, dtypes and storages of a size, but no memory."""

    @classmethod
    def of(cls, *, virtual: bool, fake_tensors: bool, shared_gpu: bool) -> World:
        """The world that the stored fields of a cell stand for."""
        if fake_tensors:
            return cls.FAKE
        return cls.VIRTUAL if virtual else cls.SHARED_GPU if shared_gpu else cls.REAL

    @property
    def has_all_ranks(self) -> bool:
        """Whether all W ranks exist."""
        return self in (World.REAL, World.SHARED_GPU)

    has_values = has_all_ranks
    """Whether losses and updates mean something, and are compared with those of a reference."""

    @property
    def computes(self) -> bool:
        """Whether tensors have memory, and operators do more than work out a shape."""
        return self is not World.FAKE

    @property
    def shares_gpus(self) -> bool:
        """Whether several ranks may have one GPU."""
        return self is World.SHARED_GPU

    @property
    def is_timed(self) -> bool:
        """Whether the time of a step is kept."""
        return self in (World.REAL, World.VIRTUAL)

    @property
    def times_communication(self) -> bool:
        """Whether that time includes communication as training has it, so that there are rates."""
        return self is World.REAL

    @property
    def word(self) -> str:
        """What a label calls it; empty for the usual one."""
        return "" if self is World.REAL else "virtual" if not self.has_all_ranks else "shared GPU"

    @property
    def caveat(self) -> str:
        """What has to be said beside its numbers; empty if nothing has."""
        return {
            World.REAL: "",
            World.SHARED_GPU: "its ranks shared a GPU, over gloo: nothing was timed",
            World.VIRTUAL: "a virtual world: nothing is sent, and the time is that of computing alone",
            World.FAKE: "a virtual world of tensors without values: nothing was timed",
        }[self]

    def refusal(self, backend: Candidate) -> str:
        """Why the backend cannot be in such a world, in one line; empty if it can."""
        if not self.has_all_ranks and backend.not_virtual:
            return f"{backend.name} cannot be in a virtual world: {backend.not_virtual}"
        if not self.computes and backend.not_fake:
            return f"{backend.name} cannot run on fake tensors: {backend.not_fake}"
        return ""


class Candidate(Protocol):
    """What a plan asks of a backend, a class of ``bench.backends.base.Backend``."""

    name: str
    sync: Sync
    sharding: Sharding
    defect: str
    not_virtual: str
    not_fake: str

    def missing(self, device: Device) -> str: ...
