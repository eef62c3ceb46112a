"""Backends that misbehave on command: sound DDP but for one fault, in the second window and mostly on one rank.

The environment variable BENCH_BACKENDS adds them: ``named()`` is its value. Environment variables also tell a fault
what it needs to know.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psutil

from bench import files
from bench.backends.plain import DDPEager, Reference
from bench.backends.training_job import Job

if TYPE_CHECKING:
    from torch import Tensor, nn

BYTES = "FAULT_BYTES"
"""How much ``f-prints`` prints."""
FILL = "FAULT_FILL"
"""The file that ``f-fills-disk`` writes until the disk is full."""
FOREVER_S = 3600
LATE_S = 6.5
"""Longer than the peers of a rank that failed may run on."""


class Sound(DDPEager):
    """Has no fault: the one beside the others that must not suffer."""

    name, framework = "f-sound", "Faults"


class Null(Reference):
    """Does as little as can be done: one process, nothing to wait for."""

    name, framework = "f-null", "Faults"


class Faulty(DDPEager):
    """Calls ``fail`` once in a process, before the loss of the second window's first micro-batch."""

    framework = "Faults"
    on_ranks: ClassVar[tuple[int, ...]]
    failed: ClassVar[set[str]] = set()

    def train(self, job: Job) -> None:
        if job.rank in self.on_ranks:
            self.loss, self.num_losses = job.loss, 0

            def trapped(model: nn.Module, batch: Tensor) -> Tensor:
                self.num_losses += 1
                if self.num_losses == job.accumulate + 1 and self.name not in self.failed:
                    self.failed.add(self.name)
                    self.fail(job)
                return self.loss(model, batch)

            job.loss = trapped
        super().train(job)

    def fail(self, job: Job) -> None:
        raise NotImplementedError


def fault(name: str, *ranks: int) -> Callable[[Callable[[Any, Job], None]], type[Faulty]]:
    """Makes a backend of what happens on the ranks, on rank 1 unless told."""

    def made(fail: Callable[[Any, Job], None]) -> type[Faulty]:
        attributes = {"name": name, "on_ranks": ranks or (1,), "fail": fail, "__module__": __name__}
        return type(fail.__name__, (Faulty,), attributes)

    return made


@fault("f-sleeps")
def sleeps(self: Any, job: Job) -> None:
    time.sleep(FOREVER_S)


@fault("f-holds-gil")
def holds_gil(self: Any, job: Job) -> None:
    """No Python code can run in the process any more, no thread and no handler of a signal."""
    ctypes.PyDLL(None).sleep(FOREVER_S)


@fault("f-stops")
def stops(self: Any, job: Job) -> None:
    """A stopped process sees no SIGTERM."""
    os.kill(os.getpid(), signal.SIGSTOP)


@fault("f-never-ends", 0, 1)
def never_ends(self: Any, job: Job) -> None:
    """Is busy forever: tapped events go on, so it is no hang."""
    import torch

    batch = next(iter(job.loader))
    with torch.no_grad():
        while True:
            self.loss(self.model.module, batch)
            time.sleep(0.05)


@fault("f-raises")
def raises(self: Any, job: Job) -> None:
    raise ValueError("no such thing: out of memory, SIGKILL, timeout")


@fault("f-exits-0")
def exits(self: Any, job: Job) -> None:
    """Ends as if all were well, but hands over no result."""
    os._exit(0)


@fault("f-kills-fork-server")
def kills_fork_server(self: Any, job: Job) -> None:
    """Kills its own parent, from which the next ranks would come."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


@fault("f-kills-launcher")
def kills_launcher(self: Any, job: Job) -> None:
    """Kills the fork server's parent, with torch elastic's agent in it."""
    psutil.Process(os.getppid()).parent().kill()
    time.sleep(FOREVER_S)


@fault("f-segfaults")
def segfaults(self: Any, job: Job) -> None:
    ctypes.string_at(0)


def limit_memory(room: int) -> None:
    """Let this process allocate little more than it has."""
    size = psutil.Process().memory_info().vms + room
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


@fault("f-oom-torch")
def torch_out_of_memory(self: Any, job: Job) -> None:
    import torch

    limit_memory(2**29)
    self.hoard = []  # which is still there when the failure is looked at
    while True:
        self.hoard.append(torch.ones(2**24))


@fault("f-oom-killer")
def kernel_out_of_memory(self: Any, job: Job) -> None:
    """Takes what there is until the kernel kills it; to be run inside a cgroup with a limit, never outside."""
    limit_memory(12 * 2**30)  # should the cgroup's limit not hold
    self.hoard = [bytearray(os.urandom(2**12)) * 2**14 for _ in itertools.count()]


@fault("f-prints")
def prints(self: Any, job: Job) -> None:
    """Prints a great deal and goes on."""
    for _ in range(int(os.environ[BYTES]) // 2**20):
        sys.stdout.write(f"{'x' * 1023}\n" * 2**10)
    sys.stdout.flush()


@fault("f-leaves-children")
def leaves_children(self: Any, job: Job) -> None:
    """Forks children that ignore SIGTERM: one in the rank's process group, one in a session of its own that listens."""
    if os.fork() == 0:
        stay()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        listening = socket.create_server(("127.0.0.1", 0))
        stay(listening)


def stay(*_: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


@fault("f-leaves-shared-memory")
def leaves_shared_memory(self: Any, job: Job) -> None:
    """Dies without a chance to unlink its segment."""
    from multiprocessing.shared_memory import SharedMemory

    segment = SharedMemory(create=True, size=2**20)
    segment.buf[0] = 1
    os.kill(os.getpid(), signal.SIGKILL)


@fault("f-nan", 0, 1)
def not_a_number(self: Any, job: Job) -> None:
    """A weight becomes NaN, and so do all losses after it."""
    import torch

    with torch.no_grad():
        next(self.model.parameters()).fill_(math.nan)


@fault("f-fills-disk")
def fills_disk(self: Any, job: Job) -> None:
    """Writes a file until the disk is full, and leaves it there."""
    with Path(os.environ[FILL]).open("wb", buffering=0) as file:
        while file.write(b"x" * 2**12):
            pass


class StepsOnceTooFew(DDPEager):
    name, framework = "f-steps-too-few", "Faults"

    def train(self, job: Job) -> None:
        job.windows = max(1, job.windows - 1)
        super().train(job)


class Corrupts(DDPEager):
    """The result that one rank hands over is not what it should be."""

    framework = "Faults"
    content: ClassVar[bytes]

    def train(self, job: Job) -> None:
        super().train(job)
        if job.rank == 1:
            files.write = lambda path, value: path.write_bytes(self.content)


class EndsLate(DDPEager):
    """Rank 0 has something to do when the others have ended."""

    name, framework = "f-ends-late", "Faults"
    done = False

    def train(self, job: Job) -> None:
        super().train(job)
        if job.rank == 0 and not EndsLate.done:
            EndsLate.done, write = True, files.write
            files.write = lambda path, text: (time.sleep(LATE_S), write(path, text))


class CutsResult(Corrupts):
    name, content = "f-result-cut", b'{"status": "ok", "num_parameters": 115'


class EmptyResult(Corrupts):
    """Says that all is well, and nothing else."""

    name, content = "f-result-empty", b'{"status": "ok"}'


def named() -> str:
    """The value of BENCH_BACKENDS that adds all backends of this module."""
    classes = {
        name: value
        for name, value in globals().items()
        if getattr(value, "__module__", "") == __name__
    }
    return ",".join(
        f"{__name__}:{name}" for name, value in classes.items() if "name" in vars(value)
    )
