"""Plain PyTorch: the single-process reference, and DDP with and without ``no_sync``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from bench.backends.base import Backend, BackendFamily
from bench.backends.training_job import Job
from bench.plan.cell import REFERENCE, Sharding, Stepping, Sync
from bench.plan.world import Refusals

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

SAMPLED_ITERATIONS = 10
"""Iterations in which DDP takes statistics at any sample rate (should_collect_runtime_stats in
reducer.cpp)."""
NEVER = 2**31 - 1
"""The largest sample rate: one in this many iterations."""


def disable_runtime_statistics(model: DistributedDataParallel) -> DistributedDataParallel:
    """Disable DDP's run-time statistics, and return the model. Call it before the first forward.

    In its first ten iterations and every 100th after them, DDP makes the host wait for CUDA events
    of the previous iteration (set_runtime_stats_and_log in torch/csrc/distributed/c10d/logger.cpp).
    Iterations under ``no_sync`` are not counted, so deferred reduction would wait in timed windows
    and eager reduction in the warm-up. ``prepare_for_forward`` only counts iterations; nothing but
    static graphs depends on the count.
    """
    for _ in range(SAMPLED_ITERATIONS + 1):
        model.reducer.prepare_for_forward()
    model._set_ddp_runtime_logging_sample_rate(NEVER)
    return model


class Reference(Backend):
    """The reference: one process sees the whole batch at once; nothing is accumulated or scaled."""

    name, framework = REFERENCE, "torch"
    family, colour = BackendFamily.PYTORCH, "#000000"
    refuses = Refusals(virtual="it is a single process")
    sync, sharding = Sync.NONE, Sharding.NONE
    stepping = Stepping.WINDOW

    def train(self, job: Job) -> None:
        self.model = job.build()
        optimizer = job.optimizer(self.model.parameters())
        for batch in job.loader:
            with job.autocast():
                loss = job.loss(self.model, batch)
            loss.backward()
            job.clip(self.model.parameters())
            optimizer.step()
            optimizer.zero_grad()

    def full_parameters(self) -> Mapping[str, Tensor]:
        return dict(self.model.named_parameters())


class DDPBackend(Backend):
    """What all backends over DDP have in common, whoever owns the loop."""

    sharding = Sharding.NONE
    refuses = Refusals(fake="DDP's reducer, in C++, reads the memory of its tensors")
    eager_on_one_rank: ClassVar[bool] = False
    """Whether a deferred backend reduces in every micro-batch if there is only one rank."""
    bucket_views: ClassVar[bool] = True
    """``gradient_as_bucket_view``: whether a gradient that DDP has reduced is a view of its bucket,
    not a copy."""
    model: DistributedDataParallel

    def full_parameters(self) -> Mapping[str, Tensor]:
        return dict(self.model.module.named_parameters())

    def settings(self) -> dict[str, object]:
        return super().settings() | {
            "runtime_statistics": False,
            "gradient_as_bucket_view": self.bucket_views,
        }


class DDPEager(DDPBackend):
    """Default DDP: every backward all-reduces."""

    name, framework = "ddp-eager", "torch DDP"
    family, colour = BackendFamily.PYTORCH, "#0072B2"
    sync = Sync.EAGER
    is_mechanism = True
    stepping = Stepping.WINDOW

    def train(self, job: Job) -> None:
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(job.build(), gradient_as_bucket_view=self.bucket_views)
        self.model = disable_runtime_statistics(model)
        self.optimizer = job.optimizer(self.model.parameters())
        self.continue_training(job)

    def continue_training(self, job: Job) -> None:
        self.optimizer.zero_grad()
        for window in job.each_window():
            for batch, last in window:
                # DDP decides in the forward whether the backward will reduce, so no_sync must cover
                # both.
                reducing: AbstractContextManager[object] = nullcontext()
                if not (last or self.sync is Sync.EAGER):
                    reducing = self.model.no_sync()
                with reducing:
                    with job.autocast():
                        loss = job.loss(self.model, batch)
                    (loss / window.size).backward()
            job.clip(self.model.parameters())
            self.optimizer.step()
            self.optimizer.zero_grad()


class DDPDeferred(DDPEager):
    """DDP under ``no_sync`` except for the last micro-batch of the window."""

    name = "ddp-deferred"
    sync = Sync.DEFERRED
