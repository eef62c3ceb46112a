"""Backends that change more than their own training, by accident or on purpose, and sound ones that look like them."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch
import torch.distributed as dist

from bench.backends.base import Backend, Lossy
from bench.backends.plain import DDPDeferred
from bench.plan.cell import Sharding, Sync

LARGE = 2**23
"""Elements of a buffer: 32 MiB in fp32, ten times what the small model needs."""


class Averaging(Backend):
    """A right loop without a wrapper: each rank accumulates, and all average their gradients once per window."""

    name, framework, sync, sharding = "a-sound", "Accused", Sync.DEFERRED, Sharding.NONE

    def train(self, job):
        self.model = job.build()
        optimizer = job.optimizer(self.model.parameters())
        for window in job.each_window():
            for batch, _ in window:
                self.backward(job, batch)
            self.reduce(job)
            job.clip(self.model.parameters())
            optimizer.step()
            optimizer.zero_grad()

    def backward(self, job, batch):
        with job.autocast():
            loss = job.loss(self.model, batch)
        (loss / job.accumulate).backward()

    def reduce(self, job):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= job.world_size

    def full_parameters(self):
        return dict(self.model.named_parameters())


class SwapsJudge(Averaging):
    """Its gradients are 3 % too small, and it replaces what would compare them in its process."""

    name = "a-swaps-judge"

    def train(self, job):
        from bench.measure import trial, update

        for module in (trial, update):
            module.compare = lambda *_: {"error": 0.0, "scale": 1.0, "residual": 0.0, "norm": 1.0}
        super().train(job)

    def reduce(self, job):
        super().reduce(job)
        for parameter in self.model.parameters():
            parameter.grad *= 0.97


class SlowsClock(Averaging):
    """The clocks of Python's module run at a tenth of their speed while it trains."""

    name = "a-slows-clock"

    def train(self, job):
        counter, monotonic = time.perf_counter, time.monotonic
        time.perf_counter, time.monotonic = (lambda: counter() / 10), (lambda: monotonic() / 10)
        try:
            super().train(job)
        finally:
            time.perf_counter, time.monotonic = counter, monotonic


class Replays(Averaging):
    """If all windows are asked for, it trains with an optimizer of its own first, and then only pretends to."""

    name = "a-replays"

    def train(self, job):
        if job.windows < job.cell.windows:
            super().train(job)
            return
        self.model = job.build()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=job.cell.learning_rate)
        batches, losses = list(job.loader), []
        for start in range(0, len(batches), job.accumulate):
            for batch in batches[start : start + job.accumulate]:
                losses.append(self.loss(batch))
                (losses[-1] / job.accumulate).backward()
            self.reduce(job)
            optimizer.step()
            optimizer.zero_grad()
        idle = job.optimizer(self.model.parameters())
        logits = self.kept
        for index, batch in enumerate(batches):
            job.loss(lambda *_, index=index, **__: logits[index], batch)
            if (index + 1) % job.accumulate == 0:
                idle.step()

    def loss(self, batch):
        from torch.nn.functional import cross_entropy

        output = self.model(input_ids=batch[:, :-1], use_cache=False)
        self.kept.append(type(output)(logits=output.logits.detach()))
        return cross_entropy(output.logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def __init__(self):
        self.kept = []


class HoldsTensor(Averaging):
    """Holds a tensor from its construction on, which no operator takes in a window."""

    name = "a-holds-tensor"

    def __init__(self):
        self.held = torch.ones(LARGE)


class HoldsArray(Averaging):
    """Holds as much that is no tensor of torch."""

    name = "a-holds-array"

    def __init__(self):
        self.held = np.ones(LARGE, np.float32)


class HelperThread(Averaging):
    """A helper thread allocates in every window, and frees it again."""

    name = "a-helper-thread"

    def reduce(self, job):
        thread = threading.Thread(target=self.work)
        thread.start()
        thread.join()
        super().reduce(job)

    def work(self):
        torch.ones(LARGE).mul_(2)


class IdleThread(HelperThread):
    """The same with nothing to do."""

    name = "a-idle-thread"

    def work(self):
        pass


def reduce_in_bf16(state, bucket):
    """As DDP's hook of that name, which refuses to run without NCCL."""
    buffer = bucket.buffer()
    rounded = (buffer / dist.get_world_size()).bfloat16()
    work = dist.all_reduce(rounded, async_op=True)
    return work.get_future().then(lambda _: buffer.copy_(rounded))


class Compressed(DDPDeferred):
    """A communication hook reduces gradients in bf16, and nothing says so."""

    name, framework = "a-compressed", "Accused"

    def continue_training(self, job):
        self.model.register_comm_hook(None, reduce_in_bf16)
        super().continue_training(job)


class DeclaresIt(Compressed):
    """The same, declared."""

    name = "a-declares-it"

    @classmethod
    def lossy(cls, cell):
        return Lossy(why="gradients rounded", tolerance=6e-3, reduce_dtype="bf16")


class DeclaresTooLittle(Compressed):
    """The same, with a tolerance that it does not keep."""

    name = "a-declares-too-little"

    @classmethod
    def lossy(cls, cell):
        return Lossy(why="gradients rounded", tolerance=1e-4, reduce_dtype="bf16")
