"""A Chrome trace of one window of torch's profiler, with windows, micro-batches and collectives.

The ranges are opened and closed at the taps, so they are those of every framework: a micro-batch is
from its forward to the next one or to the optimizer's step, with the forward within it; what
follows the forward is the backward and what a framework does beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from bench.measure.c10d_kernels import CollectiveCall, CollectiveKernels
from bench.measure.taps import EventKind

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.optim.optimizer import Args, Kwargs

WINDOW, MICRO_BATCH, FORWARD, STEP = "window", "micro-batch", "forward", "optimizer step"
FETCH, COLLECTIVE = "fetch", "collective"
"""What the names of the ranges begin with."""


class CollectiveRanges(CollectiveKernels):
    """Makes a range of each collective, from its call until it is issued.

    The range names operation, dtype and MiB.
    """

    def __init__(self) -> None:
        super().__init__(lambda _: None)

    def _kernel(self, operator: OpOverload[..., object], name: str) -> Callable[..., object]:
        kernel = super()._kernel(operator, name)

        def ranged(keys: object, *arguments: object, **options: object) -> object:
            call = CollectiveCall(name, operator, arguments, None)
            words = f"{COLLECTIVE}: {name} of {call.dtype}, {call.payload_bytes / 2**20:.4g} MiB"
            with record_function(words):
                return kernel(keys, *arguments, **options)

        return ranged


class WindowTrace:
    """An ``Instrument`` that traces one window.

    ``on_event`` gets every tapped event, before ``start`` or ``stop``.
    """

    def __init__(self, path: Path, *, on_cuda: bool) -> None:
        """``path``: of the file that ``stop`` writes."""
        self._path, self._on_cuda = path, on_cuda
        self._collectives = CollectiveRanges()
        self._profiler: profile
        self._ranges: list[record_function] = []
        self._num_micro_batches = 0

    def start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._on_cuda:
            torch.accelerator.synchronize()
            activities.append(ProfilerActivity.CUDA)
        self._collectives.install()
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()
        self._open(WINDOW)

    def on_event(self, kind: EventKind) -> None:
        """Open and close the ranges of micro-batches and forwards."""
        if not self._ranges:
            return
        if kind is EventKind.FETCH:
            with record_function(FETCH):
                pass
        elif kind is EventKind.FORWARD:
            self._close_to(1)
            self._num_micro_batches += 1
            self._open(f"{MICRO_BATCH} {self._num_micro_batches}")
            self._open(FORWARD)
        elif kind is EventKind.LOSS:
            self._close_to(2)
        else:
            self._close_to(1)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make a range of each step of the inner optimizer, and return it.

        Where the step is given a closure that trains the last micro-batch, as by Lightning, the
        range begins after the closure.
        """

        def before(_: Optimizer, given: Args, named: Kwargs) -> tuple[Args, Kwargs] | None:
            itself, *others = given  # torch/optim/optimizer.py:profile_hook_step
            closure = named.get("closure")
            if others:
                closure = others[0]
            if closure is None:
                self._open_step()
                return None

            def trained() -> object:
                loss: object = closure()
                self._open_step()
                return loss

            if others:
                return (itself, trained, *others[1:]), named
            return given, named | {"closure": trained}

        optimizer.register_step_pre_hook(before)
        return optimizer

    def _open_step(self) -> None:
        if self._ranges:
            self._close_to(1)
            self._open(STEP)

    def stop(self) -> None:
        self._close_to(0)
        if self._on_cuda:
            torch.accelerator.synchronize()
        self._profiler.stop()
        self._collectives.remove()
        self._profiler.export_chrome_trace(str(self._path))

    def _open(self, name: str) -> None:
        opened = record_function(name)
        opened.__enter__()
        self._ranges.append(opened)

    def _close_to(self, depth: int) -> None:
        """Close the innermost ranges until so many are open."""
        while len(self._ranges) > depth:
            self._ranges.pop().__exit__(None, None, None)
