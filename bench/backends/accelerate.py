"""Accelerate's ``accumulate()`` with DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from bench.backends import deepspeed as ds
from bench.backends import fsdp2, plain
from bench.backends.base import Backend, BackendFamily
from bench.backends.training_job import Job, MicroBatches
from bench.backends.zero_options import zero_config
from bench.errors import UnsupportedError
from bench.plan.cell import Stepping, Sync
from bench.plan.world import Refusals

if TYPE_CHECKING:
    from accelerate import Accelerator
    from deepspeed import DeepSpeedEngine
    from torch import Tensor, nn
    from torch.utils.data import Dataset

DDP, FSDP2, DEEPSPEED = "DistributedDataParallel", "FSDPModule", "DeepSpeedEngine"
"""What Accelerate may wrap a model in, by the name of the class."""
_TYPES = {DDP: ("MULTI_CPU", "MULTI_GPU"), FSDP2: ("FSDP",), DEEPSPEED: ("DEEPSPEED",)}
"""The values of ``Accelerator.distributed_type`` that go with them."""


def set_up_state(job: Job, wrapper: str) -> None:
    """Set up Accelerate's ``PartialState`` for the existing process group.

    Call it before every ``Accelerator``. It first clears the singletons and variables of an earlier
    one in this process. On CUDA Accelerate then finds device and group by itself. On the CPU it has
    public options for DDP (``cpu=True``) and for DeepSpeed (the name of the group's backend), but
    knows no FSDP: beside an ``fsdp_plugin``, ``cpu=True`` trains DDP, and without it nothing is
    reduced at all (accelerate/state.py: ``_prepare_backend`` and ``AcceleratorState``). There, and
    only there, two methods are overridden: the ranks count as GPUs, while device and process group
    are the CPU's.
    """
    import torch
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    class OnCPU(PartialState):  # type: ignore[misc]
        def _prepare_backend(self, *args: object, **kwargs: object) -> tuple[str, DistributedType]:
            return "gloo", DistributedType.MULTI_GPU

        def set_device(self) -> None:
            self.device = torch.device("cpu")

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(wrapper == DEEPSPEED).lower()
    # Or PartialState sets another number.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    if wrapper == DEEPSPEED:
        ds.prepare()  # initializes its communication, or PartialState would
    if job.device.type == "cuda":
        PartialState()
    elif wrapper == DDP:
        PartialState(cpu=True)
    elif wrapper == DEEPSPEED:
        PartialState(backend="gloo")
    else:
        OnCPU()


def check(accelerator: Accelerator, model: nn.Module, wrapper: str, job: Job) -> None:
    """Raise RuntimeError unless the model is wrapped as asked and reduced over all ranks.

    Accelerate falls back to something else without a word.
    """
    if wrapper == DDP and job.world_size == 1 and job.device.type == "cuda":
        raise UnsupportedError("Accelerate wraps no model in DDP on one GPU")
    kind, num_ranks = accelerator.distributed_type, accelerator.num_processes
    is_wrapped = wrapper in [base.__name__ for base in type(model).__mro__]
    if kind.name not in _TYPES[wrapper] or num_ranks != job.world_size or not is_wrapped:
        found = kind, num_ranks, type(model).__name__
        raise RuntimeError(
            f"Accelerate was to train {wrapper} on {job.world_size} ranks, but set up {found}"
        )


class Stream:
    """A loader as the data set of a DataLoader that Accelerate can prepare.

    It has one item for each micro-batch of any rank. A prepared DataLoader hands rank r every W-th
    item from r on (accelerate/data_loader.py: ``BatchSamplerShard``). These are the rank's own
    micro-batches, in order.
    """

    def __init__(self, loader: MicroBatches, world_size: int) -> None:
        self._loader, self._world_size = loader, world_size

    def __len__(self) -> int:
        return len(self._loader) * self._world_size

    def __getitem__(self, index: int) -> Tensor:
        if index < self._world_size:  # an epoch begins
            self._batches = iter(self._loader)
        return next(self._batches)


class AccelerateBackend(Backend):
    """The documented loop under ``accumulate()``. Subclasses choose the wrapper.

    The loader is prepared too: Accelerate then fetches one micro-batch ahead, sees the end of an
    epoch and steps there, but divides the loss by N in a smaller window as well. Clipping is by
    ``clip_grad_norm_``, which under DeepSpeed only asks the engine for the norm.
    """

    family = BackendFamily.HUGGING_FACE
    stepping = Stepping.FLUSH
    requires: ClassVar[tuple[str, ...]] = ("accelerate",)
    # Accelerate imports DeepSpeed and, for a loader, datasets. The Trainer's backends are forked
    # from the same process.
    preload: ClassVar[tuple[str, ...]] = (
        "transformers.trainer",
        "accelerate",
        "datasets",
        *ds.PRELOAD,
    )
    wrapper: ClassVar[str]
    sync_each_batch: ClassVar[bool] = False

    def train(self, job: Job) -> None:
        from accelerate import Accelerator
        from accelerate.utils import GradientAccumulationPlugin

        set_up_state(job, self.wrapper)
        model = job.build()
        self.accelerator = Accelerator(
            device_placement=False,  # everything is on the device
            mixed_precision="bf16" if job.bf16 else "no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=job.accumulate, sync_each_batch=self.sync_each_batch
            ),
            **self.plugin(job, model),
        )
        self.prepare(job, model)
        self.continue_training(job)

    def plugin(self, job: Job, model: nn.Module) -> dict[str, Any]:
        """The argument of ``Accelerator`` that chooses the wrapper."""
        return {}

    def prepare(self, job: Job, model: nn.Module) -> None:
        self.model, self.optimizer = self.accelerator.prepare(
            model, job.optimizer(model.parameters())
        )
        check(self.accelerator, self.model, self.wrapper, job)

    def settings(self) -> dict[str, object]:
        return super().settings() | {
            "device_placement": False,
            "sync_each_batch": self.sync_each_batch,
        }

    def continue_training(self, job: Job) -> None:
        for batch in self.batches(job):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(job.loss(self.model, batch))
                if job.clip_norm and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), job.clip_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def batches(self, job: Job) -> Iterable[Tensor]:
        """The prepared loader of this rank's micro-batches."""
        from torch.utils.data import DataLoader

        stream = cast("Dataset[Tensor]", Stream(job.loader, job.world_size))
        plain_loader = DataLoader(stream, collate_fn=operator.itemgetter(0))
        prepared: Iterable[Tensor] = self.accelerator.prepare_data_loader(plain_loader)
        return prepared


class AccelerateDDP(AccelerateBackend, plain.DDPBackend):
    """DDP under ``no_sync`` but in the last micro-batch of a window.

    On one rank, without ``no_sync`` (accelerate/accelerator.py:no_sync).
    """

    name, framework = "accelerate-ddp", "Accelerate DDP"
    colour = "#332288"
    sync = Sync.DEFERRED
    eager_on_one_rank = True
    wrapper = DDP

    def plugin(self, job: Job, model: nn.Module) -> dict[str, Any]:
        from accelerate.utils import DistributedDataParallelKwargs

        handler = DistributedDataParallelKwargs(gradient_as_bucket_view=self.bucket_views)
        return {"kwargs_handlers": [handler]}

    def prepare(self, job: Job, model: nn.Module) -> None:
        super().prepare(job, model)
        plain.disable_runtime_statistics(self.model)


class AccelerateDDPEager(AccelerateDDP):
    """``sync_each_batch=True``: every backward all-reduces."""

    name = "accelerate-ddp-eager"
    sync = Sync.EAGER
    sync_each_batch = True


class AccelerateFSDP2(AccelerateBackend, fsdp2.FSDP2Backend):
    """FSDP2, where ``accumulate()`` defers the reduction as under DDP.

    It does so by ``set_requires_gradient_sync``. Accelerate shards the blocks, and of a
    transformers model also the embedding, and final norm and head together
    (accelerate/utils/fsdp_utils.py: ``fsdp2_prepare_model``). It does that by the addresses of
    parameters.
    """

    name, framework = "accelerate-fsdp2", "Accelerate FSDP2"
    colour = "#AA4499"
    refuses = Refusals(
        fake="Accelerate finds the sharded parameters by the addresses of the old ones, which fake "
        "tensors lack"
    )
    splits_root = True
    sync = Sync.DEFERRED
    wrapper = FSDP2

    def plugin(self, job: Job, model: nn.Module) -> dict[str, Any]:
        from accelerate.utils import FullyShardedDataParallelPlugin

        blocks = {type(block).__name__ for block in job.blocks(model)}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=sorted(blocks),
            mixed_precision_policy=fsdp2.mixed_precision(bf16=job.bf16),
        )
        return {"fsdp_plugin": plugin}


class AccelerateFSDP2Eager(AccelerateFSDP2):
    """FSDP2 with ``sync_each_batch=True``: every backward reduce-scatters."""

    name = "accelerate-fsdp2-eager"
    sync = Sync.EAGER
    sync_each_batch = True


class AccelerateDeepSpeedZero2(ds.ZeroBackend, AccelerateBackend):
    """Stage 2 with the configuration of ``deepspeed-zero2-eager``.

    Only DeepSpeed clips, and divides the loss. Accelerate tells the engine in every micro-batch
    whether the window is complete, and calls ``engine.step`` only then, within
    ``Accelerator.backward``.
    """

    name, framework = "accelerate-deepspeed-zero2", "Accelerate DeepSpeed"
    colour = "#999933"
    sync = Sync.EAGER
    requires = ("accelerate", "deepspeed")
    wrapper = DEEPSPEED

    def wrapped(self) -> DeepSpeedEngine:
        return self.model

    def plugin(self, job: Job, model: nn.Module) -> dict[str, Any]:
        from accelerate.utils import DeepSpeedPlugin

        self.config = zero_config(type(self), job, model)
        self.config["gradient_accumulation_steps"] = job.accumulate
        plugin = DeepSpeedPlugin(hf_ds_config=dict(self.config), zero3_init_flag=False)
        return {"deepspeed_plugin": plugin}

    def prepare(self, job: Job, model: nn.Module) -> None:
        self.save_masters(model, job)
        with ds.short_parameter_repr():
            super().prepare(job, model)
        self.restore_masters(self.model.module)

    def full_parameters(self) -> Mapping[str, Tensor]:
        return ds.gather(self.model.module)

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return ds.gathered_state(self.model, self.model.module)


class AccelerateDeepSpeedZero3(ds.ZeroStage3, AccelerateDeepSpeedZero2):
    """Stage 3."""

    name = "accelerate-deepspeed-zero3"
