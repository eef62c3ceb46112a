"""What a window costs the host: CPU time, operators dispatched, and on CUDA kernels launched.

On one GPU no bytes move between ranks, so this and memory are what backends differ in. Each number has windows of its
own, since counting operators takes CPU time, and so does the profiler that sees the launches:

- ``cpu_s``: CPU time of all threads of the rank's process, from one update to the next. On the CPU that is mostly the
  computing itself. On CUDA the device has nothing to do when the window opens and is not waited for at its end; where
  the host runs so far ahead that the driver's queue is full, or a framework waits for the device, waiting counts too,
  since the driver spins.
- ``num_operators``: calls that went through torch's dispatcher to a backend, below autograd: operators of ATen, views
  among them, collectives, FSDP2's copies; what an operator calls inside is not counted, nor are the profiler's marks.
  In the same window those of forward and backward are compared with the plain model's: ``bench.measure.operators``.
- ``num_launches``: calls of the CUDA runtime or driver that launch a kernel, or a graph of kernels; copies and fills
  are none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

from bench.measure.exposure import WindowProfiler
from bench.measure.taps import EventKind, Taps
from bench.plan.task import CPU_WINDOWS, SETTLED_WINDOWS

LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchCooperativeKernel",
    "cudaGraphLaunch",
    "cuLaunchKernel",
    "cuLaunchCooperativeKernel",
    "cuGraphLaunch",
)
"""How the names of calls begin that launch kernels: ``cudaLaunchKernelExC``, ``cuLaunchKernelEx`` and others follow."""
NUMBERS = ("cpu_s", "num_operators", "num_launches")
"""Keys of a rank's result: of one window, None where it was not measured."""
OTHER_WORK = "other_work"
"""Another: the first operator of forward or backward that the plain model does not run as often, in words; empty if
there is none. Missing where they were not compared."""


class Instrument(Protocol):
    """Measures one window."""

    def start(self) -> None:
        """The window opens."""

    def stop(self) -> None:
        """It closes; called once for every ``start``."""


class CpuTime:
    """CPU time of this process, in seconds, with a device that is idle when the window opens."""

    def __init__(self, *, cuda: bool) -> None:
        self.seconds: float | None = None
        self._cuda = cuda
        self._began = 0.0

    def start(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.synchronize()
        self._began = time.process_time()

    def stop(self) -> None:
        self.seconds = time.process_time() - self._began


class Operators:
    """Operators dispatched, and those of forward and backward; None before the end of the window."""

    def __init__(self, taps: Taps | None = None) -> None:
        self.count: int | None = None
        self.work: Counter[str] | None = None
        self.micro_batches = 0
        """How many the window had: more than N where a framework left out a step."""
        self._taps = taps
        self._mode: Any = None

    def start(self) -> None:
        from bench.measure.operators import OperatorCounter

        self._mode = OperatorCounter(self._taps)
        self.micro_batches = -self._num_losses
        self._mode.__enter__()

    def stop(self) -> None:
        self._mode.__exit__(None, None, None)
        self.count, self.work = self._mode.count, self._mode.work
        self.micro_batches += self._num_losses

    @property
    def _num_losses(self) -> int:
        return len(self._taps.losses) if self._taps else 0


class Launches(WindowProfiler):
    """Kernels launched, as torch's profiler saw them; None before the end of the window."""

    @property
    def count(self) -> int | None:
        """Of the window that was stopped last; None if none was seen, as no window can be without."""
        return num_launches(self.events) or None


class HostCost:
    """Measures the windows after SETTLED_WINDOWS, one instrument each; a context around the training.

    Call ``see`` after every event. ``result`` is plain JSON with the keys of NUMBERS, and of OTHER_WORK if the work of
    the plain model is given.
    """

    def __init__(
        self,
        accumulate: int,
        *,
        cuda: bool,
        taps: Taps | None = None,
        plain: tuple[Counter[str], Counter[str]] | None = None,
    ) -> None:
        self._cpu = [CpuTime(cuda=cuda) for _ in range(CPU_WINDOWS)]
        self._operators = Operators(taps)
        self._plain = plain
        self._launches = Launches() if cuda else None
        self._instruments: list[Instrument] = [*self._cpu, self._operators]
        if self._launches is not None:
            self._instruments.append(self._launches)
        self._accumulate = accumulate
        self._num_losses = self._num_windows = 0
        self._running: Instrument | None = None

    @property
    def windows(self) -> int:
        """Windows to train, so that every instrument has one."""
        return SETTLED_WINDOWS + len(self._instruments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def see(self, kind: EventKind) -> None:
        """Take note of one event: a window ends with the first inner step after its last loss."""
        self._num_losses += kind is EventKind.LOSS
        windows = self._num_losses // self._accumulate
        if kind is not EventKind.STEP or windows == self._num_windows:
            return
        self._num_windows = windows
        self._stop()
        number = windows - SETTLED_WINDOWS
        if 0 <= number < len(self._instruments):
            self._running = self._instruments[number]
            self._running.start()

    def _stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    @property
    def result(self) -> dict[str, Any]:
        """What was measured of one window of this rank."""
        seconds = [one.seconds for one in self._cpu if one.seconds is not None]
        launches = None if self._launches is None else self._launches.count
        values = (min(seconds, default=None), self._operators.count, launches)
        found: dict[str, Any] = dict(zip(NUMBERS, values, strict=True))
        operators = self._operators
        if self._plain and operators.work is not None:
            from bench.measure.operators import other_work

            found[OTHER_WORK] = other_work(*self._plain, operators.work, operators.micro_batches)
        return found


def num_launches(events: Iterable[Any]) -> int | None:
    """How many of Kineto's events are launches of kernels; None if kernels ran and no launch was seen.

    ``events`` are ``torch._C._autograd._KinetoEvent``. A call of the runtime and the call of the driver that it makes
    have one correlation id, and are one launch.
    """
    calls: set[int] = set()
    unnamed = kernels = 0
    for event in events:
        on_device = event.device_type().name == "CUDA"
        kernels += on_device and not event.is_user_annotation()
        if on_device or not event.name().startswith(LAUNCHES):
            continue
        number = event.correlation_id()
        unnamed += number == 0
        calls |= {number} - {0}
    found = len(calls) + unnamed
    return found if found or not kernels else None


def merge(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One trial's cost from its ranks': of each number the largest, None if a rank lacks it; the first other work."""
    columns = {name: [rank[name] for rank in ranks] for name in NUMBERS}
    merged: dict[str, Any] = {name: None if None in values else max(values) for name, values in columns.items()}
    compared = [rank[OTHER_WORK] for rank in ranks if OTHER_WORK in rank]
    if compared:
        merged[OTHER_WORK] = next((words for words in compared if words), "")
    return merged
