"""PyTorch Lightning's Trainer with its own accumulation, on DDP, FSDP2 and DeepSpeed; and Fabric with FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from bench.backends import deepspeed as ds
from bench.backends import fsdp2
from bench.backends.base import BF16_PARAMETERS, Backend, Job
from bench.cell import Sharding, Stepping, Sync

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import Strategy
    from torch import Tensor, nn


class LightningBackend(Backend):
    """``Trainer(accumulate_grad_batches=N)`` over the tapped loader. Subclasses choose the strategy.

    Logger, checkpoints, progress bar, summary and sampler replacement are off; clipping is off. Two costs are the
    Trainer's own and stay in: with several ranks it broadcasts a flag and reads it in every micro-batch, and it zeroes
    gradients after the first forward of a window, so that this forward runs beside the last window's gradients.
    """

    requires: ClassVar[tuple[str, ...]] = ("lightning",)
    loss_factor: ClassVar[str] = ""
    """``"N"`` to multiply the loss by N in ``training_step``, which undoes one division by N."""

    def train(self, job: Job) -> None:
        import logging

        from lightning.pytorch import Trainer

        # Rank-zero notices about hardware and versions would fill the logs of every trial.
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self.module = _module(self, job)
        self.trainer = Trainer(
            accelerator="gpu" if job.device.type == "cuda" else "cpu",
            devices=job.world_size,
            strategy=self.strategy(job),
            precision=self.precision(job),
            accumulate_grad_batches=job.accumulate,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        self.trainer.fit(self.module, train_dataloaders=job.loader)

    def strategy(self, job: Job) -> Strategy:
        """The Trainer's strategy."""
        raise NotImplementedError(f"{type(self).__name__}.strategy must be implemented")

    def precision(self, job: Job) -> Any:
        """The Trainer's precision: autocast over fp32 parameters for bf16, unless the strategy sees to it."""
        return "bf16-mixed" if job.bf16 else "32-true"

    def shard(self, module: LightningModule, job: Job) -> None:
        """Shard ``module.model`` in Lightning's ``configure_model``; the default leaves it whole."""

    def initial(self, module: LightningModule, job: Job) -> dict[str, Tensor]:
        """What ``begin`` needs of the model before the strategy changes it."""
        return {}

    def begin(self, module: LightningModule, initial: dict[str, Tensor]) -> None:
        """Called when the strategy is up and before the first micro-batch."""

    def gather(self, module: LightningModule) -> Mapping[str, Tensor]:
        """The full fp32 parameters of ``module.model``, called while the strategy is still up."""
        return {name: p.detach().cpu() for name, p in _model(module).named_parameters()}

    def full_parameters(self) -> Mapping[str, Tensor]:
        return self.module.parameters_at_end  # type: ignore[return-value]

    def reported(self) -> dict[str, int]:
        engine_steps: Any = self.module.engine_steps
        return {"trainer.global_step": self.trainer.global_step, **engine_steps}

    def settings(self) -> dict[str, Any]:
        return {"loss_factor": self.loss_factor or "1"}


def _model(module: LightningModule) -> nn.Module:
    """The workload's model inside the module."""
    return cast("nn.Module", module.model)


def _module(backend: LightningBackend, job: Job) -> LightningModule:
    """The LightningModule: the workload's model, the tapped loss, the tapped optimizer, and nothing else."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.build()
            self.parameters_at_end: Mapping[str, Tensor] = {}
            self.engine_steps: dict[str, int] = {}
            self._sharded = False

        def configure_model(self) -> None:
            if not self._sharded:  # Lightning may call this hook more than once
                backend.shard(self, job)
                self._sharded = True

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = job.loss(self.model, batch)
            return loss * job.accumulate if backend.loss_factor == "N" else loss

        def configure_optimizers(self) -> Any:
            return job.optimizer(self.model.parameters())

        def on_train_start(self) -> None:
            backend.begin(self, initial)
            initial.clear()  # it would be held, and counted, for the whole training

        def on_train_end(self) -> None:
            engine: Any = self.trainer.strategy.model
            if hasattr(engine, "global_steps"):
                self.engine_steps = {"engine.global_steps": engine.global_steps}
            if job.keep_parameters:
                self.parameters_at_end = backend.gather(self)

    module = Module()
    initial = backend.initial(module, job)
    return module


class LightningDDP(LightningBackend):
    """Lightning's native accumulation: it divides the loss by N and opens DDP's ``no_sync`` by itself."""

    name, framework = "lightning-ddp", "Lightning DDP"
    sync, sharding = Sync.DEFERRED, Sharding.NONE
    stepping = Stepping.FLUSH

    def strategy(self, job: Job) -> Strategy:
        from lightning.pytorch.strategies import DDPStrategy

        return DDPStrategy(process_group_backend="nccl" if job.device.type == "cuda" else "gloo")


class LightningFSDP2(LightningBackend):
    """``ModelParallelStrategy``. The Trainer defers for DDP only, so this reduces on every micro-batch."""

    name, framework = "lightning-fsdp2", "Lightning FSDP2"
    bf16_as = BF16_PARAMETERS
    sync, sharding = Sync.EAGER, Sharding.PARAMS
    stepping = Stepping.FLUSH

    def strategy(self, job: Job) -> Strategy:
        from lightning.pytorch.strategies import ModelParallelStrategy

        return ModelParallelStrategy(
            data_parallel_size=job.world_size,
            tensor_parallel_size=1,
            process_group_backend="nccl" if job.device.type == "cuda" else "gloo",
        )

    def precision(self, job: Job) -> Any:
        return "32-true"  # FSDP2's own policy computes in bf16; see fsdp2.shard

    def shard(self, module: LightningModule, job: Job) -> None:
        assert module.device_mesh is not None
        mesh = module.device_mesh["data_parallel"]
        model = _model(module)
        fsdp2.shard(model, job.blocks(model), mesh, bf16=job.bf16, reshard_after_forward=True)

    def gather(self, module: LightningModule) -> Mapping[str, Tensor]:
        return fsdp2.gather(_model(module))


class LightningDeepSpeedZero2(LightningBackend):
    """``DeepSpeedStrategy`` stage 2 with the same DeepSpeed configuration as ``deepspeed-zero2-eager``.

    The Trainer hands accumulation over (``handles_gradient_accumulation``): it calls ``engine.backward`` and
    ``engine.step`` for every micro-batch and lets the engine decide.
    """

    name, framework = "lightning-deepspeed-zero2", "Lightning DeepSpeed"
    sync, sharding = Sync.EAGER, Sharding.GRADS
    stepping = Stepping.SPLIT
    requires = ("lightning", "deepspeed")
    bf16_as = BF16_PARAMETERS
    stage: ClassVar[int] = 2
    defect = "Lightning divides the loss by N, and so does the DeepSpeed engine: every update is 1/N of the right one"

    def strategy(self, job: Job) -> Strategy:
        from lightning.pytorch.strategies import DeepSpeedStrategy

        ds.prepare()
        self.config = ds.zero_config(self.stage, job)
        strategy = DeepSpeedStrategy if job.device.type == "cuda" else _on_cpu(DeepSpeedStrategy)
        return strategy(config=dict(self.config))

    def initial(self, module: LightningModule, job: Job) -> dict[str, Tensor]:
        return ds.initial_masters(_model(module)) if job.bf16 else {}

    def begin(self, module: LightningModule, initial: dict[str, Tensor]) -> None:
        if initial:
            ds.restore_masters(_model(module), initial)

    def gather(self, module: LightningModule) -> Mapping[str, Tensor]:
        return ds.gather(_model(module))

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **self.config}


def _on_cpu(strategy: type[Any]) -> type[Any]:
    """DeepSpeedStrategy without its refusal of the CPU: only where ranks run is changed, nothing that trains."""
    import torch
    from lightning.pytorch.strategies import DDPStrategy

    class DeepSpeedStrategyOnCPU(strategy):  # type: ignore[misc]
        def setup_environment(self) -> None:
            DDPStrategy.setup_environment(self)

        def setup_distributed(self) -> None:
            # DeepSpeed wants an index on every device; all ranks share device 0.
            self.parallel_devices = [torch.device("cpu", 0)] * self.num_processes
            self.set_world_ranks()
            self._init_deepspeed_distributed()

        def _get_process_group_backend(self) -> str:
            return "gloo"

    return DeepSpeedStrategyOnCPU


class LightningDeepSpeedZero3(LightningDeepSpeedZero2):
    """``DeepSpeedStrategy`` stage 3."""

    name = "lightning-deepspeed-zero3"
    sharding = Sharding.PARAMS
    stage = 3


class LightningDeepSpeedZero2Corrected(LightningDeepSpeedZero2):
    """The same with the loss multiplied by N in ``training_step``, so that it is divided by N once."""

    name = "lightning-deepspeed-zero2-corrected"
    loss_factor = "N"
    defect = ""


class FabricFSDP2Deferred(Backend):
    """A Fabric loop with ``no_backward_sync``, which does defer FSDP2's reduction."""

    name, framework = "fabric-fsdp2-deferred", "Fabric FSDP2"
    sync, sharding = Sync.DEFERRED, Sharding.PARAMS
    stepping = Stepping.WINDOW
    requires = ("lightning",)
    bf16_as = BF16_PARAMETERS

    def train(self, job: Job) -> None:
        import logging

        from lightning.fabric import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

        def parallelize(model: Any, mesh: Any) -> Any:
            blocks = job.blocks(model)
            return fsdp2.shard(model, blocks, mesh["data_parallel"], bf16=job.bf16, reshard_after_forward=True)

        strategy = ModelParallelStrategy(
            parallelize_fn=parallelize,
            data_parallel_size=job.world_size,
            tensor_parallel_size=1,
            process_group_backend="nccl" if job.device.type == "cuda" else "gloo",
        )
        accelerator = "gpu" if job.device.type == "cuda" else "cpu"
        fabric = Fabric(accelerator=accelerator, devices=job.world_size, strategy=strategy, precision="32-true")
        fabric.launch()
        model = fabric.setup_module(job.build())
        self.model = model.module
        optimizer: Any = fabric.setup_optimizers(job.optimizer(model.parameters()))
        batches = iter(job.loader)
        for _ in range(job.windows):
            for micro_batch in range(job.accumulate):
                last = micro_batch == job.accumulate - 1
                with fabric.no_backward_sync(model, enabled=not last):
                    loss = job.loss(model, next(batches))
                    fabric.backward(loss / job.accumulate)
            optimizer.step()
            optimizer.zero_grad()

    def full_parameters(self) -> Mapping[str, Tensor]:
        return fsdp2.gather(self.model)


BACKENDS: tuple[type[Backend], ...] = (
    LightningDDP,
    LightningFSDP2,
    LightningDeepSpeedZero2,
    LightningDeepSpeedZero3,
    LightningDeepSpeedZero2Corrected,
    FabricFSDP2Deferred,
)
