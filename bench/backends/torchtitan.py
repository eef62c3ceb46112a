"""torchtitan's training loop (``Trainer.train()`` of 0.3.0, trainer.py) over parts of the bench's.

The trainer fetches a window before its first forward, sums the window's tokens over the ranks,
divides every loss by them, sums gradients over the ranks instead of averaging them, clips, and
steps. It knows no epochs; a step for which the data do not suffice is cancelled, but counted.

It reduces gradients in every micro-batch. Its pull request 4658
(``parallelism.fsdp_defer_gradient_reduction``) would defer that; a deferred backend belongs here
once a release has it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import sys
import time
from collections.abc import Iterator
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, cast

from packaging.version import Version

from bench.backends import fsdp2
from bench.backends.base import BackendFamily, Call
from bench.backends.training_job import Job
from bench.plan.cell import Cell, Device, Stepping, Sync
from bench.plan.world import Refusals

if TYPE_CHECKING:
    from torch import Tensor, nn


LEAST_TORCH = "2.13"
"""The version that torchtitan 0.3.0 was tried with; torch 2.11 lacks what it imports
(``DataParallelMeshDims``)."""


@cache
def load() -> ModuleType:
    """The module ``torchtitan.trainer``; importing it takes seconds.

    Two calls of ``train`` that are in no timed window are left out: the timeouts that the process
    groups get after the first step, which are the bench's, and the two seconds that rank 0 sleeps
    at the end. Two stand-ins are only for machines without a GPU: torchtitan would take the device
    to be CUDA, and its ``minimal_async_ep``, the expert parallelism of its own models, imports
    Triton, which comes with torch's builds for CUDA.
    """
    import torch

    if not torch.cuda.is_available():
        import torch._utils

        torch._utils._get_available_device_type = lambda: "cpu"
    if importlib.util.find_spec("triton") is None:
        sys.modules["torchtitan.distributed.minimal_async_ep"] = cast("ModuleType", _Unused())
    from torchtitan import trainer

    trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
    trainer.dist_utils.set_pg_timeouts = lambda **_: None
    return cast("ModuleType", trainer)


class _Unused:
    """A module from which every name can be imported."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _ModelWithLoss:
    """The trainer's model: returns the mean loss of a micro-batch instead of its logits."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        self.parameters = model.parameters
        self._model, self._loss = model, job.loss

    def __call__(self, batch: Tensor) -> Tensor:
        return self._loss(self._model, batch)


def _scaled(
    loss: Tensor, labels: Tensor, global_valid_tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of a micro-batch over the tokens of the window on all ranks, from its mean loss.

    So torchtitan's losses are. With equal micro-batches that is the mean over N W.
    """
    return loss * labels.numel() / global_valid_tokens, {}


REPLACED = {
    "Trainer.__init__": "is not called: its parts are set one by one",
    "model and sharding": "the bench's Llama of transformers, sharded as fsdp2-eager",
    "loss": "the bench's, over whole logits instead of chunks",
    "optimizer and loader": "the bench's",
    "learning-rate schedule, metrics, checkpoints, validation": "off",
    "CUDA graphs": "off: they would replay losses unseen",
    "process group timeouts": "the bench's",
}
"""What of a training by torchtitan is not its own here."""


class TorchtitanEager(fsdp2.FSDP2Backend):
    """``Trainer.train()`` with everything it calls, on other parts than its own (``REPLACED``).

    The norm of the gradients is computed without clipping too. Gloo knows no ``PREMUL_SUM``, which
    FSDP2 takes for undivided gradients, so there the reduction is a plain sum.
    """

    name, framework = "torchtitan-eager", "torchtitan's loop"
    family, colour = BackendFamily.PYTORCH, "#AA4466"
    sync = Sync.EAGER
    requires, preload = ("torchtitan",), ("bench.backends.torchtitan:load",)
    stepping = Stepping.CANCEL
    always_computes_norm = True
    refuses = Refusals(
        fake="torchtitan's trainer reads the number of tokens, which fake tensors do not have"
    )

    @classmethod
    def missing(cls, device: Device) -> str:
        if reason := super().missing(device):
            return reason
        torch = importlib.metadata.version("torch")  # of which torchtitan's metadata say nothing
        is_old = Version(torch) < Version(LEAST_TORCH)
        if is_old:
            return f"needs torch>={LEAST_TORCH}, not {torch}: pip install 'torch>={LEAST_TORCH}'"
        return ""

    @classmethod
    def remark(cls, cell: Cell) -> str:
        return (
            "of torchtitan only the training loop runs: model, sharding, loss, optimizer and data "
            "are the bench's"
        )

    def train(self, job: Job) -> None:
        import gc

        import torch.distributed as dist
        from torch.distributed.fsdp import FSDPModule

        titan = load()
        from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
        from torchtitan.tools.utils import GarbageCollection

        self.trainer = trainer = titan.Trainer.__new__(titan.Trainer)
        max_norm = math.inf
        if job.clip_norm > 0:
            max_norm = job.clip_norm
        trainer.config = titan.Trainer.Config(
            training=titan.TrainingConfig(
                steps=job.windows, max_norm=max_norm, disable_cuda_graphs=True
            )
        )
        trainer.parallel_dims = titan.ParallelDims.from_config(
            trainer.config.parallelism, job.world_size
        )
        mesh = trainer.parallel_dims.get_mesh("dp_shard")
        self.model = job.build()
        fsdp2.shard(
            self.model, job.blocks(self.model), mesh, bf16=job.bf16, reshard_after_forward=True
        )
        disable_fsdp_gradient_division(self.model)
        if "nccl" not in dist.get_backend():
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        trainer.optimizers = self.optimizer = job.optimizer(self.model.parameters())
        trainer.model_parts = [_ModelWithLoss(self.model, job)]
        trainer.loss_fn = _scaled
        trainer.fwd_bwd_fn = trainer._forward_backward_body
        trainer.train_context = titan.dist_utils.get_spmd_context(
            parallel_dims=trainer.parallel_dims
        )
        trainer.device, trainer.model_config = job.device, None
        trainer.gradient_accumulation_steps = job.accumulate
        trainer.num_pipeline_parallel_microbatches = 1
        trainer.step = trainer.ntokens_seen = 0
        trainer.lr_schedulers = SimpleNamespace(get_metrics=dict, step=lambda: None)
        trainer.metrics_processor = SimpleNamespace(
            should_log=lambda step: False, ntokens_since_last_log=0, data_loading_times=[]
        )
        trainer.checkpointer = titan.CheckpointManager.__new__(titan.CheckpointManager)
        trainer.checkpointer.enable = False
        trainer.gc_handler = GarbageCollection(gc_freq=trainer.config.training.gc_freq)
        try:
            self.continue_training(job)
        finally:
            gc.enable()  # which the handler has disabled

    def continue_training(self, job: Job) -> None:
        self.trainer.dataloader = self.batches(job)
        self.trainer.train()

    def batches(self, job: Job) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Micro-batches as torchtitan's loaders yield them.

        Input, and labels on the host, which it counts.
        """
        import torch

        for batch in job.loader:
            yield {"input": batch}, torch.zeros(self.num_tokens(batch), dtype=torch.int64)

    def num_tokens(self, batch: Tensor) -> int:
        """The tokens of a micro-batch; only their share in the window's matters."""
        return batch.numel()

    @classmethod
    def extra_collectives(cls, cell: Cell) -> list[Call]:
        """The window's number of valid tokens, summed over the ranks (``train_step``)."""
        if cell.world_size > 1:
            return [("all_reduce", "int64", 1, 1)]
        return []

    @classmethod
    def extra_held_bytes(cls, cell: Cell) -> int:
        """That number, and on the CPU this rank's own."""
        if cell.world_size == 1:
            return 0
        if cell.device is Device.CPU:
            return 2 * 8
        return 8

    def reported(self) -> dict[str, int]:
        return {"trainer.step": self.trainer.step}

    def settings(self) -> dict[str, object]:
        training, parallelism = self.trainer.config.training, self.trainer.config.parallelism
        return super().settings() | {
            "gc_freq": training.gc_freq,
            "disable_cuda_graphs": training.disable_cuda_graphs,
            "max_norm": str(training.max_norm),
            "spmd_backend": parallelism.spmd_backend,
            "replaced": REPLACED,
        }
