"""Worlds: what the ranks of a cell are, and so what can be timed and which values are valid."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from bench.plan.cell import Device, Sharding, Sync


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusals:
    """Why a backend cannot do something that a cell may ask for; empty for what it can."""

    virtual: str = ""
    """Run as rank 0 of a virtual world (``bench.launch.rank``)."""
    fake: str = ""
    """Run on fake tensors (``bench.measure.tensors``)."""
    checkpointed: str = ""
    """Have its blocks checkpointed (``bench.backends.blocks``)."""
    compiled: str = ""
    """Have its blocks compiled."""
    bf16: str = ""
    """Train in bf16."""


class World(StrEnum):
    """What the ranks of a cell are. Query its capabilities, not its identity."""

    REAL = "real ranks"
    """W processes, each on its own GPU, or on the CPU."""
    SHARED_GPU = "shared GPU"
    """W processes that share GPUs, over NCCL or gloo. Everything but time is as in a real world."""
    VIRTUAL = "virtual world"
    """One process: rank 0 of W. Shards, buckets, calls and bytes are those of rank 0 of a real
    world. Values are meaningless, and a step takes the time it would take if communication were
    free."""
    FAKE = "fake tensors"
    """A virtual world on tensors that have shapes, dtypes and sized storages, but no memory."""

    @classmethod
    def of(cls, *, virtual: bool, fake_tensors: bool, shared_gpu: bool) -> World:
        """The world for the stored fields of a cell."""
        if fake_tensors:
            return cls.FAKE
        if virtual:
            return cls.VIRTUAL
        if shared_gpu:
            return cls.SHARED_GPU
        return cls.REAL

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
        return {World.REAL: "", World.SHARED_GPU: "shared GPU"}.get(self, "virtual")

    @property
    def caveat(self) -> str:
        return {
            World.REAL: "",
            World.SHARED_GPU: "its ranks shared a GPU: nothing was timed",
            World.VIRTUAL: (
                "a virtual world: nothing is sent, and the time is that of computing alone"
            ),
            World.FAKE: "a virtual world of tensors without values: nothing was timed",
        }[self]

    def refusal(self, backend: Candidate) -> str:
        """Why the backend cannot run in this world, in one line; empty if it can."""
        if not self.has_all_ranks and backend.refuses.virtual:
            return f"{backend.name} cannot be in a virtual world: {backend.refuses.virtual}"
        if not self.computes and backend.refuses.fake:
            return f"{backend.name} cannot run on fake tensors: {backend.refuses.fake}"
        return ""


class Candidate(Protocol):
    """The attributes of a backend (``bench.backends.base.Backend``) that planning needs."""

    name: str
    sync: Sync
    sharding: Sharding
    replicate: int
    defect: str
    refuses: Refusals

    def missing(self, device: Device) -> str: ...
