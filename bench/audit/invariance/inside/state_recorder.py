"""The state of a training after each of its first updates.

That is sketches of tensors, positions of schedules, and micro-batches.

``watched_steps`` reports backwards, clipping, batches and steps to the recorder. It imports nothing
of bench but what the recorder of ``audit`` uses, communicates nothing, draws from no global
generator, changes no tensor, and never raises into the training. An update is *settled* when the
next batch is fetched or the next backward begins: until then schedules and moving averages follow,
and ZeRO copies its parameters.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...command.inside import criteria
from ...command.inside.failures import tell
from ...command.inside.graph_survey import plain
from ...command.inside.training_place import job, place_in_world, process_name
from .found_state import FoundState, Number
from .state_records import (
    BUFFER,
    CLIPPED,
    COPY,
    GRADIENT,
    PARAMETER,
    START,
    DrawnSamples,
    Finish,
    MicroBatch,
    Position,
    Sketches,
    Trainer,
)
from .tensor_sketches import hash_of, is_readable, sketch, stored_parts
from .window_data import GraphFacts

OFTEN = 4
"""Sampling ends when every optimizer has made enough updates, or all together this many times as
many."""
MOST_SAMPLES = 100_000
"""Indices of samples that are kept."""


LiveEvent = Union[  # noqa: UP007 - older Pythons
    MicroBatch[Tensor], Sketches, Position[Number], Trainer, Finish
]
"""One whose numbers may still be on their device."""


class WaitingEvent(NamedTuple):
    """An event that is not yet written."""

    event: LiveEvent
    values: Sequence[Tensor] = ()
    """Of sketches, still on their devices."""
    hashes: Sequence[Tensor] = ()


class StateRecorder:
    """Writes a line per event until enough updates were sampled, and then nothing more."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew: a forked process trains by itself."""
        self._folder = Path(os.environ["BENCH_AUDIT_FOLDER"])
        self._num_sampled = int(os.environ["BENCH_AUDIT_UPDATES"])
        self.active = self.sampling = True
        self.inner_gradients = 0
        self._is_announced = False
        self._update = 0
        """Updates that were made."""
        self._has_stepped = False
        """Whether an optimizer has stepped since the last backward."""
        self._num_backwards = 0
        self._before_step = 0
        """Backwards before the step that runs."""
        self._backward: MicroBatch[Tensor] | None = None
        self._handles: list[RemovableHandle] = []
        self._optimized: dict[int, Tensor] = {}
        """What optimizers update, by id."""
        self._started: set[int] = set()
        self._clipped: set[int] = set()
        self._counts: dict[int, int] = {}
        """Updates by the id of an optimizer."""
        self._samples: list[DrawnSamples] = []
        self._num_samples = 0
        self._batches = 0
        self._mark: list[int] | None = None
        """The state of torch's generators at the last batch or backward."""
        self._state: FoundState | None = None
        self._waiting: list[WaitingEvent] = []
        self._rows = 0
        """Of the file of values."""
        self._seconds = 0.0

    def guard(self, method: Callable[..., None], *arguments: object) -> None:
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
        text = tell("invariance", self._folder, method, error)
        self._announce([])
        self._add(Finish(self._update, text))
        self._write()

    # What is reported

    def on_batch(self, loader: int, samples: list[int] | None) -> None:
        """A loader hands out a batch, of these samples if it shows them."""
        if self._has_stepped:
            self._settle()
        self._batches += 1
        if samples is not None and self._num_samples < MOST_SAMPLES:
            self._num_samples += len(samples)
            self._samples.append(DrawnSamples(loader, samples))
        self._mark = _generators()

    def before_backward(self, roots: Sequence[object], keeps_graph: bool) -> None:
        """A micro-batch, or a part of one."""
        if self._has_stepped:
            self._settle()
        if not self.sampling:
            return
        self._num_backwards += 1
        tensors = [root for root in roots if isinstance(root, Tensor)]
        facts = GraphFacts(tensors)
        backward: MicroBatch[Tensor] = MicroBatch(
            self._update + 1, data=facts.data, dtypes=sorted(facts.dtypes)
        )
        if len(tensors) == 1 and tensors[0].numel() == 1:
            backward.loss = plain(tensors[0]).detach().double().reshape(())
        backward.criteria = criteria.watch(tensors, self._handles, self.guard)
        backward.dropout, backward.contrasts = facts.dropout, facts.contrasts
        backward.quantizes, backward.normalizes = facts.quantizes, facts.normalizes
        if self._num_backwards == 1:
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

    def before_clip(self, parameters: Sequence[Tensor], bound: object) -> None:
        """Gradients before they are clipped."""
        self._clipped.update(map(id, parameters))
        self._sketch(GRADIENT, self._named_gradients(parameters))

    def after_clip(self) -> None:
        """What is left of them is read at the step."""

    def before_step(
        self, optimizer: Optimizer, arguments: tuple[object, ...], options: dict[str, object]
    ) -> None:
        """Parameters before their first update, and gradients if no closure is to make them."""
        parameters = _parameters(optimizer)
        for parameter in parameters:
            self._optimized[id(parameter)] = parameter
        state = self._find()
        self._before_step = self._num_backwards
        self._position(optimizer)
        new = [found for found in parameters if id(found) not in self._started]
        named = self._named(new)
        if not self._started:
            named += self._not_optimized(state)
        self._started.update(map(id, new))
        self._sketch(START, named, 0)
        if not _has_closure(arguments, options):
            self._gradients(parameters)

    def after_step(
        self, optimizer: Optimizer, arguments: tuple[object, ...], options: dict[str, object]
    ) -> None:
        """The state of the optimizer, and buffers."""
        parameters = _parameters(optimizer)
        if _has_closure(arguments, options):
            self._gradients(parameters)
        if self._num_backwards - self._before_step > 1:
            self._announce(
                ["an optimizer runs several backwards per step, which are no micro-batches"]
            )
        if not self._num_backwards:
            return
        key = id(optimizer)
        if not self._has_stepped:
            self._update += 1
            self._has_stepped = True
            self._counts[key] = self._counts.get(key, 0) + 1
        else:
            self._counts.setdefault(key, 1)
        self._of_optimizer(optimizer, parameters)
        self._sketch(BUFFER, self._find().buffers())

    def end(self) -> None:
        """The process ends by itself."""
        if self._has_stepped:
            self._settle()
        if self.sampling and self._is_announced:
            self._finish()

    # State

    def _settle(self) -> None:
        """All that follows an update has been done."""
        self._has_stepped = False
        self._clipped.clear()
        state = self._find(again=self._update == 1)
        parameters = self._named(self._optimized.values())
        self._sketch(PARAMETER, parameters + self._not_optimized(state), self._update)
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
            trainer.moving = self._state.moving()
            trainer.dropouts = self._state.dropouts()
        self._add(trainer)

    def _gradients(self, parameters: Iterable[Tensor]) -> None:
        clipped, others = [], []
        for parameter in parameters:
            if id(parameter) in self._clipped:
                clipped.append(parameter)
            else:
                others.append(parameter)
        self._sketch(CLIPPED, self._named_gradients(clipped))
        self._sketch(GRADIENT, self._named_gradients(others))

    def _of_optimizer(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """Tensors that its state has for parameters, and its count of steps."""
        kinds: dict[str, list[tuple[str, Tensor | None]]] = {}
        for parameter in parameters:
            state = optimizer.state.get(parameter)
            if not isinstance(state, dict):
                continue
            for kind, value in _tensors(state):
                named = kinds.setdefault(kind, [])
                if plain(value).shape == plain(parameter).shape:
                    named += self._names([(parameter, value)])
                else:
                    named.append((self._name(parameter), value))
        for kind, named in kinds.items():
            self._sketch(kind, named, self._update)
        steps = _num_steps(optimizer)
        if steps is not None:
            self._add(Position(self._update, {f"{type(optimizer).__name__}.step": steps}))

    def _position(self, optimizer: Optimizer) -> None:
        """The settings of a step, such as its learning rate."""
        values: dict[str, Number] = {}
        for number, group in enumerate(optimizer.param_groups):
            for key in ("lr", "weight_decay"):
                value = group.get(key)
                if isinstance(value, Tensor) and value.numel() == 1:
                    value = value.detach().double().reshape(())
                if isinstance(value, (int, float, Tensor)):
                    values[f"{type(optimizer).__name__}.{key} of group {number + 1}"] = value
        self._add(Position(self._current(), values))

    # Names and sketches

    def _name(self, parameter: Tensor) -> str:
        name = self._find().name_of(parameter)
        if name:
            return name
        number = 1
        if id(parameter) in self._optimized:
            number += list(self._optimized).index(id(parameter))
        return f"parameter {number}"

    def _named(self, parameters: Iterable[Tensor]) -> list[tuple[str, Tensor | None]]:
        return self._names((parameter, parameter) for parameter in parameters)

    def _not_optimized(self, state: FoundState) -> list[tuple[str, Tensor | None]]:
        """The model's parameters that no optimizer has, since it steps other tensors for them."""
        found: list[tuple[str, Tensor | None]] = []
        for name, parameter in state.model_parameters():
            if id(parameter) not in self._optimized:
                found.append((name, parameter))
        return found

    def _named_gradients(self, parameters: Iterable[Tensor]) -> list[tuple[str, Tensor | None]]:
        return self._names((parameter, parameter.grad) for parameter in parameters)

    def _names(
        self, pairs: Iterable[tuple[Tensor, Tensor | None]]
    ) -> list[tuple[str, Tensor | None]]:
        """Names of tensors that belong to parameters.

        Flat ones of ZeRO are cut into the parameters that they hold.
        """
        named: list[tuple[str, Tensor | None]] = []
        state = self._find()
        for parameter, value in pairs:
            parts = state.parts.get(id(parameter), ())
            if parts and value is not None and plain(value).dim() == 1:
                for part in parts:
                    values = plain(value)[part.first : part.first + part.size]
                    named.append((f"{part.name} (part)", values))
            else:
                named.append((self._name(parameter), value))
        return named

    def _current(self) -> int:
        """The number of the update that goes on."""
        if self._has_stepped:
            return self._update
        return self._update + 1

    def _sketch(
        self,
        kind: str,
        tensors: Iterable[tuple[str, Tensor | None]],
        update: int | None = None,
    ) -> None:
        """Sketch named tensors, by default of the current update; None is one without elements."""
        state = self._find()
        if update is None:
            update = self._current()
        event = Sketches(update, kind)
        values, hashes = [], []
        for name, found in tensors:
            for ending, tensor in stored_parts(found):
                if tensor.numel() and not is_readable(tensor):
                    continue
                made = sketch(tensor)
                values.append(made.values)
                hashes.append(made.bits)
                event.names.append(name + ending)
                event.sizes.append(tensor.numel())
                event.dtypes.append(str(tensor.dtype).removeprefix("torch."))
                event.replicated.append(id(found) in state.replicated)
        if values:
            self._add(event, values, hashes)

    def _add(
        self,
        event: LiveEvent,
        values: Sequence[Tensor] = (),
        hashes: Sequence[Tensor] = (),
    ) -> None:
        self._waiting.append(WaitingEvent(event, values, hashes))

    def _write(self) -> None:
        """The host waits for devices here, and nowhere else."""
        waiting, self._waiting = self._waiting, []
        lines = []
        doubles = array.array("d")
        for event, values, hashes in waiting:
            if isinstance(event, Sketches):
                event.first = self._rows
                self._rows += len(values)
                for row in _on_cpu(values):
                    doubles.extend(row)
                event.hashes = _on_cpu(hashes)
            lines.append(json.dumps({type(event).__name__.lower(): event}, default=_plain) + "\n")
        name = process_name()
        with (self._folder / f"{name}.sketches").open("ab") as file:
            file.write(doubles.tobytes())
        with (self._folder / f"{name}.states").open("a", encoding="utf-8") as file:
            file.write("".join(lines))


def _on_cpu(values: Sequence[Tensor]) -> list[Any]:
    """Tensors of one shape as numbers or lists of these, with one copy from each device."""
    by_device: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        by_device.setdefault(value.device, []).append(place)
    found: list[Any] = [None] * len(values)
    for places in by_device.values():
        rows = torch.stack([values[place] for place in places]).cpu().tolist()
        for place, row in zip(places, rows):  # noqa: B905 - older Pythons
            found[place] = row
    return found


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def _has_closure(arguments: tuple[object, ...], options: dict[str, object]) -> bool:
    """Whether a step is given a function that runs the backward; its first argument is itself."""
    return any(map(callable, (*arguments[1:], *options.values())))


def _num_steps(optimizer: Optimizer) -> Number | None:
    """Of its first parameter that has a state; None if it does not count them."""
    for state in optimizer.state.values():
        if isinstance(state, dict):
            steps: Number | None = state.get("step")
            if isinstance(steps, Tensor):
                steps = steps.detach().double().reshape(-1)[:1].sum()
            return steps
    return None


def _tensors(state: Mapping[object, object]) -> list[tuple[str, Tensor]]:
    """Those of an optimizer's state for a parameter, also those that are inside of its values."""
    found = []
    for key, value in state.items():
        if key == "step":
            continue
        if isinstance(value, Tensor):
            found.append((str(key), value))
            continue
        for name, inner in _items(value):
            if isinstance(inner, Tensor):
                found.append((f"{key}.{name}", inner))
    return found


def _items(value: object) -> Iterable[tuple[object, object]]:
    """What a list, a dictionary or an object holds, with the place, key or attribute of each."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    attributes: dict[str, object] = getattr(value, "__dict__", {})
    return attributes.items()


def _generators() -> list[int]:
    """The state of torch's generators, without waiting for a device."""
    state = [int(torch.default_generator.get_state().view(torch.int64).sum())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            with contextlib.suppress(Exception):  # before torch 2.2 there is no offset
                state.append(generator.get_offset())
    return state


def _plain(value: object) -> object:
    """For JSON."""
    if isinstance(value, Tensor):
        return value.tolist()
    return vars(value)
