"""What happens in a rank: backwards, clipping, zero_grad and steps, with samples of gradients and the collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from . import criteria
from .c10d_kernels import CollectiveKernels
from .event_log import EventLog
from .found_objects import FoundObjects
from .leaf_probes import LeafProbe, choose
from .used_gradients import ABSENT, UsedGradients

Method = TypeVar("Method", bound=Callable[..., None])


def guarded(method: Method) -> Method:
    """An error of ours is written down and ends the recording, not the training."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> None:
        if not self.active:
            return
        try:
            method(self, *arguments, **options)
        except Exception as error:
            self.stop()
            self.log.write("error", text=f"{type(error).__name__}: {error} ({method.__name__})")

    return call  # type: ignore[return-value]


class TrainingRecorder:
    """Writes an event for each; samples gradients until enough updates were seen."""

    def __init__(self, torch: Any, log: EventLog, updates: int) -> None:
        self.torch, self.log, self._updates_wanted = torch, log, updates
        self.kernels = CollectiveKernels(torch)
        self._begin()

    def _begin(self) -> None:
        self.active = self.sampling = True
        self.steps = self._backwards = self._updates = 0
        self._probes: list[LeafProbe] = []
        self._objects = FoundObjects()
        self._gradients = UsedGradients(self.torch, self._objects)
        self._in_backward = self._open = False
        self._losses: list[dict[str, Any]] = []
        self._handles: list[Any] = []
        self._keeps_graph = False
        self._pending: tuple[int, dict[str, Any]] = (0, {})

    def restart(self) -> None:
        """Begin anew in a forked process."""
        self.log.restart()
        self.kernels.take()
        self._begin()

    def stop(self) -> None:
        """Record nothing any more."""
        self._end_sampling()
        self.active = self.kernels.active = False

    def _end_sampling(self) -> None:
        self.sampling = False
        for probe in self._probes:
            probe.handle.remove()
        self.log.on_device = False
        self.log.flush()

    def _write(self, event: str, **values: Any) -> None:
        if traffic := self.kernels.take():
            values["traffic"] = traffic
        self.log.write(event, **values)

    @guarded
    def before_backward(self, roots: Any, *, keeps_graph: bool) -> None:
        """Sampling has an end, so that a long training is not slowed down."""
        if self.sampling and not self._open and self._updates >= self._updates_wanted:
            self._end_sampling()
        if not self.kernels.idle:
            self._write("between")
        roots = [root for root in roots if isinstance(root, self.torch.Tensor)]
        self._losses, self._keeps_graph, self._open = [], keeps_graph, True
        if self.sampling:
            self._losses = criteria.watch(roots, self._handles)
            if not self._probes:
                self._choose(roots)
            for probe in self._probes:
                probe.recording = True
        self._scalar = all(root.numel() == 1 for root in roots)
        self._in_backward = True

    def _choose(self, roots: Any) -> None:
        facts = self._objects.search()
        self._probes = [LeafProbe(self.torch, leaf, number) for number, leaf in enumerate(choose(roots))]
        self.log.on_device = any(probe.leaf.device.type != "cpu" for probe in self._probes)
        facts |= {"main_grad": True} if any(hasattr(probe.leaf, "main_grad") for probe in self._probes) else {}
        names = [getattr(self._objects.sharded.get(id(probe.leaf)), "_param_fqn", "") for probe in self._probes]
        self.log.write(
            "probes",
            facts=facts,
            leaves=[[name, *probe.shape] for name, probe in zip(names, self._probes, strict=True)],
            parameters=[probe.parameters() for probe in self._probes],
            sizes=[len(probe.flat) for probe in self._probes],
        )

    @guarded
    def after_backward(self) -> None:
        """The micro-gradient, and the factor of each criterion."""
        self._in_backward = False
        self._backwards += 1
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        values: dict[str, Any] = {}
        if self.sampling:
            for probe in self._probes:
                probe.recording = False
            values = {
                "losses": self._losses,
                "scalar": self._scalar,
                "keeps_graph": self._keeps_graph,
                "samples": [probe.take() for probe in self._probes],
                "dtypes": sorted({probe.dtype for probe in self._probes} - {""}),
                "held": sorted({self._gradients.held(probe) for probe in self._probes} - {""}),
                "tensor_parallel": any(probe.is_tensor_parallel for probe in self._probes),
            }
        self._write("backward", **values)

    def _used(self, parameters: Iterable[Any]) -> dict[str, Any]:
        if not self.sampling or not self._backwards:
            return {}
        updated = set(map(id, parameters))
        read = [self._gradients.read(probe, updated) for probe in self._probes]
        values: dict[str, Any] = {"used": [found for found, _ in read]}
        values["absent"] = ABSENT in {dtype for _, dtype in read}
        values["dtypes"] = sorted({dtype for _, dtype in read} - {"", ABSENT})
        return values

    @guarded
    def on_clip(self, parameters: list[Any]) -> None:
        """The gradient before it is clipped."""
        if self._open:
            self._write("clip", **self._used(parameters))

    @guarded
    def on_zero_grad(self) -> None:
        """Gradients are cleared; between two updates that is expected."""
        if self._open:
            self._write("zero_grad")

    @guarded
    def on_skipped_step(self) -> None:
        """A loss scaler found a gradient that is not finite, and skips the update."""
        if self._open:
            self._write("skip")
            self._open = False

    def _of_step(self, optimizer: Any) -> dict[str, Any]:
        values = self._used(parameter for group in optimizer.param_groups for parameter in group["params"])
        if values:
            values["asked"] = self._objects.asked()
            values["scale"] = getattr(optimizer, "grad_scale", None)
            if (zero := self._objects.zero) is not None:
                values["clip"] = [float(zero.clip_grad), getattr(zero, "_global_grad_norm", 0.0) or 0.0]
        return values

    @guarded
    def before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """The gradient that the optimizer is given."""
        self._pending = self._backwards, self._of_step(optimizer)

    @guarded
    def after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """The end of an update. After a backward in the optimizer's closure the gradient is read again."""
        self.steps += 1
        before, values = self._pending
        inside = self._backwards - before
        if inside:
            values = self._of_step(optimizer)
        if self._backwards:
            name = type(optimizer).__name__
            self._write("step", optimizer=name, id=id(optimizer), inside=inside, midway=self._in_backward, **values)
            self._updates += self._open
            self._open = False

    def end(self) -> None:
        """The process ends by itself."""
        if self.active and self._backwards:
            self._write("end")
        self.log.flush()
