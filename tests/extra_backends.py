"""Backends of a third-party package: one that is sound, and others with a fault that a gate or the runner catches."""

from __future__ import annotations

import os
import signal
import time

from bench.backends.plain import DDPEager
from bench.errors import UnsupportedError


class Sound(DDPEager):
    name, framework = "x-sound", "Extra"


class Extra(DDPEager):
    framework = "Extra"

    def setup(self, job):
        from torch.nn.parallel import DistributedDataParallel

        self.model = DistributedDataParallel(job.build())
        return self.model, job.optimizer(self.model.parameters())


class LastOnly(Extra):
    """Keeps only the gradient of the window's last micro-batch."""

    name = "x-last-only"

    def train(self, job):
        model, optimizer = self.setup(job)
        for index, batch in enumerate(job.loader, start=1):
            optimizer.zero_grad()
            (job.loss(model, batch) / job.accumulate).backward()
            if index % job.accumulate == 0:
                optimizer.step()


class StepsTooOften(Extra):
    """Steps after every micro-batch."""

    name = "x-steps-too-often"

    def train(self, job):
        model, optimizer = self.setup(job)
        for batch in job.loader:
            job.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


class NotReduced(DDPEager):
    """Sums instead of averaging over ranks, by scaling the loss with the world size."""

    name, framework = "x-summed", "Extra"

    def train(self, job):
        loss = job.loss
        job.loss = lambda model, batch: loss(model, batch) * job.world_size
        super().train(job)


class Loop(Extra):
    """Loops as they are found, each with one fault in it."""


class DividesTwice(Loop):
    name = "x-divides-twice"

    def train(self, job):
        loss = job.loss
        job.loss = lambda model, batch: loss(model, batch) / job.accumulate
        super().train(job)


class SyncsTooEarly(Loop):
    """Reduces after the first micro-batch of a window instead of the last one."""

    name = "x-syncs-too-early"

    def train(self, job):
        from contextlib import nullcontext

        model, optimizer = self.setup(job)
        for index, batch in enumerate(job.loader):
            with nullcontext() if index % job.accumulate == 0 else model.no_sync():
                (job.loss(model, batch) / job.accumulate).backward()
            if (index + 1) % job.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()


class StepsOneLate(Loop):
    """Tests the index that counts from 0: the first window has one micro-batch, and all others are shifted."""

    name = "x-steps-one-late"

    def train(self, job):
        model, optimizer = self.setup(job)
        for index, batch in enumerate(job.loader):
            (job.loss(model, batch) / job.accumulate).backward()
            if index % job.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()


class Modulo(Loop):
    """Steps where the index divides, and lets what is left over wait for the next epoch."""

    name = "x-modulo"
    clears = False

    def train(self, job):
        model, optimizer = self.setup(job)
        for _ in job.each_epoch():
            if self.clears:
                optimizer.zero_grad()
            for index, batch in enumerate(job.loader, start=1):
                (job.loss(model, batch) / job.accumulate).backward()
                if index % job.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()


class ClearsFirst(Modulo, Loop):
    """As above, but clears at the beginning of an epoch: what is left over is lost."""

    name, clears = "x-clears-first", True


class NeverClears(Loop):
    """Forgets zero_grad."""

    name = "x-never-clears"

    def train(self, job):
        model, optimizer = self.setup(job)
        for window in job.each_window():
            for batch, _ in window:
                (job.loss(model, batch) / window.size).backward()
            optimizer.step()


class Faulty(Extra):
    def train(self, job):
        if job.rank == 1:
            self.fail()
        super().train(job)


class Raises(Faulty):
    name = "x-raises"

    def fail(self):
        raise KeyError("a key that says out of memory")


class Killed(Faulty):
    name = "x-killed"

    def fail(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Faulty):
    name = "x-hangs"

    def fail(self):
        time.sleep(3600)


class Unsupported(Faulty):
    name = "x-unsupported"

    def fail(self):
        raise UnsupportedError("this framework cannot do that; use another")


class AbortsAfterwards(DDPEager):
    """Hands over its result, then dies as gloo is known to do."""

    name, framework = "x-aborts-afterwards", "Extra"

    def train(self, job):
        import multiprocessing.util

        multiprocessing.util.Finalize(None, os.abort, exitpriority=100)
        super().train(job)


class NeedsMissing(DDPEager):
    name, framework, requires = "x-needs-missing", "Extra", ("no_such_package_at_all",)
