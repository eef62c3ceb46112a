"""What happens in a rank: backwards, clipping, zero_grad and steps, with samples of gradients and the collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from . import criteria
from .c10d_kernels import CollectiveKernels
from .event_log import EventLog
from .found_objects import FoundObjects
from .leaf_probes import LeafProbe, choose
from .used_gradients import UsedGradients

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
            self.end_sampling()
            self.log.write("error", text=f"{method.__name__}: {type(error).__name__}: {error}")

    return call


class TrainingRecorder:
    """Writes an event for each; samples gradients until enough updates were seen."""

    def __init__(self, torch: Any, log: EventLog, updates: int) -> None:
        self.torch, self.log, self._sampled_updates = torch, log, updates
        self.kernels = CollectiveKernels(torch)
        self.restart()

    def restart(self) -> None:
        """Begin anew: a forked process trains by itself."""
        self.log.restart()
        self.kernels.traffic.clear()
        self.active = self._sampling = True
        self._in_backward = self._window_open = False
        self.steps = self._backwards = self._updates = self._events = 0
        self._probes: list[LeafProbe] = []
        self._handles: list[Any] = []
        self._objects = FoundObjects()
        self._gradients = UsedGradients(self.torch, self._objects)

    def end_sampling(self) -> None:
        """Remove all hooks of leaves."""
        self._sampling = False
        for probe in self._probes:
            probe.handle.remove()
        self.log.on_device = False
        self.log.flush()

    def _write(self, event: str, **values: Any) -> None:
        traffic = [[*key, size] for key, size in self.kernels.traffic.items()]
        self.kernels.traffic.clear()
        self.log.write(event, traffic=traffic, **values)
        self._events += 1
        self.active = self._events < MOST_EVENTS

    @guarded
    def before_backward(self, roots: Any, *, keeps_graph: bool) -> None:
        """Hooks on the criteria; at the first backward probes are chosen."""
        if self._sampling and not self._window_open and self._updates >= self._sampled_updates:
            self.end_sampling()
        if self.kernels.traffic:
            self._write("between")
        self._in_backward = self._window_open = True
        if not self._sampling:
            return
        tensors = [root for root in roots if isinstance(root, self.torch.Tensor)]
        if not self._probes:
            self._choose(tensors)
        self._loss: dict[str, Any] = {"losses": criteria.watch(tensors, self._handles), "keeps_graph": keeps_graph}
        self._loss["scalar"] = all(root.numel() == 1 for root in tensors)
        for probe in self._probes:
            probe.recording = True

    def _choose(self, roots: list[Any]) -> None:
        facts = self._objects.search()
        self._probes = choose(self.torch, roots)
        self.log.on_device = any(probe.leaf.device.type != "cpu" for probe in self._probes)
        if any(hasattr(probe.leaf, "main_grad") for probe in self._probes):
            facts["main_grad"] = True
        names = [getattr(self._objects.sharded.get(id(probe.leaf)), "_param_fqn", "") for probe in self._probes]
        self._write(
            "probes",
            facts=facts,
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
        if self._sampling:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            for probe in self._probes:
                probe.recording = False
            values = self._loss | {
                "samples": [probe.take() for probe in self._probes],
                "distributed": any(probe.is_distributed for probe in self._probes),
                "dtypes": sorted({probe.dtype for probe in self._probes} - {""}),
                "held": sorted({self._gradients.held_dtype(probe) for probe in self._probes} - {""}),
            }
        self._write("backward", **values)

    def _used(self, parameters: Iterable[Any]) -> dict[str, Any]:
        if not self._sampling:
            return {}
        updated = set(map(id, parameters))
        return {"used": [self._gradients.read(probe, updated) for probe in self._probes]}

    @guarded
    def on_clip(self, parameters: list[Any]) -> None:
        """The gradient before it is clipped."""
        if self._window_open:
            self._write("clip", **self._used(parameters))

    @guarded
    def on_zero_grad(self) -> None:
        """Gradients are cleared although no step has used them."""
        if self._window_open:
            self._write("zero_grad")

    @guarded
    def on_skipped_step(self) -> None:
        """A loss scaler found a gradient that is not finite."""
        if self._window_open:
            self._write("skip")
            self._window_open = False

    def _of_step(self, optimizer: Any) -> dict[str, Any]:
        values = self._used(parameter for group in optimizer.param_groups for parameter in group["params"])
        if values:
            values |= {"asked": self._objects.asked(), "scale": getattr(optimizer, "grad_scale", None)}
        if values and (zero := self._objects.zero) is not None:
            values["clip"] = [zero.clip_grad, getattr(zero, "_global_grad_norm", 0.0)]
        return values

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

    def end(self) -> None:
        """The process ends by itself."""
        if self.active and self._backwards:
            self._write("end")
        self.log.flush()
