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
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench.backends.base import Job
from bench.backends.plain import DDPEager, Reference

if TYPE_CHECKING:
    from torch import Tensor, nn

BYTES = "FAULT_BYTES"
"""How much ``f-prints`` prints."""
FILL = "FAULT_FILL"
"""The file that ``f-fills-disk`` writes until the disk is full."""
FOREVER_S = 3600
LATE_S = 6.5
"""Longer than the peers of a rank that failed may run on."""
ROOM_BYTES = 2**29
"""What a rank may allocate before it runs out of memory."""


class Sound(DDPEager):
    """Has no fault: the one beside the others that must not suffer."""

    name, framework = "f-sound", "Faults"


class Null(Reference):
    """Does as little as can be done: one process, nothing to wait for."""

    name, framework = "f-null", "Faults"


class Faulty(DDPEager):
    """Calls ``fail`` once in a process, before the loss of the second window's first micro-batch."""

    framework = "Faults"
    on_ranks: ClassVar[tuple[int, ...]] = (1,)
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


class Sleeps(Faulty):
    name = "f-sleeps"

    def fail(self, job: Job) -> None:
        time.sleep(FOREVER_S)


class HoldsGil(Faulty):
    """No Python code can run in the process any more, no thread and no handler of a signal."""

    name = "f-holds-gil"

    def fail(self, job: Job) -> None:
        ctypes.PyDLL(None).sleep(FOREVER_S)


class Stops(Faulty):
    """A stopped process sees no SIGTERM."""

    name = "f-stops"

    def fail(self, job: Job) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class NeverEnds(Faulty):
    """Is busy for ever: tapped events go on, so it is no hang."""

    name, on_ranks = "f-never-ends", (0, 1)

    def fail(self, job: Job) -> None:
        import torch

        batch = next(iter(job.loader))
        with torch.no_grad():
            while True:
                self.loss(self.model.module, batch)
                time.sleep(0.05)


class Raises(Faulty):
    name = "f-raises"

    def fail(self, job: Job) -> None:
        raise ValueError("no such thing: out of memory, SIGKILL, timeout")


class Exits(Faulty):
    """Ends as if all were well, but hands over no result."""

    name = "f-exits-0"

    def fail(self, job: Job) -> None:
        os._exit(0)


class KillsForkServer(Faulty):
    """Its own parent, from which the next ranks would come."""

    name = "f-kills-fork-server"

    def fail(self, job: Job) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(FOREVER_S)


class KillsLauncher(Faulty):
    """The fork server's parent, with torch elastic's agent in it."""

    name = "f-kills-launcher"

    def fail(self, job: Job) -> None:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(fields[1]), signal.SIGKILL)
        time.sleep(FOREVER_S)


class Segfaults(Faulty):
    name = "f-segfaults"

    def fail(self, job: Job) -> None:
        ctypes.string_at(0)


def limit_memory() -> None:
    """Let this process allocate little more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


class PythonOutOfMemory(Faulty):
    name = "f-oom-python"

    def fail(self, job: Job) -> None:
        limit_memory()
        self.hoard = [bytearray(2**26) for _ in itertools.count()]


class TorchOutOfMemory(Faulty):
    name = "f-oom-torch"

    def fail(self, job: Job) -> None:
        import torch

        limit_memory()
        self.hoard = [torch.ones(2**24) for _ in itertools.count()]


class KernelOutOfMemory(Faulty):
    """Takes what there is until the kernel kills it; to be run inside a cgroup with a limit, never outside."""

    name = "f-oom-killer"

    def fail(self, job: Job) -> None:
        # Should the limit not hold, this does.
        most = 12 * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        self.hoard = [bytearray(os.urandom(2**12)) * 2**14 for _ in itertools.count()]


class Prints(Faulty):
    """Prints a great deal and goes on."""

    name = "f-prints"

    def fail(self, job: Job) -> None:
        for _ in range(int(os.environ[BYTES]) // 2**20):
            sys.stdout.write(f"{'x' * 1023}\n" * 2**10)
        sys.stdout.flush()


class LeavesChildren(Faulty):
    """Forks children that ignore SIGTERM: one in the rank's process group, one in a session of its own that listens."""

    name = "f-leaves-children"

    def fail(self, job: Job) -> None:
        if os.fork() == 0:
            self.stay()
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            listening = socket.create_server(("127.0.0.1", 0))
            self.stay(listening)

    def stay(self, *_: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)


class LeavesSharedMemory(Faulty):
    """Dies without a chance to unlink its segment."""

    name = "f-leaves-shared-memory"

    def fail(self, job: Job) -> None:
        from multiprocessing.shared_memory import SharedMemory

        segment = SharedMemory(create=True, size=2**20)
        segment.buf[0] = 1
        os.kill(os.getpid(), signal.SIGKILL)


class NotANumber(Faulty):
    """A weight becomes NaN, and so do all losses after it."""

    name, on_ranks = "f-nan", (0, 1)

    def fail(self, job: Job) -> None:
        import torch

        with torch.no_grad():
            next(self.model.parameters()).fill_(math.nan)


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
            from bench.launch import rank

            rank._write = lambda path, value: path.write_bytes(self.content)


class EndsLate(DDPEager):
    """Rank 0 has something to do when the others have ended."""

    name, framework = "f-ends-late", "Faults"
    done = False

    def train(self, job: Job) -> None:
        super().train(job)
        if job.rank == 0 and not EndsLate.done:
            from bench.launch import rank

            EndsLate.done, write = True, rank._write
            rank._write = lambda path, text: (time.sleep(LATE_S), write(path, text))


class CutsResult(Corrupts):
    name, content = "f-result-cut", b'{"status": "ok", "num_parameters": 115'


class EmptyResult(Corrupts):
    """Says that all is well, and nothing else."""

    name, content = "f-result-empty", b'{"status": "ok"}'


class FillsDisk(Faulty):
    """Writes a file until the disk is full, and leaves it there."""

    name = "f-fills-disk"

    def fail(self, job: Job) -> None:
        with Path(os.environ[FILL]).open("wb", buffering=0) as file:
            while file.write(b"x" * 2**12):
                pass


def every(kind: type[Any]) -> list[type[Any]]:
    """The class if it has a name, and all below it."""
    own = [kind] if "name" in vars(kind) and kind.__module__ == __name__ else []
    return own + [one for below in kind.__subclasses__() for one in every(below)]


ALL = {one.name: one for kind in (DDPEager, Reference) for one in every(kind)}
"""The backends of this module by name."""


def named() -> str:
    """The value of BENCH_BACKENDS that adds them all."""
    return ",".join(f"{__name__}:{one.__name__}" for one in ALL.values())
