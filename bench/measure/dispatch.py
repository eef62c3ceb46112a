"""Host cost of a window: CPU time, dispatched operators, and on CUDA launched kernels.

On one GPU no bytes move between ranks, so backends differ only in this and in memory. Each number
has its own windows, because counting operators and profiling launches take CPU time:

- ``cpu_s``: CPU time of all threads of the rank's process, from one update to the next. On the CPU
  this is mostly the computation itself. On CUDA the device is idle when the window opens and is not
  synchronized at its end. Time spent waiting counts too, because the driver spins: when its queue
  is full, or a framework synchronizes.
- ``num_operators``: calls through torch's dispatcher to a backend, below autograd: ATen operators
  including views, collectives, FSDP2's copies. Nested calls inside an operator and profiler marks
  are not counted. In the same window the operators of forward and backward are compared with the
  plain model's (``bench.measure.operators``).
- ``num_launches``: calls of the CUDA runtime or driver that launch a kernel or a graph; copies and
  fills do not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.measure.exposure import WindowProfiler
from bench.measure.taps import Instrument, Taps
from bench.plan.task import CPU_WINDOWS

if TYPE_CHECKING:
    from torch._C._autograd import _KinetoEvent

    from bench.measure.operators import PlainWork

LAUNCHES = (
    *("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cudaGraphLaunch"),
    *("cuLaunchKernel", "cuLaunchCooperativeKernel", "cuGraphLaunch"),
)
"""Prefixes of calls that launch kernels; ``cudaLaunchKernelExC``, ``cuLaunchKernelEx`` and others
match too."""
NUMBERS = ("cpu_s", "num_operators", "num_launches")
"""Keys of a rank's result, per window; None if not measured."""
OTHER_WORK = "other_work"
"""Another key: the first operator of forward or backward whose number of runs differs from the
plain model's, in words; empty if there is none, absent if they were not compared."""
PRODUCTS = "product_flops"
"""Another: FLOPs of the plain model's matrix products in a window; absent without that model."""


class CpuTime:
    """CPU time of this process in seconds, starting with an idle device."""

    def __init__(self, *, cuda: bool) -> None:
        self.seconds: float | None = None
        self._cuda = cuda
        self._began = 0.0

    def start(self) -> None:
        if self._cuda:
            import torch

            torch.accelerator.synchronize()
        self._began = time.process_time()

    def stop(self) -> None:
        self.seconds = time.process_time() - self._began


class HostCost:
    """Instruments for a window each; ``result`` is plain JSON with the keys of NUMBERS.

    It has OTHER_WORK too if ``plain``, the work of the plain model, is given.
    """

    def __init__(
        self, *, cuda: bool, taps: Taps | None = None, plain: PlainWork | None = None
    ) -> None:
        from bench.measure.operators import OperatorCounter

        self._cpu = [CpuTime(cuda=cuda) for _ in range(CPU_WINDOWS)]
        self._operators = OperatorCounter(taps)
        self._plain = plain
        self.instruments: list[Instrument] = [*self._cpu, self._operators]
        self._profiler = None
        if cuda:
            self._profiler = WindowProfiler()
            self.instruments.append(self._profiler)

    @property
    def result(self) -> dict[str, object]:
        operators = self._operators
        found: dict[str, object] = dict.fromkeys(NUMBERS)
        measured = [part.seconds for part in self._cpu if part.seconds is not None]
        if measured:
            found["cpu_s"] = min(measured)
        if operators.ended:
            found["num_operators"] = operators.count
        if self._profiler is not None and (number := num_launches(self._profiler.events)):
            found["num_launches"] = number  # none seen means that profiling failed
        if self._plain and operators.ended:
            found[OTHER_WORK] = self._plain.other(operators.work, operators.micro_batches)
            found[PRODUCTS] = self._plain.product_flops * operators.micro_batches
        return found


def num_launches(events: Iterable[_KinetoEvent]) -> int | None:
    """The number of kernel launches among the events; None if kernels ran but none was seen.

    A runtime call and the driver call it makes share a correlation id and count as one launch.
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
    if found or not kernels:
        return found
    return None


def merge(ranks: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Merge the ranks' costs: the maximum of each number, and the first other work.

    A number is None if a rank lacks it.
    """
    merged: dict[str, object] = {}
    for name in NUMBERS:
        values = [rank[name] for rank in ranks]
        merged[name] = None
        if None not in values:
            merged[name] = max(values)
    for rank in ranks:
        if OTHER_WORK in rank and not merged.get(OTHER_WORK):
            merged[OTHER_WORK] = rank[OTHER_WORK]
    if PRODUCTS in ranks[0]:
        merged[PRODUCTS] = ranks[0][PRODUCTS]
    return merged
