"""PyTorch Lightning's Trainer with its own accumulation, on DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from bench.backends import deepspeed as ds
from bench.backends import fsdp2, plain
from bench.backends.base import BF16_PARAMETERS, Backend, Job
from bench.plan.categories import Category
from bench.plan.cell import Cell, Sharding, Stepping, Sync

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel


def places(job: Job) -> dict[str, Any]:
    """Device, ranks per node and nodes, as the environment of this rank has them, if any (``bench.launch.rank``)."""
    each = int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size))
    accelerator = "gpu" if job.device.type == "cuda" else "cpu"
    return {"accelerator": accelerator, "devices": each, "num_nodes": job.world_size // each}


def quieten() -> None:
    """Notices about hardware and versions would fill the logs of every trial. Either part uses the other's logger."""
    import logging

    for part in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(part).setLevel(logging.ERROR)


def communicator(job: Job) -> str:
    """What Lightning is to call the library that ranks talk over; the process group is there already."""
    return "nccl" if job.device.type == "cuda" and not job.cell.world.shares_gpus else "gloo"


class LightningBackend(Backend):
    """``Trainer(accumulate_grad_batches=N)`` over the tapped loader. Subclasses choose the strategy.

    Logger, checkpoints, progress bar and summary are off; so are sampler replacement, and clipping unless the job asks
    for it. Two costs are the Trainer's own and stay in: with several ranks it broadcasts a flag and reads it in every
    micro-batch, and it zeroes gradients after the first forward of a window, so that this forward runs beside the last
    window's gradients.
    """

    requires: ClassVar[tuple[str, ...]] = ("lightning",)
    loss_factor: ClassVar[str] = ""
    """``"N"`` to multiply the loss by N in ``training_step``, which undoes one division by N."""

    def train(self, job: Job) -> None:
        from lightning.pytorch import Trainer

        quieten()
        self.counters: dict[str, int] = {}
        self.parameters_at_end: Mapping[str, Tensor] = {}
        self.module = _module(self, job)
        self.trainer = Trainer(**self.trainer_arguments(job))
        self.again(job)

    def trainer_arguments(self, job: Job) -> dict[str, Any]:
        """All that the Trainer is told."""
        return {
            **places(job),
            "strategy": self.strategy(job),
            "precision": self.precision(job),
            "accumulate_grad_batches": job.accumulate,
            "gradient_clip_val": job.clip_norm or None,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
        }

    def again(self, job: Job, **arguments: Any) -> None:
        self.trainer.fit(self.module, train_dataloaders=job.loader, **arguments)

    def zero_grad(self) -> None:
        self.trainer.optimizers[0].zero_grad()

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
        return self.parameters_at_end or self.gather(self.module)

    def reported(self) -> dict[str, int]:
        return {"trainer.global_step": self.trainer.global_step, **self.counters}

    def settings(self) -> dict[str, Any]:
        return {"loss_factor": self.loss_factor or "1"}


def count_engine_steps(trainer: Trainer, counters: dict[str, int]) -> None:
    """Note the DeepSpeed engine's own counter, if the strategy has an engine."""
    engine: Any = trainer.strategy.model
    if hasattr(engine, "global_steps"):
        counters["engine.global_steps"] = engine.global_steps


def _model(module: LightningModule) -> nn.Module:
    """The workload's model inside the module."""
    return cast("nn.Module", module.model)


def _module(backend: LightningBackend, job: Job) -> LightningModule:
    """The LightningModule: the workload's model, the tapped loss, the tapped optimizer, and nothing else."""
    from lightning.pytorch import LightningModule

    backend = weakref.proxy(backend)  # it holds the module: both would wait for the release of an engine

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.build()
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
            count_engine_steps(self.trainer, backend.counters)
            if job.keep_parameters:
                backend.parameters_at_end = dict(backend.gather(self))

    module = Module()
    initial = backend.initial(module, job)
    return module


class LightningDDP(LightningBackend):
    """Lightning's native accumulation: it divides the loss by N and opens DDP's ``no_sync`` by itself.

    On CUDA it builds DDP in a stream of its own (strategies/ddp.py: ``_setup_model``), where torch then accumulates
    gradients that were made in another, and warns of it: the streams wait for each other, the host does not.
    """

    name, framework = "lightning-ddp", "Lightning DDP"
    not_fake = plain.NO_FAKE_DDP
    sync, sharding = Sync.DEFERRED, Sharding.NONE
    stepping = Stepping.FLUSH

    def strategy(self, job: Job) -> Strategy:
        from lightning.pytorch.strategies import DDPStrategy

        return DDPStrategy(process_group_backend=communicator(job))

    def begin(self, module: LightningModule, initial: dict[str, Tensor]) -> None:
        plain.without_statistics(cast("DistributedDataParallel", self.trainer.strategy.model))

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **plain.DDP_SETTINGS}


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
            save_distributed_checkpoint=False,
            process_group_backend=communicator(job),
        )

    def precision(self, job: Job) -> Any:
        return "32-true"  # FSDP2's own policy computes in bf16; see fsdp2.shard

    def shard(self, module: LightningModule, job: Job) -> None:
        assert module.device_mesh is not None
        mesh = module.device_mesh["data_parallel"]
        model = _model(module)
        fsdp2.shard(model, job.blocks(model), mesh, bf16=job.bf16, reshard_after_forward=True)

    def gather(self, module: LightningModule) -> Mapping[str, Tensor]:
        return fsdp2.Gathered(_model(module))

    def holdings(self) -> Mapping[Category, Iterable[Tensor]]:
        return fsdp2.holdings(_model(self.module))


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

    @classmethod
    def remark(cls, cell: Cell) -> str:
        return ds.remark(cls.stage, cell)

    def strategy(self, job: Job) -> Strategy:
        from lightning.pytorch.strategies import DeepSpeedStrategy

        ds.prepare()
        self.config = ds.zero_config(self.stage, job)
        strategy = DeepSpeedStrategy if job.device.type == "cuda" else _on_cpu(DeepSpeedStrategy)
        return strategy(config=dict(self.config))

    def again(self, job: Job, **arguments: Any) -> None:
        with ds.unprinted():
            super().again(job, **arguments)

    def __del__(self) -> None:
        if hasattr(self, "trainer"):
            ds.release(self.trainer.strategy.model)

    def initial(self, module: LightningModule, job: Job) -> dict[str, Tensor]:
        return ds.initial_masters(_model(module)) if job.bf16 else {}

    def begin(self, module: LightningModule, initial: dict[str, Tensor]) -> None:
        if initial:
            ds.restore_masters(_model(module), initial)

    def gather(self, module: LightningModule) -> Mapping[str, Tensor]:
        return ds.gather(_model(module))

    def holdings(self) -> Mapping[Category, Iterable[Tensor]]:
        return ds.holdings(self.trainer.strategy.model)

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
    not_compiled = ds.NO_COMPILED_STAGE3
    sharding = Sharding.PARAMS
    stage = 3


class LightningDeepSpeedZero2Corrected(LightningDeepSpeedZero2):
    """The same with the loss multiplied by N in ``training_step``, so that it is divided by N once."""

    name = "lightning-deepspeed-zero2-corrected"
    loss_factor = "N"
    defect = ""


BACKENDS: tuple[type[Backend], ...] = (
    LightningDDP,
    LightningFSDP2,
    LightningDeepSpeedZero2,
    LightningDeepSpeedZero3,
    LightningDeepSpeedZero2Corrected,
)
