"""Lightning Fabric with FSDP2: a hand-written loop over Lightning's strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from bench.backends import fsdp2
from bench.backends.base import BackendFamily
from bench.backends.lightning import (
    LightningBackend,
    device_arguments,
    process_group_backend,
    silence_logging,
)
from bench.backends.training_job import Job
from bench.plan.cell import Stepping, Sync

if TYPE_CHECKING:
    from lightning.fabric.wrappers import _FabricOptimizer
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


class FabricFSDP2Deferred(fsdp2.FSDP2Backend):
    """A Fabric loop with ``no_backward_sync``, which defers FSDP2's reduction."""

    name, framework = "fabric-fsdp2-deferred", "Fabric FSDP2"
    family, colour = BackendFamily.LIGHTNING, "#CC79A7"
    sync = Sync.DEFERRED
    stepping = Stepping.WINDOW
    requires, preload = LightningBackend.requires, LightningBackend.preload

    def train(self, job: Job) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        silence_logging()

        def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            blocks = job.blocks(model)
            fsdp2.shard(
                model, blocks, mesh["data_parallel"], bf16=job.bf16, reshard_after_forward=True
            )
            return model

        strategy = ModelParallelStrategy(
            parallelize_fn=parallelize,
            data_parallel_size=job.world_size,
            tensor_parallel_size=1,
            process_group_backend=process_group_backend(job),
        )
        self.fabric = Fabric(**device_arguments(job), strategy=strategy, precision="32-true")
        self.fabric.launch()
        self.model = self.fabric.setup_module(job.build())
        optimizer = job.optimizer(self.model.parameters())
        self.optimizer = cast("_FabricOptimizer", self.fabric.setup_optimizers(optimizer))
        self.continue_training(job)

    def continue_training(self, job: Job) -> None:
        self.optimizer.zero_grad()
        for window in job.each_window():
            for batch, last in window:
                with self.fabric.no_backward_sync(self.model, enabled=not last):
                    self.fabric.backward(job.loss(self.model, batch) / window.size)
            if job.clip_norm:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=job.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def full_parameters(self) -> Mapping[str, Tensor]:
        return fsdp2.Gathered(self.model.module)
