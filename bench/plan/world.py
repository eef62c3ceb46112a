"""Worlds: what the ranks of a cell are, and therefore what can be timed and which values are valid."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from bench.plan.cell import Device, Sharding, Sync


class World(StrEnum):
    """What the ranks of a cell are. Query its capabilities, not its identity."""

    REAL = "real ranks"
    """W processes, each on its own GPU, or on the CPU."""
    SHARED_GPU = "shared GPU"
    """W processes that share GPUs, over NCCL or gloo. Everything but time is as in a real world."""
    VIRTUAL = "virtual world"
    """One process: rank 0 of W. Shards, buckets, calls and bytes are those of rank 0 of a real world. Values are
    meaningless, and a step takes the time it would take if communication were free."""
    FAKE = "fake tensors"
    """A virtual world on tensors that have shapes, dtypes and sized storages, but no memory."""

    @classmethod
    def of(cls, *, virtual: bool, fake_tensors: bool, shared_gpu: bool) -> World:
        """The world for the stored fields of a cell."""
        if fake_tensors:
            return cls.FAKE
        return cls.VIRTUAL if virtual else cls.SHARED_GPU if shared_gpu else cls.REAL

    @property
    def has_all_ranks(self) -> bool:
        return self in (World.REAL, World.SHARED_GPU)

    has_values = has_all_ranks
    """Whether losses and updates are valid, and are compared with the reference's."""

    @property
    def computes(self) -> bool:
        """Whether tensors have memory and operators compute values."""
        return self is not World.FAKE

    @property
    def shares_gpus(self) -> bool:
        return self is World.SHARED_GPU

    @property
    def is_timed(self) -> bool:
        return self in (World.REAL, World.VIRTUAL)

    @property
    def times_communication(self) -> bool:
        """Whether step times include real communication, so that rates are valid."""
        return self is World.REAL

    @property
    def label(self) -> str:
        return "" if self is World.REAL else "virtual" if not self.has_all_ranks else "shared GPU"

    @property
    def caveat(self) -> str:
        return {
            World.REAL: "",
            World.SHARED_GPU: "its ranks shared a GPU: nothing was timed",
            World.VIRTUAL: "a virtual world: nothing is sent, and the time is that of computing alone",
            World.FAKE: "a virtual world of tensors without values: nothing was timed",
        }[self]

    def refusal(self, backend: Candidate) -> str:
        """Why the backend cannot run in this world, in one line; empty if it can."""
        if not self.has_all_ranks and backend.not_virtual:
            return f"{backend.name} cannot be in a virtual world: {backend.not_virtual}"
        if not self.computes and backend.not_fake:
            return f"{backend.name} cannot run on fake tensors: {backend.not_fake}"
        return ""


class Candidate(Protocol):
    """The attributes of a backend (``bench.backends.base.Backend``) that planning needs."""

    name: str
    sync: Sync
    sharding: Sharding
    replicate: int
    defect: str
    not_virtual: str
    not_fake: str

    def missing(self, device: Device) -> str: ...
