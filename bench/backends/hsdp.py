"""HSDP: ``fully_shard`` over a 2-D mesh of R replicas, each sharded over W / R consecutive ranks.

A backward gathers and reduce-scatters within a shard group, then all-reduces the shards of
gradients across the replicas. With accumulation, either or both can wait for the last micro-batch
of the window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.backends.fsdp2 import FSDP2Eager
from bench.backends.training_job import Job
from bench.errors import UnsupportedError
from bench.plan.cell import RankGroup, Sync

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class HSDPEager(FSDP2Eager):
    """Every backward reduce-scatters gradients and all-reduces their shards."""

    name, framework = "hsdp-eager", "HSDP"
    colour = "#661100"
    replicate = 2

    def mesh(self, job: Job) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        replicas = job.cell.replicate
        self.shape = (replicas, job.world_size // replicas)
        if job.world_size % replicas:
            raise UnsupportedError(f"{replicas} replicas do not divide {job.world_size} ranks")
        return init_device_mesh(
            job.device.type, self.shape, mesh_dim_names=(RankGroup.REPLICATE, RankGroup.SHARD)
        )

    def settings(self) -> dict[str, object]:
        return super().settings() | {"mesh": list(self.shape)}


class HSDPDeferredAllReduce(HSDPEager):
    """``set_requires_all_reduce``: shards of gradients are summed locally.

    They are all-reduced once per window.
    """

    name = "hsdp-deferred-all-reduce"
    sync = Sync.DEFERRED_ALL_REDUCE


class HSDPDeferred(HSDPEager):
    """``set_requires_gradient_sync``: unsharded gradients are summed locally.

    All is reduced once per window.
    """

    name = "hsdp-deferred"
    sync = Sync.DEFERRED
