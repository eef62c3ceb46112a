"""What happens in a rank: backwards, clipping, zero_grad and steps, with samples of gradients and the collectives."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import criteria
from .event_log import EventLog
from .found_objects import FoundObjects
from .leaf_probes import LeafProbe, choose
from .used_gradients import UsedGradients

if TYPE_CHECKING:
    from bench.measure.c10d_kernels import CollectiveCall, CollectiveKernels
else:  # beside this file, as sitecustomize loads them
    from .c10d_kernels import CollectiveCall, CollectiveKernels

MOST_EVENTS = 100_000
"""A long training does not fill the disk."""


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """An error of ours is written down and ends the recording, not the training."""

    @functools.wraps(method)
    def call(self: TrainingRecorder, *arguments: Any, **options: Any) -> None:
        if not self.active:
            return
        try:
            method(self, *arguments, **options)
        except Exception as error:
            self.active = False
            self._log.write("error", text=f"{method.__name__}: {type(error).__name__}: {error}")
            self._end_sampling()

    return call


class TrainingRecorder:
    """Writes an event for each; samples gradients until enough updates were seen."""

    def __init__(self) -> None:
        self._traffic: Counter[tuple[str, str, int]] = Counter()
        self.kernels = CollectiveKernels(self.on_collective, only="reduce")
        self.kernels.install()
        self.restart()

    def restart(self) -> None:
        """Begin anew: a forked process trains by itself."""
        self._log = EventLog(Path(os.environ["BENCH_AUDIT_FOLDER"]))
        self._sampled_updates = int(os.environ["BENCH_AUDIT_UPDATES"])
        self._traffic.clear()
        self.active = self.sampling = True
        self._in_backward = self._window_open = self._on_device = False
        self.steps = self._backwards = self._updates = self._events = 0
        self._probes: list[LeafProbe] = []
        self._handles: list[Any] = []
        self._objects = FoundObjects()
        self._gradients = UsedGradients(self._objects)

    @guarded
    def on_collective(self, collective: CollectiveCall) -> None:
        """Bytes of reductions of floating-point tensors."""
        if "float" in collective.dtype:
            key = collective.name, collective.dtype, collective.group.size()
            self._traffic[key] += collective.payload_bytes

    def _end_sampling(self) -> None:
        self.sampling = self._on_device = False
        for probe in self._probes:
            probe.handle.remove()
        self._log.flush()

    def _write(self, event: str, **values: Any) -> None:
        self._log.write(event, traffic=[[*key, size] for key, size in self._traffic.items()], **values)
        self._traffic.clear()
        self._events += 1
        self.active = self._events < MOST_EVENTS

    @guarded
    def before_backward(self, roots: Any, *, keeps_graph: bool) -> None:
        """Hooks on the criteria; at the first backward probes are chosen."""
        if self.sampling and not self._window_open and self._updates >= self._sampled_updates:
            self._end_sampling()
        if self._traffic:
            self._write("between")
        self._in_backward = self._window_open = True
        if not self.sampling:
            return
        tensors = [root for root in roots if isinstance(root, torch.Tensor)]
        if not self._probes:
            self._choose(tensors)
        self._loss: dict[str, Any] = {"losses": criteria.watch(tensors, self._handles), "keeps_graph": keeps_graph}
        self._loss["scalar"] = all(root.numel() == 1 for root in tensors)
        for probe in self._probes:
            probe.recording = True

    def _choose(self, roots: list[Any]) -> None:
        self._objects.search()
        self._probes = choose(roots)
        self._on_device = any(probe.leaf.device.type != "cpu" for probe in self._probes)
        names = [getattr(self._objects.sharded.get(id(probe.leaf)), "_param_fqn", "") for probe in self._probes]
        megatron = {"main_grad": True} if any(hasattr(probe.leaf, "main_grad") for probe in self._probes) else {}
        self._write(
            "probes",
            facts=self._objects.facts() | megatron,
            leaves=[[name, *probe.shape] for name, probe in zip(names, self._probes, strict=True)],
            parameters=[probe.parameter() for probe in self._probes],
            coordinates=sum(len(probe.flat) for probe in self._probes),
        )

    @guarded
    def after_backward(self) -> None:
        """The micro-gradient, and the factor of each criterion."""
        self._in_backward = False
        self._backwards += 1
        values: dict[str, Any] = {}
        if self.sampling:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            values = self._loss | {
                "samples": [probe.added for probe in self._probes],
                "distributed": any(probe.is_distributed for probe in self._probes),
                "dtypes": sorted({probe.dtype for probe in self._probes} - {""}),
                "held": sorted({self._gradients.held_dtype(probe) for probe in self._probes} - {""}),
            }
            for probe in self._probes:
                probe.recording, probe.added = False, None
        self._write("backward", **values)

    def _used(self, parameters: Iterable[Any]) -> list[Any]:
        updated = set(map(id, parameters))
        return [self._gradients.read(probe, updated) for probe in self._probes]

    @guarded
    def before_clip(self, parameters: list[Any]) -> None:
        """The gradient that is clipped."""
        self._unclipped = self._used(parameters) if self.sampling else []

    @guarded
    def after_clip(self, parameters: list[Any]) -> None:
        """By how much each sample was clipped."""
        if self._window_open:
            self._write("clip", leaves=[bool(used) for used in self._unclipped])
        clipped = self._used(parameters) if self.sampling else []
        for probe, before, after in zip(self._probes, self._unclipped, clipped, strict=False):
            if before and after:
                probe.clipped = probe.clipped * (before[1] / after[1]).nan_to_num(1.0, 1.0, 1.0)

    @guarded
    def on_event(self, event: str) -> None:
        """Gradients are cleared although no step has used them, or a step is skipped."""
        if self._window_open:
            self._write(event)
            self._window_open = event != "skip"

    def _of_step(self, optimizer: Any) -> dict[str, Any]:
        """The gradient that the optimizer uses, as it was before it was scaled and clipped."""
        if not self.sampling:
            return {}
        scale, zero = getattr(optimizer, "grad_scale", None), self._objects.by_name.get("ZeROOptimizer")
        factor: Any = 1.0 if scale is None else 1 / scale
        if zero is not None and (limit := zero.clip_grad):  # DeepSpeed clips by itself
            factor = (torch.as_tensor(zero._global_grad_norm) / limit).clamp(min=1.0)
        used = self._used(parameter for group in optimizer.param_groups for parameter in group["params"])
        for probe, leaf in zip(self._probes, used, strict=True):
            if leaf:
                leaf[1] = leaf[1] * probe.clipped * factor
                probe.clipped = 1.0
        return {"used": used, "facts": self._objects.facts()}

    @guarded
    def before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """The gradient that the optimizer is given."""
        self._before = self._backwards, self._of_step(optimizer)

    @guarded
    def after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """The end of an update. A closure of the optimizer may have run the backward, as Lightning's does."""
        self.steps += 1
        backwards, values = self._before
        inside = self._backwards - backwards
        if inside:
            values = self._of_step(optimizer)
        if self._backwards:
            name = type(optimizer).__name__
            self._write("step", optimizer=name, id=id(optimizer), inside=inside, midway=self._in_backward, **values)
            self._updates += self._window_open
            self._window_open = False
        if not self._on_device:  # a training that is killed loses its open window alone
            self._log.flush()

    def end(self) -> None:
        """The process ends by itself."""
        if self.active and self._backwards:
            self._write("end")
        self._log.flush()
