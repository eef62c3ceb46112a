"""Backends of a third-party package: one that is sound, and others with a fault that a gate or the runner catches."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext

from bench.backends.plain import DDPEager
from bench.errors import UnsupportedError


class Sound(DDPEager):
    name, framework = "x-sound", "Extra"


class Loop(DDPEager):
    """A loop that takes the loader as one row of windows; each below has one fault, as it is found in programs."""

    framework = "Extra"

    def train(self, job):
        from torch.nn.parallel import DistributedDataParallel

        self.model = DistributedDataParallel(job.build())
        self.optimizer = job.optimizer(self.model.parameters())
        self.run(job)

    def run(self, job):
        for index, batch in enumerate(job.loader, start=1):
            self.backward(job, batch, index)
            if self.ends_window(index, job.accumulate):
                self.optimizer.step()
                self.clear()

    def backward(self, job, batch, index):
        (job.loss(self.model, batch) / job.accumulate).backward()

    def ends_window(self, index, accumulate):
        return index % accumulate == 0

    def clear(self):
        self.optimizer.zero_grad()


class LastOnly(Loop):
    """Keeps only the gradient of the window's last micro-batch."""

    name = "x-last-only"

    def backward(self, job, batch, index):
        self.clear()
        super().backward(job, batch, index)


class AllButLast(Loop):
    """The gradient of the window's last micro-batch is not in its update."""

    name = "x-all-but-last"

    def backward(self, job, batch, index):
        if self.ends_window(index, job.accumulate):
            job.loss(self.model, batch)
        else:
            super().backward(job, batch, index)


class StepsTooOften(Loop):
    name = "x-steps-too-often"

    def ends_window(self, index, accumulate):
        return True


class StepsOneLate(Loop):
    """Tests the index that counts from 0: the first window has one micro-batch, and all others are shifted."""

    name = "x-steps-one-late"

    def ends_window(self, index, accumulate):
        return (index - 1) % accumulate == 0


class LeavesTheLastWindow(Loop):
    """Steps when the next window begins, which never happens to the last one."""

    name = "x-leaves-the-last-window"

    def backward(self, job, batch, index):
        if index > 1 and (index - 1) % job.accumulate == 0:
            self.optimizer.step()
            self.clear()
        super().backward(job, batch, index)

    def ends_window(self, index, accumulate):
        return False


class SyncsTooEarly(Loop):
    """Reduces after the first micro-batch of a window instead of the last one."""

    name = "x-syncs-too-early"

    def backward(self, job, batch, index):
        with nullcontext() if index % job.accumulate == 1 else self.model.no_sync():
            super().backward(job, batch, index)


class Modulo(Loop):
    """Steps where the index divides, and lets what is left over wait for the next epoch."""

    name = "x-modulo"
    clears = False

    def run(self, job):
        for _ in job.each_epoch():
            if self.clears:
                self.clear()
            super().run(job)


class ClearsFirst(Modulo):
    """As above, but clears at the beginning of an epoch: what is left over is lost."""

    name, clears = "x-clears-first", True


class NeverClears(Loop):
    name = "x-never-clears"

    def clear(self):
        pass


class NotReduced(Loop):
    """Sums instead of averaging over ranks, by scaling the loss with the world size."""

    name = "x-summed"

    def backward(self, job, batch, index):
        (job.loss(self.model, batch) * job.world_size / job.accumulate).backward()


class DividesTwice(Loop):
    name = "x-divides-twice"

    def backward(self, job, batch, index):
        (job.loss(self.model, batch) / job.accumulate**2).backward()


class Faulty(DDPEager):
    framework = "Extra"

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
