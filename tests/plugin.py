"""A third-party package with backends, built as a real wheel and installed into a folder of its own.

Beside one sound backend it holds faulty ones, each with one of the faults that a runner has to survive or a gate has
to catch.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

CODE = '''
import os
import signal
import time

from bench.backends.base import Backend
from bench.backends.plain import DDPEager
from bench.plan.cell import Sharding, Sync
from bench.errors import UnsupportedError


class Sound(DDPEager):
    name, framework = "x-sound", "Extra"


class LastOnly(DDPEager):
    """Keeps only the gradient of the window's last micro-batch."""

    name, framework = "x-last-only", "Extra"

    def train(self, job):
        from torch.nn.parallel import DistributedDataParallel

        self.model = DistributedDataParallel(job.build())
        optimizer = job.optimizer(self.model.parameters())
        for index, batch in enumerate(job.loader, start=1):
            optimizer.zero_grad()
            (job.loss(self.model, batch) / job.accumulate).backward()
            if index % job.accumulate == 0:
                optimizer.step()


class StepsTooOften(DDPEager):
    """Steps after every micro-batch."""

    name, framework = "x-steps-too-often", "Extra"

    def train(self, job):
        from torch.nn.parallel import DistributedDataParallel

        self.model = DistributedDataParallel(job.build())
        optimizer = job.optimizer(self.model.parameters())
        for batch in job.loader:
            job.loss(self.model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


class NotReduced(DDPEager):
    """Sums instead of averaging over ranks, by scaling the loss with the world size."""

    name, framework = "x-summed", "Extra"

    def train(self, job):
        loss = job.loss
        job.loss = lambda model, batch: loss(model, batch) * job.world_size
        super().train(job)


class Loop(DDPEager):
    """Loops as they are found, each with one fault in it."""

    framework = "Extra"

    def setup(self, job):
        from torch.nn.parallel import DistributedDataParallel

        self.model = DistributedDataParallel(job.build())
        return self.model, job.optimizer(self.model.parameters())


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

    def train(self, job):
        model, optimizer = self.setup(job)
        for _ in job.each_epoch():
            for index, batch in enumerate(job.loader, start=1):
                (job.loss(model, batch) / job.accumulate).backward()
                if index % job.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()


class ClearsFirst(Loop):
    """As above, but clears at the beginning of an epoch: what is left over is lost."""

    name = "x-clears-first"

    def train(self, job):
        model, optimizer = self.setup(job)
        for _ in job.each_epoch():
            optimizer.zero_grad()
            for index, batch in enumerate(job.loader, start=1):
                (job.loss(model, batch) / job.accumulate).backward()
                if index % job.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()


class OneN(Loop):
    """Does not notice that N changes from epoch to epoch."""

    name = "x-one-n"

    def train(self, job):
        model, optimizer = self.setup(job)
        for _ in job.each_epoch():
            for index, batch in enumerate(job.loader, start=1):
                (job.loss(model, batch) / job.accumulate).backward()
                if index % job.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()


class SkipsFourth(Loop):
    """Throws every fourth micro-batch away, as one does with bad ones."""

    name = "x-skips-fourth"

    def train(self, job):
        model, optimizer = self.setup(job)
        for _ in job.each_epoch():
            used = 0
            for index, batch in enumerate(job.loader, start=1):
                if index % 4 == 0:
                    continue
                (job.loss(model, batch) / job.accumulate).backward()
                used += 1
                if used % job.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()


class CountsMicroBatches(Loop):
    """Takes max_steps for a number of micro-batches."""

    name = "x-counts-micro-batches"

    def train(self, job):
        model, optimizer = self.setup(job)
        seen = 0
        for window in job.each_window():
            for batch, _ in window:
                (job.loss(model, batch) / window.size).backward()
                seen += 1
                if seen == job.max_steps:
                    return
            optimizer.step()
            optimizer.zero_grad()


class NeverClears(Loop):
    """Forgets zero_grad."""

    name = "x-never-clears"

    def train(self, job):
        model, optimizer = self.setup(job)
        for window in job.each_window():
            for batch, _ in window:
                (job.loss(model, batch) / window.size).backward()
            optimizer.step()


class Faulty(DDPEager):
    framework = "Extra"

    def train(self, job):
        if job.rank == 1:
            self.fail()
        super().train(job)


class OutOfMemory(Faulty):
    name = "x-oom"

    def fail(self):
        import torch

        raise torch.OutOfMemoryError("tried to allocate 1000.00 GiB")


class Raises(Faulty):
    name = "x-raises"

    def fail(self):
        raise KeyError("a key that says out of memory")


class Killed(Faulty):
    name = "x-killed"

    def fail(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Exits(Faulty):
    name = "x-exits"

    def fail(self):
        os._exit(7)


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
        import atexit
        import multiprocessing.util

        multiprocessing.util.Finalize(None, os.abort, exitpriority=100)
        super().train(job)


class LeavesChild(DDPEager):
    """Starts a process that outlives it, and fails if the trial before left one."""

    name, framework = "x-leaves-child", "Extra"
    passes = 0  # of this process

    def train(self, job):
        import subprocess
        import sys

        import psutil
        import torch.distributed as dist

        mark = "import time; time.sleep(4321)"
        before = [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
        type(self).passes += 1
        if self.passes == 1 and before:
            raise RuntimeError("the trial before left a process")
        dist.barrier()  # no rank looks when another has started its own already
        subprocess.Popen([sys.executable, "-c", mark])
        super().train(job)


class NeedsMissing(DDPEager):
    name, framework, requires = "x-needs-missing", "Extra", ("no_such_package_at_all",)
'''
LOOPS = {
    "x-divides-twice": "DividesTwice",
    "x-syncs-too-early": "SyncsTooEarly",
    "x-steps-one-late": "StepsOneLate",
    "x-modulo": "Modulo",
    "x-clears-first": "ClearsFirst",
    "x-never-clears": "NeverClears",
    "x-one-n": "OneN",
    "x-skips-fourth": "SkipsFourth",
    "x-counts-micro-batches": "CountsMicroBatches",
}
"""Backends for semantic scenarios."""
NAMES = {
    "x-sound": "Sound",
    "x-last-only": "LastOnly",
    "x-steps-too-often": "StepsTooOften",
    "x-summed": "NotReduced",
    "x-oom": "OutOfMemory",
    "x-raises": "Raises",
    "x-killed": "Killed",
    "x-exits": "Exits",
    "x-hangs": "Hangs",
    "x-unsupported": "Unsupported",
    "x-aborts-afterwards": "AbortsAfterwards",
    "x-leaves-child": "LeavesChild",
    "x-needs-missing": "NeedsMissing",
}


def install(folder: Path) -> Path:
    """Build the wheel in ``folder`` and install it with pip; the folder to put on PYTHONPATH."""
    info = "extra_backends-1.0.dist-info"
    backends = {**NAMES, **LOOPS}.items()
    entry_points = "\n".join(["[bench.backends]", *(f"{name} = extra_backends:{cls}" for name, cls in backends)])
    files = {
        "extra_backends.py": CODE,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: extra-backends\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    record = [f"{path},sha256={_digest(text)},{len(text.encode())}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    wheel = folder / "extra_backends-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    target = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    return target


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
