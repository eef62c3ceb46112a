"""Plain PyTorch: the single-process reference, and DistributedDataParallel with and without ``no_sync``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

from bench.backends.base import Backend, Job
from bench.cell import REFERENCE, Sharding, Stepping, Sync

if TYPE_CHECKING:
    from torch import Tensor


NO_FAKE_DDP = "DDP's reducer, in C++, reads the memory of its tensors"


class Reference(Backend):
    """The truth: one process sees the whole batch at once, nothing is accumulated, nothing is scaled."""

    name, framework = REFERENCE, "torch"
    not_virtual = "it is one process, and has no other ranks to pretend"
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


class DDPEager(Backend):
    """DDP as it comes: every backward all-reduces."""

    name, framework = "ddp-eager", "torch DDP"
    not_fake = NO_FAKE_DDP
    sync, sharding = Sync.EAGER, Sharding.NONE
    stepping = Stepping.WINDOW

    def train(self, job: Job) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.model = DistributedDataParallel(job.build())
        self.optimizer = job.optimizer(self.model.parameters())
        self.again(job)

    def again(self, job: Job) -> None:
        self.optimizer.zero_grad()
        for window in job.each_window():
            for batch, last in window:
                # DDP decides in the forward whether the backward will reduce, so no_sync must hold both.
                with nullcontext() if last or self.sync is Sync.EAGER else self.model.no_sync():
                    with job.autocast():
                        loss = job.loss(self.model, batch)
                    (loss / window.size).backward()
            job.clip(self.model.parameters())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def full_parameters(self) -> Mapping[str, Tensor]:
        return dict(self.model.module.named_parameters())


class DDPDeferred(DDPEager):
    """DDP under ``no_sync`` but for the last micro-batch of the window."""

    name = "ddp-deferred"
    sync = Sync.DEFERRED


BACKENDS: tuple[type[Backend], ...] = (Reference, DDPEager, DDPDeferred)
