"""Hugging Face's Trainer with its own accumulation, on DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from bench.backends import deepspeed as ds
from bench.backends import fsdp2, plain
from bench.backends.accelerate import DDP, DEEPSPEED, FSDP2, AccelerateFSDP2, check, set_up_state
from bench.backends.base import Backend, BackendFamily, Call, known
from bench.backends.training_job import Job, MicroBatches
from bench.backends.zero_options import zero_config
from bench.errors import UnsupportedError
from bench.plan.categories import Category
from bench.plan.cell import Cell, Stepping, Sync

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class HuggingFaceTrainer(Backend):
    """``Trainer.train()`` with ``gradient_accumulation_steps`` = N.

    Subclasses choose what wraps the model. The Trainer fetches a whole window before its first
    forward, counts the window's labels on all ranks, and hands the number to the model
    (``num_items_in_batch``). This model divides by it, as those of transformers do. The losses of a
    model that does not take the number are divided by the window's size. The norm of the gradient
    is computed in every window, clipped or not.

    Logs, checkpoints and progress bar are off. So are two defaults: ``logging_nan_inf_filter``,
    which makes the host wait for the device in every micro-batch, and DDP's search for unused
    parameters, which the Trainer turns on for models that are not a ``PreTrainedModel``.
    """

    family = BackendFamily.HUGGING_FACE
    requires: ClassVar[tuple[str, ...]] = ("transformers", "accelerate")
    preload: ClassVar[tuple[str, ...]] = AccelerateFSDP2.preload
    stepping = Stepping.OVERRIDE
    wrapper: ClassVar[str]
    """The class that Accelerate is to wrap the model in, as ``bench.backends.accelerate`` names
    it."""
    counts_labels = True
    """Whether the model takes ``num_items_in_batch``."""
    resumes = False
    """Whether ``Trainer.train`` goes on from the last checkpoint in ``output_dir``."""

    def train(self, job: Job) -> None:
        import logging

        # Accelerate warns of DeepSpeed's N, which is the Trainer's.
        logging.getLogger("accelerate").setLevel(logging.ERROR)
        set_up_state(job, self.wrapper)
        self.module = _model(self, job)
        self.inner: nn.Module = self.module.model
        self.trainer = _trainer(self, job)
        self.continue_training(job)

    def arguments(self, job: Job) -> dict[str, Any]:
        return {
            "output_dir": tempfile.gettempdir(),
            "accelerator_config": {"use_configured_state": True},
            "use_cpu": job.device.type == "cpu",
            "bf16": job.bf16,
            "per_device_train_batch_size": job.cell.micro_batch_size,
            "gradient_accumulation_steps": job.accumulate,
            "num_train_epochs": 1,
            "max_grad_norm": job.clip_norm,
            "average_tokens_across_devices": True,
            "ddp_find_unused_parameters": False,
            "logging_nan_inf_filter": False,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "log_level": "error",
        }

    def adjust(self, arguments: Any, job: Job) -> None:
        """Set what the constructor of ``TrainingArguments`` does not take."""

    def batches(self, job: Job) -> Any:
        """The loader of ``Trainer.get_train_dataloader``."""
        return _Labeled(job.loader, self.labels)

    def labels(self, batch: Tensor) -> Tensor:
        """The labels of a micro-batch; the Trainer counts those that are not -100."""
        return batch

    def scheduler(self, optimizer: Optimizer, job: Job) -> LRScheduler:
        """The scheduler that the Trainer steps after every update."""
        from transformers import get_constant_schedule

        made: LRScheduler = get_constant_schedule(optimizer)
        return made

    def begin(self, job: Job) -> None:
        """Called when the model is wrapped, before the first micro-batch."""
        check(self.trainer.accelerator, self.trainer.model_wrapped, self.wrapper, job)

    def continue_training(self, job: Job) -> None:
        self.trainer.train(resume_from_checkpoint=self.resumes)

    def zero_grad(self) -> None:
        self.trainer.model_wrapped.zero_grad()

    def full_parameters(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for name, p in self.inner.named_parameters()}

    @classmethod
    def extra_collectives(cls, cell: Cell) -> list[Call]:
        """The number of the window's labels on each rank (``_get_num_items_in_batch``)."""
        if cell.world_size > 1:
            return [("all_gather", "int64", cell.world_size, 1)]
        return []

    def reported(self) -> dict[str, int]:
        return {"state.global_step": self.trainer.state.global_step}

    def settings(self) -> dict[str, object]:
        arguments = self.trainer.args
        return super().settings() | {
            "average_tokens_across_devices": arguments.average_tokens_across_devices,
            "logging_nan_inf_filter": arguments.logging_nan_inf_filter,
            "max_grad_norm": arguments.max_grad_norm,
            "logging_strategy": str(arguments.logging_strategy),
            "save_strategy": str(arguments.save_strategy),
            "disable_tqdm": str(arguments.disable_tqdm),
            "num_items_in_batch": self.counts_labels,
            "wrapper": type(self.trainer.model_wrapped).__name__,
        }


class _Labeled:
    """A loader of micro-batches with their labels, as the Trainer wants them."""

    def __init__(self, loader: MicroBatches, labels: Callable[[Tensor], Tensor]) -> None:
        self._loader, self._labels = loader, labels

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self._loader:
            yield {"batch": batch, "labels": self._labels(batch)}


def _model(backend: HuggingFaceTrainer, job: Job) -> Any:
    """The workload's model and the tapped loss, with the signature of a model of transformers."""
    from torch import nn

    class Model(nn.Module):
        accepts_loss_kwargs = backend.counts_labels

        def __init__(self) -> None:
            super().__init__()
            self.model = job.build()

        def forward(
            self, batch: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None
        ) -> dict[str, Tensor]:
            loss = job.loss(self.model, batch)
            if num_items_in_batch is not None:
                loss = loss * labels.numel() / num_items_in_batch
            return {"loss": loss}

    return Model()


def _trainer(backend: HuggingFaceTrainer, job: Job) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    backend = weakref.proxy(backend)  # avoids a reference cycle, which would keep an engine alive

    class Begin(TrainerCallback):
        def on_train_begin(self, *args: object, **kwargs: object) -> None:
            backend.begin(job)

    class TappedTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return backend.batches(job)

        def create_optimizer(self, model: object = None) -> Optimizer:
            if self.optimizer is None:
                self.optimizer = job.optimizer(backend.module.parameters())
            return self.optimizer

        def create_scheduler(self, *args: object, **kwargs: object) -> Any:
            if self.lr_scheduler is None:
                assert self.optimizer is not None, "it is made first"
                made: Any = backend.scheduler(self.optimizer, job)  # transformers asks for LambdaLR
                self.lr_scheduler = made
            scheduler: Any = self.lr_scheduler
            return scheduler

    arguments = TrainingArguments(**known(TrainingArguments, backend.arguments(job)))
    backend.adjust(arguments, job)
    trainer = TappedTrainer(model=backend.module, args=arguments, callbacks=[Begin()])
    trainer.remove_callback(PrinterCallback)
    return trainer


class HuggingFaceDDP(HuggingFaceTrainer, plain.DDPBackend):
    """``accelerator.no_sync`` defers the reduction, but on one rank, where it does nothing."""

    name, framework = "hf-trainer-ddp", "HF Trainer DDP"
    colour = "#44AA99"
    sync = Sync.DEFERRED
    eager_on_one_rank = True
    bucket_views = False  # TrainingArguments has no such option
    wrapper = DDP

    def begin(self, job: Job) -> None:
        super().begin(job)
        plain.disable_runtime_statistics(self.trainer.model_wrapped)

    def settings(self) -> dict[str, object]:
        return super().settings() | {"ddp_find_unused_parameters": False}


class HuggingFaceFSDP2(HuggingFaceTrainer, fsdp2.FSDP2Backend):
    """``fsdp=True``: each block is a unit, and ``accelerator.no_sync`` defers the reduction.

    By default Accelerate's policy for bf16 would sum and reduce gradients in bf16, so it is
    replaced: in fp32, as under ``fsdp2-deferred``. With a ``PreTrainedModel``, embedding and head
    would be units too.
    """

    name, framework = "hf-trainer-fsdp2", "HF Trainer FSDP2"
    colour = "#888888"
    refuses = AccelerateFSDP2.refuses
    always_computes_norm = True
    sync = Sync.DEFERRED
    wrapper = FSDP2

    def arguments(self, job: Job) -> dict[str, Any]:
        blocks = sorted({type(block).__name__ for block in job.blocks(self.inner)})
        sharded = {
            "version": 2,
            "transformer_layer_cls_to_wrap": blocks,
            "reshard_after_forward": True,
        }
        return super().arguments(job) | {"fsdp": True, "fsdp_config": sharded}

    def adjust(self, arguments: Any, job: Job) -> None:
        if job.bf16:
            arguments.fsdp_plugin_args["mixed_precision_policy"] = fsdp2.mixed_precision(bf16=True)

    def begin(self, job: Job) -> None:
        from torch.distributed.fsdp import FSDPModule

        super().begin(job)
        units = {module for module in self.inner.modules() if isinstance(module, FSDPModule)}
        if units != set(job.blocks(self.inner)):
            raise UnsupportedError(
                f"Accelerate shards by class: {len(units)} modules, which are not the model's "
                "blocks"
            )

    def full_parameters(self) -> Mapping[str, Tensor]:
        return fsdp2.Gathered(self.inner)

    def holdings(self) -> Mapping[Category, Iterable[Tensor]]:
        return fsdp2.holdings(self.module)


class HuggingFaceDeepSpeedZero2(ds.ZeroBackend, HuggingFaceTrainer):
    """DeepSpeed stage 2 with the configuration of ``deepspeed-zero2-eager``.

    The Trainer divides the loss and tells the engine where a window ends; the engine's N has no
    effect.
    """

    name, framework = "hf-trainer-deepspeed-zero2", "HF Trainer DeepSpeed"
    colour = "#6699CC"
    sync = Sync.EAGER
    requires = ("transformers", "accelerate", "deepspeed")
    wrapper = DEEPSPEED

    def wrapped(self) -> DeepSpeedEngine:
        return self.trainer.model_wrapped

    def arguments(self, job: Job) -> dict[str, Any]:
        self.config = zero_config(type(self), job, self.inner)
        self.config["gradient_accumulation_steps"] = job.accumulate
        return super().arguments(job) | {"deepspeed": self.config}

    def continue_training(self, job: Job) -> None:
        self.save_masters(self.inner, job)
        with ds.short_parameter_repr():
            super().continue_training(job)

    def begin(self, job: Job) -> None:
        super().begin(job)
        self.restore_masters(self.inner)

    def zero_grad(self) -> None:
        self.wrapped().optimizer.zero_grad()

    def full_parameters(self) -> Mapping[str, Tensor]:
        return ds.gather(self.inner)

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return ds.gathered_state(self.wrapped(), self.inner)


class HuggingFaceDeepSpeedZero3(ds.ZeroStage3, HuggingFaceDeepSpeedZero2):
    """DeepSpeed stage 3."""

    name = "hf-trainer-deepspeed-zero3"
