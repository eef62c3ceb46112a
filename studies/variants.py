"""Backends as their maintainers would rather have them, one for each objection of ``studies.objections``.

They are in no matrix of the bench: each is trained beside the backend that it varies, in the runs of that study.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from bench.backends import deepspeed as ds
from bench.backends import fsdp2, torchtitan
from bench.backends.accelerate import AccelerateDDP
from bench.backends.deepspeed import DeepSpeedZero2Deferred, DeepSpeedZero2Eager
from bench.backends.fsdp2 import FSDP2Deferred, FSDP2Eager
from bench.backends.hugging_face import HuggingFaceDDP
from bench.backends.lightning import LightningDDP
from bench.backends.torchtitan import TorchtitanEager
from bench.backends.training_job import Job
from bench.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup, ReduceOp
    from torch.nn.parameter import Parameter
    from torch.optim import Optimizer


class LightningDDPBarebones(LightningDDP):
    """``Trainer(barebones=True)``, which Lightning has for measuring the overhead of its Trainer."""

    name = "lightning-ddp-barebones"

    def trainer_arguments(self, job: Job) -> dict[str, Any]:
        return super().trainer_arguments(job) | {"barebones": True}


class Zero2SharedMemory(DeepSpeedZero2Eager):
    """With DeepSpeed's shared-memory operator built and initialized, whose calls are counted.

    deepspeed/comm/torch.py: only ``inference_all_reduce`` calls it.
    """

    name = "deepspeed-zero2-shm"
    calls = 0

    def initialize(self, job: Job, gradient_accumulation_steps: int) -> None:
        import deepspeed.ops
        from deepspeed import comm

        vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": True}
        if not comm.is_initialized():
            comm.init_distributed(dist_init_required=False)
        backend: Any = comm.comm.cdb
        if backend.shm_comm_op is None:
            raise UnsupportedError("DeepSpeed's shared-memory operator was not built")
        reduce = backend.inference_all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return reduce(*args, **kwargs)

        backend.inference_all_reduce = counted
        super().initialize(job, gradient_accumulation_steps)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"shm_calls": self.calls}


class Zero2CPUAdam(DeepSpeedZero2Eager):
    """With DeepSpeed's AdamW for CPUs in the place of torch's, with the same options and taps."""

    name = "deepspeed-zero2-cpu-adam"

    def initialize(self, job: Job, gradient_accumulation_steps: int) -> None:
        ds.prepare()
        job = dataclasses.replace(job, optimizer=_with_cpu_adam(job.optimizer))
        super().initialize(job, gradient_accumulation_steps)


def _with_cpu_adam(
    make: Callable[[Iterable[Parameter]], Optimizer],
) -> Callable[[Iterable[Parameter]], Optimizer]:
    """A maker of optimizers that gives DeepSpeedCPUAdam for AdamW, which then calls the hooks of what it replaces."""

    def made(parameters: Iterable[Parameter]) -> Optimizer:
        import torch
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        parameters = list(parameters)
        replaced = make(parameters)
        if not isinstance(replaced, torch.optim.AdamW):  # the update pass has SGD
            return replaced
        (options,) = replaced.param_groups
        names = ("lr", "betas", "eps", "weight_decay")
        adam: Optimizer = DeepSpeedCPUAdam(parameters, **{name: options[name] for name in names})
        for hook in replaced._optimizer_step_post_hooks.values():
            adam.register_step_post_hook(hook)
        return adam

    return made


class _SmallBucket(DeepSpeedZero2Eager):
    """A bucket of one block, so that the model fills several, as every model beyond 25 MiB does."""

    def start(self, **arguments: Any) -> Any:
        self.config["zero_optimization"]["reduce_bucket_size"] = self.block_parameters
        return super().start(**arguments)

    def initialize(self, job: Job, gradient_accumulation_steps: int) -> None:
        self.block_parameters = job.block_parameters + job.block_parameters % 2
        super().initialize(job, gradient_accumulation_steps)


class Zero2SmallBucketEager(_SmallBucket):
    name = "deepspeed-zero2-small-bucket-eager"


class Zero2SmallBucketDeferred(_SmallBucket, DeepSpeedZero2Deferred):
    name = "deepspeed-zero2-small-bucket-deferred"


class HuggingFaceOwnLoader(HuggingFaceDDP):
    """The loader that the Trainer itself makes of a data set of samples, shards over the ranks, and prefetches."""

    name = "hf-trainer-ddp-own-loader"

    def arguments(self, job: Job) -> dict[str, Any]:
        return super().arguments(job) | {"train_sampling_strategy": "sequential"}

    def batches(self, job: Job) -> Any:
        trainer = self.trainer
        trainer.train_dataset = _Samples(job)
        return super(type(trainer), trainer).get_train_dataloader()


class _Samples:
    """The samples of all ranks as a data set, of which this rank is asked for its own alone, in order."""

    def __init__(self, job: Job) -> None:
        self._loader, self._size, self._ranks = (
            job.loader,
            job.cell.micro_batch_size,
            job.world_size,
        )
        self._batches: Iterator[Tensor] = iter(())

    def __len__(self) -> int:
        return len(self._loader) * self._size * self._ranks

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, place = divmod(index, self._size)
        if place == 0:
            if number < self._ranks:  # an epoch begins
                self._batches = iter(self._loader)
            self._batch = next(self._batches)
        sample = self._batch[place]
        return {"batch": sample, "labels": sample}


class HuggingFaceBucketViews(HuggingFaceDDP):
    """Reduced gradients are views of DDP's buckets: set on the Trainer's accelerator, since no argument sets it."""

    name = "hf-trainer-ddp-views"
    bucket_views = True

    def continue_training(self, job: Job) -> None:
        self.trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
        super().continue_training(job)


class AcceleratePlaces(AccelerateDDP):
    """With ``device_placement``, the default."""

    name = "accelerate-ddp-places"

    def prepare(self, job: Job, model: nn.Module) -> None:
        self.accelerator.device_placement = True
        super().prepare(job, model)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"device_placement": True}


class AllToAllReduceScatter:
    """A reduce-scatter in which a rank sends each other rank its part once, and sums what it has received.

    So it sends (W - 1)/W of the payload, as a ring would. gloo's own copies the input, all-reduces it and keeps a
    part (ProcessGroupGloo.cpp: ``reduce_scatter_tensor_coalesced``).
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        import torch

        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        import torch
        import torch.distributed as dist

        assert op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM) and not async_op
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(group.size(), -1)
        torch.sum(parts, dim=0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


class FSDP2EagerAllToAll(FSDP2Eager):
    """Gradients are reduced by an all-to-all (``set_custom_reduce_scatter``)."""

    name = "fsdp2-eager-all-to-all"

    def continue_training(self, job: Job) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(cast("Any", AllToAllReduceScatter()))
        super().continue_training(job)


class FSDP2DeferredAllToAll(FSDP2EagerAllToAll, FSDP2Deferred):
    """Gradients are reduced by an all-to-all, once per window."""

    name = "fsdp2-deferred-all-to-all"
    sync = FSDP2Deferred.sync


class TorchtitanOwnInit(TorchtitanEager):
    """The trainer is made by torchtitan's own ``Trainer.__init__`` from a config; its parts are as in the backend.

    Model, loss, optimizer, schedule, loader and metrics are the bench's, handed in as components of the config.
    The metrics of torchtitan read the memory of a GPU, and so cannot be built on a CPU.
    """

    name = "torchtitan-own-init"

    def train(self, job: Job) -> None:
        import gc

        titan = torchtitan.load()
        self.model = job.build()
        self.optimizer = job.optimizer(self._shard(job))
        config = titan.Trainer.Config(
            model_spec=SimpleNamespace(
                name="llama",
                flavor=job.cell.model,
                model=_ModelConfig(_TitanModel(self.model, job)),
                parallelize_fn=lambda model, **_: model,
                pipelining_fn=None,
                post_optimizer_build_fn=None,
                state_dict_adapter=None,
            ),
            training=titan.TrainingConfig(
                steps=job.windows,
                seq_len=job.cell.sequence_length,
                local_batch_size=job.cell.micro_batch_size,
                global_batch_size=job.cell.micro_batch_size * job.world_size * job.accumulate,
                max_norm=job.clip_norm or math.inf,
                disable_cuda_graphs=True,
            ),
            loss=_Part(lambda **_: torchtitan._scaled),
            optimizer=_Part(lambda **_: self.optimizer),
            lr_scheduler=_Part(
                lambda **_: SimpleNamespace(get_metrics=dict, step=lambda: None), warmup_steps=0
            ),
            metrics=_Part(lambda **_: _no_metrics()),
            tokenizer=_Part(lambda **_: None),
            dataloader=_Part(lambda **_: None),
        )
        self.trainer = titan.Trainer(config)
        assert self.trainer.gradient_accumulation_steps == job.accumulate
        try:
            self.continue_training(job)
        finally:
            gc.enable()  # which the trainer's handler has disabled

    def _shard(self, job: Job) -> Iterable[Parameter]:
        """Shard the model as ``torchtitan-eager`` does; its parameters."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule
        from torchtitan.distributed.fsdp import disable_fsdp_gradient_division

        mesh = init_device_mesh(job.device.type, (job.world_size,))
        blocks = job.blocks(self.model)
        fsdp2.shard(self.model, blocks, mesh, bf16=job.bf16, reshard_after_forward=True)
        disable_fsdp_gradient_division(self.model)
        if "nccl" not in dist.get_backend():
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        parameters: Iterable[Parameter] = self.model.parameters()
        return parameters


class _Part:
    """The config of a component: ``build`` returns what the bench has made."""

    def __init__(self, build: Callable[..., Any], **fields: Any) -> None:
        self.build = build
        vars(self).update(fields)

    def to_dict(self) -> dict[str, Any]:
        return {}


class _TitanModel(torchtitan._ModelWithLoss):
    """With the methods that ``Trainer.__init__`` calls on a model, which is already built, sharded and initialized."""

    def to_empty(self, **_: Any) -> None:
        pass

    def init_weights(self, **_: Any) -> None:
        pass

    def train(self) -> None:
        self._model.train()

    def verify_module_protocol(self) -> None:
        pass


class _ModelConfig(_Part):
    """The config of a model that there is already."""

    def __init__(self, model: _TitanModel) -> None:
        super().__init__(lambda: model)

    def update_from_config(self, **_: Any) -> None:
        pass

    def traverse(self, *_: Any, **__: Any) -> Iterator[Any]:
        return iter(())

    def get_nparams_and_flops(self, model: _TitanModel, _: int) -> tuple[int, int]:
        return sum(parameter.numel() for parameter in model.parameters()), 0


def _no_metrics() -> SimpleNamespace:
    """A metrics processor that logs nothing."""
    monitor = SimpleNamespace(
        device_name="CPU",
        get_peak_stats=lambda: SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0),
    )
    return SimpleNamespace(
        color=SimpleNamespace(red="", blue="", reset=""),
        device_memory_monitor=monitor,
        should_log=lambda step: False,
        ntokens_since_last_log=0,
        data_loading_times=[],
        close=lambda: None,
    )


EVERY = (
    LightningDDPBarebones,
    Zero2SharedMemory,
    Zero2CPUAdam,
    Zero2SmallBucketEager,
    Zero2SmallBucketDeferred,
    HuggingFaceOwnLoader,
    HuggingFaceBucketViews,
    AcceleratePlaces,
    FSDP2EagerAllToAll,
    FSDP2DeferredAllToAll,
    TorchtitanOwnInit,
)
PLACES = ",".join(f"{kind.__module__}:{kind.__name__}" for kind in EVERY)
"""What BENCH_BACKENDS names them by."""
