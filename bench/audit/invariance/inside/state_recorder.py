"""What a training's state is after each of its first updates: sketches of all tensors, positions, and micro-batches.

``watched_steps`` reports backwards, clipping, batches and steps to the recorder. It imports nothing of bench but what
the recorder of ``audit`` uses, communicates nothing, draws from no global generator, changes no tensor, and never
raises into the training. An update is *settled* when the next batch is fetched or the next backward begins: until
then schedules and moving averages follow, and ZeRO copies its parameters.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ...command.inside import criteria
from ...command.inside.graph_survey import plain
from ...command.inside.training_place import job, place_in_world
from .found_state import FoundState
from .state_records import (
    BUFFER,
    CLIPPED,
    COPY,
    GRADIENT,
    PARAMETER,
    START,
    Finish,
    MicroBatch,
    Position,
    Sketches,
    Trainer,
)
from .tensor_sketches import hash_of, is_readable, sketch
from .window_data import GraphFacts

OFTEN = 4
"""Sampling ends when every optimizer has made enough updates, or all together this many times as many."""
MOST_SAMPLES = 100_000
"""Indices of samples that are kept."""


class StateRecorder:
    """Writes a line per event until enough updates were sampled, and then nothing more."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew: a forked process trains by itself."""
        self._folder = Path(os.environ["BENCH_AUDIT_FOLDER"])
        self._num_sampled = int(os.environ["BENCH_AUDIT_UPDATES"])
        self.active = self.sampling = True
        self._is_announced = False
        self._update = 0
        """Updates that were made."""
        self._has_stepped = False
        """Whether an optimizer has stepped since the last backward."""
        self._num_backwards = 0
        self._before_step = 0
        """Backwards before the step that runs."""
        self._backward: MicroBatch | None = None
        self._handles: list[Any] = []
        self._optimized: dict[int, Any] = {}
        """What optimizers update, by id."""
        self._started: set[int] = set()
        self._clipped: set[int] = set()
        self._counts: dict[int, int] = {}
        """Updates by the id of an optimizer."""
        self._samples: list[Any] = []
        self._num_samples = 0
        self._batches = 0
        self._mark: Any = None
        """The state of torch's generators at the last batch or backward."""
        self._state: FoundState | None = None
        self._waiting: list[tuple[Any, list[Any]]] = []
        """Events, and the sketches that belong to them."""
        self._rows = 0
        """Of the file of values."""
        self._seconds = 0.0

    def guard(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call it. An error of ours is written down and ends the recording, not the training."""
        if not (self.active and self.sampling):
            return
        begin = time.perf_counter()
        try:
            with torch.no_grad():
                method(*arguments)
        except Exception as error:
            self.active = False
            self._waiting = []
            with contextlib.suppress(Exception):
                self._fail(method, error)
            self._forget()
        self._seconds += time.perf_counter() - begin

    def _fail(self, method: Callable[..., None], error: Exception) -> None:
        if isinstance(error, OSError):
            print(
                f"invariance: cannot record in {self._folder} (TMPDIR): {error.strerror}",
                file=sys.stderr,
            )
        text = f"the recorder failed: {method.__name__}: {type(error).__name__}: {error}"
        self._announce([])
        self._add(Finish(self._update, text))
        self._write()

    # What is reported

    def on_batch(self, loader: Any, samples: list[int] | None) -> None:
        """A loader hands out a batch, of these samples if it shows them."""
        if self._has_stepped:
            self._settle()
        self._batches += 1
        if samples is not None and self._num_samples < MOST_SAMPLES:
            self._num_samples += len(samples)
            self._samples.append([loader, samples])
        self._mark = _generators()

    def before_backward(self, roots: Any, keeps_graph: bool) -> None:
        """A micro-batch, or a part of one."""
        if self._has_stepped:
            self._settle()
        if not self.sampling:
            return
        self._num_backwards += 1
        tensors = [root for root in roots if isinstance(root, torch.Tensor)]
        facts = GraphFacts(tensors)
        backward = MicroBatch(self._update + 1, data=facts.data, dtypes=sorted(facts.dtypes))
        if len(tensors) == 1 and tensors[0].numel() == 1:
            scalar: Any = plain(tensors[0]).detach().double().reshape(())
            backward.loss = scalar  # a number once it is written
        backward.criteria = criteria.watch(tensors, self._handles)
        backward.dropout, backward.contrasts = facts.dropout, facts.contrasts
        if not self._update:
            backward.leaves = hash_of(facts.leaves)
        backward.drew = self._mark is not None and _generators() != self._mark
        backward.samples, self._samples = self._samples, []
        backward.batches, self._batches = self._batches, 0
        self._backward = backward

    def after_backward(self) -> None:
        """The criteria have their factors now."""
        while self._handles:
            self._handles.pop().remove()
        if self._backward is not None:
            self._add(self._backward)
            self._backward = None
        self._mark = _generators()

    def before_clip(self, parameters: list[Any], bound: Any) -> None:
        """Gradients before they are clipped."""
        self._clipped.update(map(id, parameters))
        self._sketch(GRADIENT, self._named_gradients(parameters))

    def after_clip(self) -> None:
        """What is left of them is read at the step."""

    def before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """Parameters before their first update, and gradients if no closure is to make them."""
        parameters = _parameters(optimizer)
        self._optimized.update((id(parameter), parameter) for parameter in parameters)
        state = self._find()
        self._before_step = self._num_backwards
        self._position(optimizer)
        new = [found for found in parameters if id(found) not in self._started]
        if not self._started:
            new += [
                parameter
                for _, parameter in state.model_parameters()
                if id(parameter) not in self._optimized
            ]
        self._started.update(map(id, new))
        self._sketch(START, self._named(new))
        closures = [*arguments[1:], *options.values()]
        if not any(callable(found) for found in closures):
            self._gradients(parameters)

    def after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """The state of the optimizer, and buffers."""
        parameters = _parameters(optimizer)
        closures = [*arguments[1:], *options.values()]
        inside = self._num_backwards - self._before_step
        if any(callable(found) for found in closures):
            self._gradients(parameters)
        if inside > 1:
            self._announce(
                ["an optimizer runs several backwards per step, which are no micro-batches"]
            )
        if not self._num_backwards:
            return
        if not self._has_stepped:
            self._update += 1
            self._has_stepped = True
            self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        elif id(optimizer) not in self._counts:
            self._counts[id(optimizer)] = 1
        self._of_optimizer(optimizer, parameters)
        self._sketch(BUFFER, self._find().buffers())

    def end(self) -> None:
        """The process ends by itself."""
        if self._has_stepped:
            self._settle()
        if self.sampling and self._is_announced:
            self._finish()

    # State

    @property
    def _current(self) -> int:
        """The number of the update that goes on."""
        return self._update + (not self._has_stepped)

    def _settle(self) -> None:
        """All that follows an update has been done."""
        self._has_stepped = False
        self._clipped.clear()
        state = self._find(again=self._update == 1)
        updated = {id(part) for part in self._optimized.values()}
        others = [
            (name, parameter)
            for name, parameter in state.model_parameters()
            if id(parameter) not in updated
        ]
        self._sketch(PARAMETER, [*self._named(self._optimized.values()), *others], self._update)
        self._sketch(COPY, state.copies(), self._update)
        self._add(Position(self._update, state.positions()))
        self._announce([])
        self._write()
        self._mark = _generators()
        is_enough = bool(self._counts) and min(self._counts.values()) >= self._num_sampled
        if is_enough or self._update >= OFTEN * self._num_sampled:
            self._finish()

    def _finish(self) -> None:
        self._add(Finish(self._update, seconds=self._seconds))
        self._write()
        self._forget()

    def _forget(self) -> None:
        """Keep nothing alive that the training has."""
        self.sampling = False
        self._state = None
        self._optimized.clear()
        self._samples.clear()
        self._waiting.clear()
        while self._handles:
            self._handles.pop().remove()

    def _find(self, again: bool = False) -> FoundState:
        """Look for objects, once more where some may have been made since."""
        if self._state is None or again:
            self._state = FoundState(set(self._optimized))
        return self._state

    def _announce(self, obstacles: list[str]) -> None:
        """Write down what this process is, once, and whatever stands in the way of a comparison."""
        if self._is_announced and not obstacles:
            return
        self._is_announced = True
        trainer = Trainer(job(), *place_in_world(), obstacles=obstacles)
        if self._state is not None:
            trainer.facts = self._state.objects.facts()
            trainer.batch_norms = self._state.batch_norms()
            trainer.dropouts = self._state.dropouts()
        self._add(trainer)

    def _gradients(self, parameters: list[Any]) -> None:
        clipped = [found for found in parameters if id(found) in self._clipped]
        others = [found for found in parameters if id(found) not in self._clipped]
        self._sketch(CLIPPED, self._named_gradients(clipped))
        self._sketch(GRADIENT, self._named_gradients(others))

    def _of_optimizer(self, optimizer: Any, parameters: list[Any]) -> None:
        """Tensors that its state has for parameters, and its count of steps."""
        kinds: dict[str, list[tuple[str, Any]]] = {}
        for parameter in parameters:
            state = optimizer.state.get(parameter)
            if not isinstance(state, dict):
                continue
            for key, value in _tensors(state):
                is_alike = tuple(plain(value).shape) == tuple(plain(parameter).shape)
                named = [(parameter, value)]
                names = self._names(named) if is_alike else [(self._name(parameter), value)]
                kinds.setdefault(key, []).extend(names)
        for kind, named in kinds.items():
            self._sketch(kind, named, self._update)
        steps = [state.get("step") for state in optimizer.state.values() if isinstance(state, dict)]
        if steps and steps[0] is not None:
            name = f"{type(optimizer).__name__}.step"
            value = steps[0]
            if isinstance(value, torch.Tensor):
                value = value.detach().double().reshape(-1)[:1].sum()
            self._add(Position(self._update, {name: value}))

    def _position(self, optimizer: Any) -> None:
        """The settings of a step, such as its learning rate."""
        values: dict[str, Any] = {}
        for number, group in enumerate(optimizer.param_groups):
            for key in ("lr", "weight_decay"):
                value = group.get(key)
                if isinstance(value, torch.Tensor) and value.numel() == 1:
                    value = value.detach().double().reshape(())
                if isinstance(value, (int, float, torch.Tensor)):
                    values[f"{type(optimizer).__name__}.{key} of group {number + 1}"] = value
        self._add(Position(self._current, values))

    # Names and sketches

    def _name(self, parameter: Any) -> str:
        name = self._find().name_of(parameter)
        if name:
            return name
        number = (
            list(self._optimized).index(id(parameter)) if id(parameter) in self._optimized else 0
        )
        return f"parameter {number + 1}"

    def _named(self, parameters: Iterable[Any]) -> list[tuple[str, Any]]:
        return self._names([(parameter, parameter) for parameter in parameters])

    def _named_gradients(self, parameters: Iterable[Any]) -> list[tuple[str, Any]]:
        return self._names([(parameter, parameter.grad) for parameter in parameters])

    def _names(self, pairs: list[tuple[Any, Any]]) -> list[tuple[str, Any]]:
        """Names of tensors that belong to parameters; flat ones of ZeRO are cut into the parameters that they hold."""
        named: list[tuple[str, Any]] = []
        state = self._find()
        for parameter, value in pairs:
            parts = state.parts.get(id(parameter), ())
            whole = None if value is None else plain(value)
            if whole is not None and parts and whole.dim() == 1:
                for name, start, count in parts:
                    named.append((f"{name} (part)", whole[start : start + count]))
            else:
                named.append((self._name(parameter), value))
        return named

    def _sketch(
        self, kind: str, tensors: Iterable[tuple[str, Any]], update: int | None = None
    ) -> None:
        """Sketch named tensors; None is one without elements."""
        state = self._find()
        number = self._current if update is None else update
        event = Sketches(0 if kind == START else number, kind, [], [], [], [])
        values: list[Any] = []
        for name, found in tensors:
            tensor: Any = torch.zeros(0) if found is None else plain(found)
            if not isinstance(tensor, torch.Tensor) or (tensor.numel() and not is_readable(tensor)):
                continue
            made = sketch(tensor)
            values.append(made[0])
            event.hashes.append(made[1])
            event.names.append(name)
            event.sizes.append(tensor.numel())
            event.dtypes.append(str(tensor.dtype).removeprefix("torch."))
            event.replicated.append(id(found) in state.replicated)
        if values:
            self._add(event, values)

    def _add(self, event: Any, values: list[Any] | None = None) -> None:
        self._waiting.append((event, values or []))

    def _write(self) -> None:
        """The host waits for devices here, and nowhere else."""
        waiting, self._waiting = self._waiting, []
        lines = []
        doubles = array.array("d")
        for event, values in waiting:
            if values:
                event.first = self._rows
                self._rows += len(values)
                for row in _on_cpu(values):
                    doubles.extend(row)
                event.hashes = _on_cpu(event.hashes)
            lines.append(json.dumps({type(event).__name__.lower(): event}, default=_plain) + "\n")
        name = f"{os.getpid()}"
        with (self._folder / f"{name}.sketches").open("ab") as file:
            file.write(doubles.tobytes())
        with (self._folder / f"{name}.states").open("a", encoding="utf-8") as file:
            file.write("".join(lines))


def _on_cpu(values: list[Any]) -> list[Any]:
    """Tensors of one shape as lists, with one copy from each device."""
    by_device: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        by_device.setdefault(value.device, []).append(place)
    found: list[Any] = [None] * len(values)
    for places in by_device.values():
        rows = torch.stack([values[place] for place in places]).cpu().tolist()
        for place, row in zip(places, rows):  # noqa: B905 - older Pythons
            found[place] = row
    return found


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _tensors(state: dict[Any, Any]) -> list[tuple[str, Any]]:
    """Tensors of an optimizer's state for a parameter, also those in lists, dictionaries and objects within it."""
    found = []
    for key, value in state.items():
        if key == "step":
            continue
        inner: Iterable[tuple[Any, Any]]
        if isinstance(value, torch.Tensor):
            found.append((str(key), value))
            continue
        if isinstance(value, dict):
            inner = value.items()
        elif isinstance(value, (list, tuple)):
            inner = enumerate(value)
        else:
            inner = getattr(value, "__dict__", {}).items()
        for name, each in inner:
            if isinstance(each, torch.Tensor):
                found.append((f"{key}.{name}", each))
    return found


def _generators() -> Any:
    """The state of torch's generators, without waiting for a device."""
    state: list[int] = [int(torch.default_generator.get_state().view(torch.int64).sum())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            with contextlib.suppress(Exception):  # before torch 2.2 there is no offset
                state.append(generator.get_offset())
    return state


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else vars(value)
