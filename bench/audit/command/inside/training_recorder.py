"""What happens in a rank, update by update: samples of gradients, the criteria of losses, and what is reduced.

``install`` hooks it on backward, clipping, and the step of every optimizer. The recorder imports nothing of bench but
``c10d_kernels``: the command may run in another environment. It communicates nothing, draws from no global generator,
changes no tensor, and never raises into the training.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ....measure.c10d_kernels import CollectiveCall, CollectiveKernels  # noqa: TID252 - sitecustomize names the package
from . import criteria
from .found_objects import FoundObjects
from .leaf_probes import LeafProbe, choose
from .records import AuditedUpdate, MicroBatch, Rank

JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
"""Variables of launchers that tell one training from another."""
LEAST_BYTES = 64
"""What is smaller are metrics and norms."""


class TrainingRecorder:
    """Writes a line per update until enough were sampled, and afterwards one for each new sequence of events."""

    def __init__(self) -> None:
        self.kernels = CollectiveKernels(functools.partial(self.guard, self.on_collective), only="reduce")
        self.restart()

    def restart(self) -> None:
        """Begin anew: a forked process trains by itself."""
        self._folder, self._num_sampled = Path(os.environ["BENCH_AUDIT_FOLDER"]), int(os.environ["BENCH_AUDIT_UPDATES"])
        self.active = self.sampling = True
        self.window = AuditedUpdate(1)
        """The update that is going on, or that was made last."""
        self._num_backwards = 0
        self._probes: list[LeafProbe] = []
        self._handles: list[Any] = []
        self._clipped: dict[LeafProbe, Any] = {}
        """By what gradients were divided to clip them."""
        self._waiting: list[AuditedUpdate] = []
        self._known_events: set[str] = set()

    def guard(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call it. An error of ours is written down and ends the recording, not the training."""
        try:
            if self.active:
                method(*arguments)
        except Exception as error:
            self.active = False
            text = f"the recorder failed: {method.__name__}: {type(error).__name__}: {error}"
            self._waiting = [AuditedUpdate(self.window.number, obstacles=[text])]
            with contextlib.suppress(Exception):
                self._end_sampling()

    def _start(self, roots: list[Any]) -> None:
        if dist.is_available() and dist.is_initialized():
            place = dist.get_rank(), dist.get_world_size()
        else:
            place = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        rank = Rank(":".join(os.environ.get(name, "") for name in JOB), *place)
        self._write(rank)
        self.kernels.remove()  # where they are inherited by a fork
        self.kernels.install()
        self._objects = FoundObjects()
        self._probes = choose(roots, self._objects)
        rank.facts = self._objects.facts()
        self.window.obstacles += self._objects.obstacles([probe.leaf for probe in self._probes])
        rank.leaves = [(probe.name, probe.shape, probe.parameter()) for probe in self._probes]
        self._write(rank)

    def _end_sampling(self) -> None:
        self.sampling = False
        self.kernels.remove()
        for probe in self._probes:
            probe.handle.remove()
        self._probes.clear()
        self._write()

    def _write(self, *more: Rank | AuditedUpdate) -> None:
        lines, self._waiting = [*self._waiting, *more], []
        if lines:
            with (self._folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line, default=_plain) + "\n" for line in lines))

    def on_collective(self, collective: CollectiveCall) -> None:
        """Bytes of gradients that are reduced during an update."""
        size, dtype = collective.payload_bytes, collective.dtype
        if self.window.micro_batches and not self.window.optimizer and "float" in dtype and size >= LEAST_BYTES:
            name = f"{collective.name} of {dtype} over {collective.group.size()} ranks"
            self.window.micro_batches[-1].reduced[name] += size

    def before_backward(self, roots: Any, keeps_graph: bool) -> None:
        """Hooks on the criteria; at the first backward leaves are chosen."""
        self._num_backwards += 1
        if self.window.optimizer:
            self.window = AuditedUpdate(self.window.number + 1)
            if self.sampling and self.window.number > self._num_sampled:
                self._end_sampling()
        window = self.window
        if self.sampling:
            tensors = [root for root in roots if isinstance(root, torch.Tensor)]
            if self._num_backwards == 1:
                self._start(tensors)
            if not window.events:
                window.left = [probe.gradient() for probe in self._probes]
            if window.held and not self._held() and self._objects.zero is None:  # which takes gradients away
                window.events += "Z"
            if keeps_graph:
                window.doubts.append("backwards share a graph")
            if any(root.numel() != 1 for root in tensors):
                window.doubts.append("backward does not begin at a scalar")
            window.micro_batches.append(MicroBatch(criteria.watch(tensors, self._handles)))
            for probe in self._probes:
                probe.recording = True
        window.events += "B"

    def after_backward(self) -> None:
        """The micro-gradient."""
        if self.sampling:
            while self._handles:
                self._handles.pop().remove()
            self.window.clips_early |= any(probe.added is not None for probe in self._clipped)
            self.window.held = sorted({*self.window.held, *self._held()})
            self.window.micro_batches[-1].sample = [probe.take() for probe in self._probes]

    def _held(self) -> list[str]:
        return sorted({probe.held_dtype() for probe in self._probes} - {""})

    def before_clip(self, parameters: list[Any]) -> None:
        if self.window.events and not self.window.optimizer:
            self.window.events += "C"
        clipped = set(map(id, parameters))
        self._unclipped = [(probe, probe.gradient()) for probe in self._probes if id(probe.holder) in clipped]

    def after_clip(self) -> None:
        """By how much it was clipped."""
        for probe, before in self._unclipped:
            factor = (before / probe.gradient()).nan_to_num(1.0, 1.0, 1.0)
            self._clipped[probe] = factor * self._clipped.get(probe, 1.0)

    def _used(self, optimizer: Any) -> list[Any]:
        scale, zero = getattr(optimizer, "grad_scale", None), self._objects.zero
        factor: Any = 1.0 if scale is None else 1 / scale
        if zero is not None and (limit := zero.clip_grad):  # DeepSpeed clips by itself
            factor = (torch.as_tensor(zero._global_grad_norm) / limit).clamp(min=1.0)
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [
            probe.gradient() * (factor * self._clipped.get(probe, 1.0) if id(probe.holder) in updated else math.nan)
            for probe in self._probes
        ]

    def before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self._before_step = self._num_backwards, self._used(optimizer) if self._probes else []

    def after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """The end of an update. A closure of the optimizer may have run the backward, as Lightning's does."""
        window, name, (before, used) = self.window, type(optimizer).__name__, self._before_step
        inside = self._num_backwards - before
        if inside and self._probes:
            used = self._used(optimizer)
        if inside > 1:
            window.obstacles.append(f"{name} runs several backwards per step, which are no micro-batches")
        if torch._C._current_graph_task_id() != -1:
            window.obstacles.append("the optimizer steps inside of the backward")
        if window.events and not window.optimizer:
            window.events += "S"
            window.optimizer = f"{name} {id(optimizer):x}"
            window.asked = self._objects.asked() if self.sampling else 1
        window.used = [old.where(~old.isnan(), new) for old, new in zip(window.used or used, used, strict=True)]
        self._clipped.clear()
        if window.optimizer and (self.sampling or window.events not in self._known_events):
            self._known_events.add(window.events)
            self._waiting.append(window)
        if all(probe.leaf.device.type == "cpu" for probe in self._probes):  # elsewhere samples stay on the device
            self._write()

    def end(self) -> None:
        """The process ends by itself."""
        if self.active and self.window.events and not self.window.optimizer:
            self._waiting.append(self.window)
        self._write()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else vars(value)


def install() -> None:
    """Watch this process, and the processes that it forks."""
    recorder = TrainingRecorder()
    _wrap_backward(recorder)
    for function in (clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_):
        _wrap_clipping(function, recorder)
    register_optimizer_step_pre_hook(functools.partial(recorder.guard, recorder.before_step))
    register_optimizer_step_post_hook(functools.partial(recorder.guard, recorder.after_step))
    os.register_at_fork(after_in_child=recorder.restart)
    atexit.register(recorder.end)
    Path(os.environ["BENCH_AUDIT_FOLDER"], f"{os.getpid()}.torch").touch()


def _wrap_backward(recorder: TrainingRecorder) -> None:
    """Wrap what ``Tensor.backward`` and ``autograd.grad`` call, and check that it is called.

    The check runs no backward: once the engine has run, torch may refuse to run it in a forked process.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward
    calls: list[object] = []
    autograd._engine_run_backward = lambda *arguments, **options: calls.append(options.get("accumulate_grad"))
    torch.ones(1, requires_grad=True).sum().backward()
    autograd._engine_run_backward = run
    if calls != [True]:
        raise RuntimeError("backward of this version of torch cannot be watched")

    def backward(roots: Any, gradients: Any, retain_graph: bool, *arguments: Any, **options: Any) -> Any:
        # autograd.grad accumulates nothing; checkpointing runs backwards inside of one; fake tensors train nothing.
        is_training = options.get("accumulate_grad") and torch._C._current_graph_task_id() == -1
        if not is_training or any(type(root).__name__ == "FakeTensor" for root in roots):
            return run(roots, gradients, retain_graph, *arguments, **options)
        recorder.guard(recorder.before_backward, roots, retain_graph)
        try:
            return run(roots, gradients, retain_graph, *arguments, **options)
        finally:
            recorder.guard(recorder.after_backward)

    autograd._engine_run_backward = backward


def _wrap_clipping(original: Any, recorder: TrainingRecorder) -> None:
    def clip(parameters: Any, *arguments: Any, **options: Any) -> Any:
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        recorder.guard(recorder.before_clip, clipped)
        result = original(clipped, *arguments, **options)
        recorder.guard(recorder.after_clip)
        return result

    for module in (clip_grad, torch.nn.utils):
        for name in [name for name, value in vars(module).items() if value is original]:
            setattr(module, name, clip)
