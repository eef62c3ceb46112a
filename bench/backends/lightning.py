"""PyTorch Lightning's Trainer with its own accumulation, on DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from bench.backends import deepspeed as ds
from bench.backends import fsdp2, plain
from bench.backends.base import Backend, BackendFamily, Call, known
from bench.backends.training_job import Job, MicroBatches, ending
from bench.backends.zero_options import zero_config
from bench.plan.categories import Category
from bench.plan.cell import Cell, Stepping, Sync

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import Strategy
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer


def device_arguments(job: Job) -> dict[str, Any]:
    """Accelerator, ranks per node and number of nodes, from the rank's environment.

    ``bench.launch.rank`` sets that.
    """
    each = int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size))
    accelerator = "cpu"
    if job.device.type == "cuda":
        accelerator = "gpu"
    return {"accelerator": accelerator, "devices": each, "num_nodes": job.world_size // each}


def silence_logging() -> None:
    """Silence Lightning's notices about hardware and versions, which would fill logs of trials."""
    import logging

    for part in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(part).setLevel(logging.ERROR)


def process_group_backend(job: Job) -> str:
    """The backend of the existing process group, in Lightning's terms."""
    if job.cell.uses_nccl:
        return "nccl"
    return "gloo"


OFF = dict.fromkeys(
    (
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
        "use_distributed_sampler",
    ),
    False,
)
"""Arguments of the Trainer that switch off what does not train."""


MOST_STATE = 2 * 10**8
"""Parameters of a model whose optimizer state is kept: some 2 GB on the CPU of every rank, since
the strategy is torn down when the Trainer returns."""


class LightningBackend(Backend):
    """``Trainer(accumulate_grad_batches=N)`` over the tapped loader.

    Subclasses choose the strategy. Logger, checkpoints, progress bar, summary and sampler
    replacement are off, and clipping too unless the job asks for it. Two costs of the Trainer
    remain: with several ranks it broadcasts and reads a flag in every micro-batch, and it zeroes
    gradients only after the first forward of a window, so that this forward runs with the last
    window's gradients in memory.
    """

    family = BackendFamily.LIGHTNING
    requires: ClassVar[tuple[str, ...]] = ("lightning",)
    preload: ClassVar[tuple[str, ...]] = ("lightning.pytorch", "lightning.fabric")
    loss_factor: ClassVar[str] = "1"
    """``"N"`` multiplies the loss by N in ``training_step``, which undoes one division by N."""

    def train(self, job: Job) -> None:
        from lightning.pytorch import Trainer

        silence_logging()
        self.counters: dict[str, int] = {}
        self.parameters_at_end: Mapping[str, Tensor] = {}
        self.state_at_end: Mapping[str, Mapping[str, Tensor]] = {}
        self.module = _module(self, job)
        self.trainer = Trainer(**known(Trainer, self.trainer_arguments(job)))
        self.continue_training(job)

    def trainer_arguments(self, job: Job) -> dict[str, Any]:
        clip_norm = None
        if job.clip_norm > 0:
            clip_norm = job.clip_norm
        return {
            **device_arguments(job),
            "strategy": self.strategy(job),
            "precision": self.precision(job),
            "accumulate_grad_batches": job.accumulate,
            "gradient_clip_val": clip_norm,
            "max_epochs": 1,
            **OFF,
        }

    def continue_training(self, job: Job, **arguments: Any) -> None:
        self.trainer.fit(self.module, train_dataloaders=self.batches(job), **arguments)

    def batches(self, job: Job) -> Iterable[Tensor]:
        """The loader that the Trainer gets."""
        return _Loader(job.loader)

    def zero_grad(self) -> None:
        self.trainer.optimizers[0].zero_grad()

    def strategy(self, job: Job) -> Strategy:
        raise NotImplementedError(f"{type(self).__name__}.strategy must be implemented")

    def precision(self, job: Job) -> str:
        """The Trainer's precision: for bf16, autocast over fp32 parameters unless overridden."""
        if job.bf16:
            return "bf16-mixed"
        return "32-true"

    def configure(self, module: LightningModule, job: Job) -> None:
        """Called in ``configure_model``, before the strategy changes ``module.model``."""

    def begin(self, module: LightningModule) -> None:
        """Called when the strategy is set up, before the first micro-batch."""

    def gather(self, module: LightningModule) -> Mapping[str, Tensor]:
        """The full fp32 parameters of ``module.model``, called while the strategy is set up."""
        return {name: p.detach().cpu() for name, p in _model(module).named_parameters()}

    def keep(self, module: LightningModule, job: Job) -> None:
        """Gather what is asked for after the strategy has been torn down."""
        self.parameters_at_end = dict(self.gather(module))
        if job.num_parameters <= MOST_STATE:
            state = self.gather_state(module)
            self.state_at_end = {key: dict(tensors) for key, tensors in state.items()}

    def full_parameters(self) -> Mapping[str, Tensor]:
        if not self.parameters_at_end:
            return self.gather(self.module)
        return self.parameters_at_end

    def gather_state(self, module: LightningModule) -> Mapping[str, Mapping[str, Tensor]]:
        """The full optimizer state, if ``optimizer_state`` has one.

        Called while the strategy is set up.
        """
        return {}

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self.state_at_end

    @classmethod
    def extra_collectives(cls, cell: Cell) -> list[Call]:
        """The SIGTERM flag, which the Trainer broadcasts in every micro-batch.

        lightning/pytorch/loops/training_epoch_loop.py:_broadcast_sigterm_tensor.
        """
        if cell.world_size > 1:
            return [("broadcast", "int64", 1, cell.accumulate)]
        return []

    def reported(self) -> dict[str, int]:
        return {"trainer.global_step": self.trainer.global_step, **self.counters}

    def settings(self) -> dict[str, object]:
        return super().settings() | OFF | {"loss_factor": self.loss_factor}


class _Loader:
    """A loader that ends where the pass does, so that the Trainer ends its training itself."""

    def __init__(self, loader: MicroBatches) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Tensor]:
        return ending(self._loader)


def _model(module: LightningModule) -> nn.Module:
    return cast("nn.Module", module.model)


def _module(backend: LightningBackend, job: Job) -> LightningModule:
    """The LightningModule: only the workload's model, the tapped loss and the tapped optimizer."""
    from lightning.pytorch import LightningModule

    backend = weakref.proxy(backend)  # avoids a reference cycle, which would keep the engine alive

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.build()
            self._is_configured = False

        def configure_model(self) -> None:
            if not self._is_configured:  # Lightning may call this hook more than once
                backend.configure(self, job)
                self._is_configured = True

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = job.loss(self.model, batch)
            if backend.loss_factor == "N":
                return loss * job.accumulate
            return loss

        def configure_optimizers(self) -> Optimizer:
            return job.optimizer(self.model.parameters())

        def on_train_start(self) -> None:
            backend.begin(self)

        def on_train_end(self) -> None:
            if job.keep_parameters:
                backend.keep(self, job)

    return Module()


class LightningDDP(LightningBackend, plain.DDPBackend):
    """Lightning's native accumulation.

    It divides the loss by N and enters DDP's ``no_sync`` by itself. On CUDA it builds DDP in a
    separate stream (strategies/ddp.py: ``_setup_model``). torch then warns that it accumulates
    gradients across streams; the streams wait for each other, the host does not.
    """

    name, framework = "lightning-ddp", "Lightning DDP"
    colour = "#56B4E9"
    sync = Sync.DEFERRED
    stepping = Stepping.FLUSH

    def strategy(self, job: Job) -> Strategy:
        from lightning.pytorch.strategies import DDPStrategy

        return DDPStrategy(
            process_group_backend=process_group_backend(job),
            gradient_as_bucket_view=self.bucket_views,
        )

    def begin(self, module: LightningModule) -> None:
        plain.disable_runtime_statistics(
            cast("DistributedDataParallel", self.trainer.strategy.model)
        )


class LightningFSDP2(LightningBackend, fsdp2.FSDP2Backend):
    """``ModelParallelStrategy``, which reduces in every micro-batch.

    The Trainer defers the reduction only for DDP.
    """

    name, framework = "lightning-fsdp2", "Lightning FSDP2"
    colour = "#E69F00"
    sync = Sync.EAGER
    stepping = Stepping.FLUSH

    def strategy(self, job: Job) -> Strategy:
        from lightning.pytorch.strategies import ModelParallelStrategy

        return ModelParallelStrategy(
            data_parallel_size=job.world_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend(job),
        )

    def precision(self, job: Job) -> str:
        return "32-true"  # FSDP2's own policy computes in bf16; see fsdp2.shard

    def configure(self, module: LightningModule, job: Job) -> None:
        assert module.device_mesh is not None
        mesh = module.device_mesh["data_parallel"]
        model = _model(module)
        fsdp2.shard(model, job.blocks(model), mesh, bf16=job.bf16, reshard_after_forward=True)

    def gather(self, module: LightningModule) -> Mapping[str, Tensor]:
        return fsdp2.Gathered(_model(module))

    def holdings(self) -> Mapping[Category, Iterable[Tensor]]:
        return fsdp2.holdings(_model(self.module))


class LightningDeepSpeedZero2(ds.ZeroBackend, LightningBackend):
    """``DeepSpeedStrategy`` stage 2 with the DeepSpeed configuration of ``deepspeed-zero2-eager``.

    The Trainer delegates accumulation (``handles_gradient_accumulation``): it calls
    ``engine.backward`` and ``engine.step`` for every micro-batch, and the engine decides when to
    step.
    """

    name, framework = "lightning-deepspeed-zero2", "Lightning DeepSpeed"
    colour = "#882255"
    sync = Sync.EAGER
    stepping = Stepping.SPLIT
    requires = ("lightning", "deepspeed")
    preload = (*LightningBackend.preload, *ds.PRELOAD)
    defect = (
        "Lightning divides the loss by N, and so does the DeepSpeed engine: every gradient is N "
        "times too small"
    )

    def wrapped(self) -> DeepSpeedEngine:
        return self.trainer.strategy.model

    def strategy(self, job: Job) -> Strategy:
        from lightning.pytorch.strategies import DeepSpeedStrategy

        ds.prepare()
        self.config = zero_config(type(self), job, _model(self.module))
        strategy = DeepSpeedStrategy
        if job.device.type != "cuda":
            strategy = on_cpu(DeepSpeedStrategy)
        return strategy(config=dict(self.config))

    def continue_training(self, job: Job, **arguments: Any) -> None:
        with ds.short_parameter_repr():
            super().continue_training(job, **arguments)

    def configure(self, module: LightningModule, job: Job) -> None:
        self.save_masters(_model(module), job)

    def begin(self, module: LightningModule) -> None:
        self.restore_masters(_model(module))

    def gather(self, module: LightningModule) -> Mapping[str, Tensor]:
        return ds.gather(_model(module))

    def gather_state(self, module: LightningModule) -> Mapping[str, Mapping[str, Tensor]]:
        return ds.gathered_state(self.wrapped(), _model(module))


def on_cpu(strategy: type[Any]) -> type[Any]:
    """DeepSpeedStrategy without its check for CUDA.

    Only the placement of ranks changes, not the training.
    """
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


class LightningDeepSpeedZero3(ds.ZeroStage3, LightningDeepSpeedZero2):
    """``DeepSpeedStrategy`` stage 3."""

    name = "lightning-deepspeed-zero3"


class LightningDeepSpeedZero2Corrected(LightningDeepSpeedZero2):
    """Stage 2 with the loss multiplied by N in ``training_step``, so that it is divided once."""

    name = "lightning-deepspeed-zero2-corrected"
    loss_factor = "N"
    defect = ""


class LightningDeepSpeedZero3Corrected(ds.ZeroStage3, LightningDeepSpeedZero2Corrected):
    """Stage 3, corrected in the same way."""

    name = "lightning-deepspeed-zero3-corrected"
