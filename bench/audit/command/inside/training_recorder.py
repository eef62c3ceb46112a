"""What happens in a rank: samples of gradients, the criteria of losses, and what is reduced.

``watched_calls`` reports backwards, clipping, hooks, batches and steps to the recorder. It imports
nothing of bench but ``c10d_kernels``: the command may run in another environment. It communicates
nothing, draws from no global generator, changes no tensor, and never raises into the training.
"""

from __future__ import annotations

import binascii
import contextlib
import functools
import json
import math
import os
import sys
import weakref
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Tuple  # noqa: UP035 - older Pythons

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ....measure.c10d_kernels import CollectiveCall, CollectiveKernels
from . import criteria
from .autograd_nodes import are_shapes_shown
from .failures import tell
from .found_objects import OBSTACLES, PARALLEL, FoundObjects, HeldSchedule
from .graph_survey import GraphSurvey, plain, survey
from .leaf_probes import (
    FEW_COORDINATES,
    MANY_LEAVES,
    MOST_AT_ONCE,
    MOST_COORDINATES,
    MOST_LEAVES,
    START_VALUES,
    LeafProbe,
    evenly,
)
from .records import (
    NOT_SCALAR,
    SAMPLES,
    Backward,
    Clipping,
    End,
    Event,
    HookedGradient,
    Leaf,
    Rank,
    Step,
)
from .training_place import job, place_in_world, process_name

INJECTED = "losses whose gradient a function of the model makes"
LEAST_BYTES = 64
"""What is smaller are metrics and norms."""
LEAST_ELEMENTS = 2
"""Smaller leaves are not sampled."""
MOST_SCANS = 8
"""Of all objects: where new leaves appear they are looked for again."""
MOST_COPIES = 4
MOST_WATCHED = 16
"""Leaves of which it is seen whether they move between backwards."""
OFTEN = 8
"""Sampling ends when every optimizer has made enough updates, or one this many times as many, or
all together twice as many as that."""
MOST_OPEN = 4096
"""Backwards without a step of an optimizer of torch, after which sampling ends."""
MOST_WAITING = 256
"""Events that wait on their device, where reading them may wait for it."""
OWN = {"allreduce": False, "tensor_model_parallel": True, "model_parallel": True}
"""Attributes by which frameworks mark parameters that other ranks do not have: experts of DeepSpeed,
parts of Megatron's tensors."""
FRAMEWORKS = (
    "torch",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "transformers",
    "_bench_audit",
)
"""A call from within these has its place where they were called."""
LiveEvent = Event[Tensor, Tensor]
"""One whose values are still on their device."""
HeldValues = Tuple["weakref.ReferenceType[Tensor]", Optional[Tensor]]  # noqa: UP006, UP045 - older Pythons
"""A parameter, without keeping it alive, and where a few of its values are."""


class BeforeStep(NamedTuple):
    """What a step is about to use."""

    num_backwards: int
    used: list[Tensor | None]
    start: list[Tensor | None]


class ClippedNow(NamedTuple):
    """What is being clipped."""

    event: Clipping[Tensor, Tensor]
    gradients: list[tuple[LeafProbe, Tensor]]
    """Before they are."""


class ClippedGradient(NamedTuple):
    """A gradient that was clipped since the last step."""

    held: weakref.ReferenceType[Tensor]
    """The gradient: another one that takes its place was not clipped."""
    factor: Tensor
    """By what it was divided."""


class TrainingRecorder:
    """Writes a line per event until enough updates were sampled.

    Afterwards it writes one for each new length of a window.
    """

    def __init__(self) -> None:
        self.kernels = CollectiveKernels(
            functools.partial(self.guard, self.on_collective), only="reduce"
        )
        self.restart()

    def restart(self) -> None:
        """Begin anew: a forked process trains by itself."""
        self._folder = Path(os.environ["BENCH_AUDIT_FOLDER"])
        self._num_sampled = int(os.environ["BENCH_AUDIT_UPDATES"])
        self.active = self.sampling = True
        self.fetched = 0
        """Batches that data loaders have handed out."""
        self.last_loader: Callable[[], Any] = _nothing
        """The iterator that handed out the newest; None if it is gone."""
        self._is_end_of_data = False
        self._num_backwards = 0
        self._backward: Backward[Tensor, Tensor] | None = None
        """The one that runs, or ran last while its update goes on."""
        self._open = 0
        """Backwards since the last step of any optimizer."""
        self.inner_gradients = 0
        """The same of calls of autograd.grad whose result is differentiated again."""
        self._probes: list[LeafProbe] = []
        self._reached: set[int] = set()
        """Ids of the leaves that a backward has reached."""
        self._handles: list[RemovableHandle] = []
        self._optimizers: dict[int, int] = {}
        """Numbers of optimizers by their ids."""
        self._seen: dict[int, Optimizer] = {}
        """The optimizers themselves."""
        self._num_updates: dict[int, int] = {}
        self._last_backward: dict[int, int] = {}
        """By optimizer how many backwards had run at its last step."""
        self._rates: dict[int, list[float]] = {}
        self._before_step = BeforeStep(0, [], [])
        self._clip: ClippedNow | None = None
        self._clipped: dict[LeafProbe, ClippedGradient] = {}
        self._watched: list[LeafProbe] = []
        """Those of which it is seen whether the parameter moves between backwards."""
        self._starts: Tensor | None = None
        """A few values of each of them at the backward before: [leaf, value]."""
        self._ends: list[HeldValues] = []
        self._copies: list[Tensor] = []
        self._waiting: list[LiveEvent] = []
        self._known_lengths: set[tuple[int, int]] = set()
        self._schedules: list[HeldSchedule] = []
        self._num_scans = 0
        self._rank: Rank[Tensor, Tensor] | None = None

    def guard(self, method: Callable[..., None], *arguments: object) -> None:
        """Call it. An error of ours is written down and ends the recording, not the training."""
        if not self.active:
            return
        try:
            method(*arguments)
        except Exception as error:
            self.active = False
            self._waiting = []
            with contextlib.suppress(Exception):
                self._end_sampling()
            with contextlib.suppress(Exception):
                self._fail(method, error)

    def _fail(self, method: Callable[..., None], error: Exception) -> None:
        text = tell("audit", self._folder, method, error)
        if self._rank is None:
            self._write(Rank(job(), *place_in_world()))
        self._write(End(text))

    # What is reported

    def on_collective(self, collective: CollectiveCall) -> None:
        """Bytes of gradients that are reduced during an update."""
        size, dtype = collective.payload_bytes, collective.dtype
        if self._backward is not None and "float" in dtype and size >= LEAST_BYTES:
            name = f"{collective.name} of {dtype} over {collective.group.size()} ranks"
            self._backward.reduced[name] = self._backward.reduced.get(name, 0) + size

    def on_hook(self, is_parameter: bool, before: Tensor | None, after: Tensor | None) -> None:
        """A hook has seen a gradient, or made another of it."""
        if self._backward is not None and self.sampling:
            self._backward.hooks.append(HookedGradient(is_parameter, before, after))

    def before_backward(self, roots: Sequence[object], keeps_graph: bool) -> None:
        """Hooks on the criteria, and on leaves that were not seen before."""
        self._num_backwards += 1
        self._open += 1
        self._is_end_of_data = self._has_no_more_data()
        if not self.sampling:
            return
        tensors = [root for root in roots if isinstance(root, Tensor)]
        found = survey(tensors)
        backward: Backward[Tensor, Tensor] = Backward(
            self._num_backwards - 1, _place(), fetched=self.fetched, covered=found.covered
        )
        self._reach(found)
        backward.data, backward.rows = found.data, found.rows
        backward.untrained = sum(not self._is_trained(leaf) for leaf in found.leaves)
        backward.inner_gradients = self.inner_gradients
        backward.criteria = criteria.watch(tensors, self._handles, self.guard)
        for node in found.injected:
            backward.injected.append(criteria.watch_scalar(node, self._handles, self.guard))
        if keeps_graph:
            backward.doubts.append("backwards share a graph")
        if any(root.numel() != 1 for root in tensors):
            backward.doubts.append(NOT_SCALAR)
        for probe in self._probes:
            probe.recording = True
            if probe.is_fresh or probe.was_held:
                self._look_at_held(probe, backward)
            else:
                backward.left.append(None)
        backward.moved = self._changes()
        if backward.moved is not None:
            backward.watched = [probe.number for probe in self._watched]
        for copy in self._copies:
            backward.copies.append(plain(copy).detach().reshape(-1)[:START_VALUES].clone())
        for number, optimizer in self._seen.items():
            self._rates.setdefault(number, []).append(_rate(optimizer))
        self._backward = backward

    def _look_at_held(self, probe: LeafProbe, backward: Backward[Tensor, Tensor]) -> None:
        """What is left in a leaf's gradient, and whether it was cleared since the last backward."""
        is_held = probe.held() is not None
        left = None
        if probe.is_fresh and is_held:
            left = probe.gradient()
        backward.left.append(left)
        if probe.was_held and not is_held and self._objects.zero is None:
            backward.cleared.append(probe.number)

    def _changes(self) -> Tensor | None:
        """By watched leaf 1 if the optimizer's values of it have changed since the last call."""
        rows = []
        for probe in self._watched:
            values = probe.start()
            if values is None:
                values = torch.zeros(START_VALUES)
            rows.append(values)
        if not rows:
            return None
        devices = {values.device for values in rows}
        if len(devices) > 1:
            rows = [values.to(rows[0].device) for values in rows]
        before, self._starts = self._starts, torch.cat(rows).reshape(len(rows), START_VALUES)
        if before is None:
            return None
        return (self._starts != before).any(dim=1)

    def after_backward(self) -> None:
        """The micro-gradient."""
        while self._handles:
            self._handles.pop().remove()
        backward = self._backward
        if not self.sampling or backward is None:
            return
        for place, probe in enumerate(self._probes):
            added = probe.take()
            backward.added.append(added)
            if added is None:
                backward.left[place] = None
            else:
                probe.is_fresh = False
            held = probe.held()
            probe.was_held = held is not None
            if held is not None:
                backward.held.setdefault(_name_of(held.dtype), []).append(place)
        self._waiting.append(backward)
        if self._open >= MOST_OPEN:
            self._end_sampling()
        elif len(self._waiting) >= MOST_WAITING:
            self._write()

    def before_clip(self, parameters: Sequence[Tensor], bound: object) -> None:
        """Gradients before they are clipped."""
        clipped = set(map(id, parameters))
        unclipped = []
        for probe in self._probes:
            if id(probe.holder) in clipped:
                unclipped.append((probe, probe.gradient()))
        clip: Clipping[Tensor, Tensor] = Clipping([None] * len(self._probes), _place())
        if isinstance(bound, (int, float)):
            clip.bound = float(bound)
        if unclipped:
            probe, before = unclipped[0]
            clip.before_leaf, clip.before = probe.number, before
            clip.loss_scale = self._objects.loss_scale()
        self._clip = ClippedNow(clip, unclipped)

    def after_clip(self) -> None:
        """By how much it was clipped."""
        if self._clip is None:
            return
        event, gradients = self._clip
        for probe, before in gradients:
            factor = (before / probe.gradient()).nan_to_num(1.0, 1.0, 1.0)
            event.factors[probe.number] = factor.max()
            gradient = probe.holder.grad
            if gradient is not None:
                whole = factor * self._clip_factor(probe)
                self._clipped[probe] = ClippedGradient(weakref.ref(gradient), whole)
        if gradients:
            self._waiting.append(event)

    def _clip_factor(self, probe: LeafProbe) -> Tensor | float:
        """By what the gradient of a leaf was divided since the last step; 1 if it was not."""
        clipped = self._clipped.get(probe)
        if clipped is None or clipped.held() is not probe.holder.grad:
            return 1.0
        return clipped.factor

    def before_step(self, optimizer: Optimizer, arguments: object, options: object) -> None:
        """The gradients that it will use."""
        used, start = self._used(optimizer), self._start_values()
        self._before_step = BeforeStep(self._num_backwards, used, start)

    def after_step(self, optimizer: Optimizer, arguments: object, options: object) -> None:
        """The end of an update.

        A closure of the optimizer may have run the backward, as Lightning's does.
        """
        before = self._before_step
        key = id(optimizer)
        number = self._optimizers.setdefault(key, len(self._optimizers))
        since = self._num_backwards - self._last_backward.get(number, 0)
        self._last_backward[number] = self._num_backwards
        self._open = self.inner_gradients = 0
        self._follow_schedules()
        if since:
            self._num_updates[number] = self._num_updates.get(number, 0) + 1
        if not self.sampling:
            self._count(number, type(optimizer).__name__, since)
            return
        if self._num_backwards == 0:
            return
        self._seen[number] = optimizer
        num_inside = self._num_backwards - before.num_backwards
        used = before.used
        if num_inside:
            used = self._used(optimizer)
        name = type(optimizer).__name__
        step = Step(number, name, _place(), used=used, start=before.start, backwards=since)
        step.owned = [place for place, values in enumerate(used) if values is not None]
        step.asked = self._objects.asked()
        step.rates = self._rates.pop(number, [])
        if num_inside > 1:
            step.obstacles.append(
                f"{name} runs several backwards per step, which are no micro-batches"
            )
        if torch._C._current_graph_task_id() != -1:
            step.obstacles.append("the optimizer steps inside of the backward")
        for place in step.owned:
            probe = self._probes[place]
            probe.is_fresh = True
            self._clipped.pop(probe, None)
        self._backward = None
        self._waiting.append(step)
        # Elsewhere samples stay on the device.
        if all(probe.leaf.device.type == "cpu" for probe in self._probes):
            self._write()
        if self._has_sampled_enough():
            self._end_sampling()

    def _has_sampled_enough(self) -> bool:
        counts = self._num_updates.values()
        often = OFTEN * self._num_sampled
        return min(counts) >= self._num_sampled or max(counts) >= often or sum(counts) >= 2 * often

    def end(self) -> None:
        """The process ends by itself."""
        if not self.active or self._rank is None:
            self._write()
            return
        if self.sampling:
            self._ends = self._held()
        values: list[Tensor | None] = []
        for held, places in self._ends:
            tensor = held()
            if tensor is None or places is None or not tensor.untyped_storage().size():
                values.append(None)
            else:
                values.append(tensor.detach().take(places))
        updates = [self._num_updates.get(number, 0) for number in range(len(self._optimizers))]
        self._follow_schedules()
        end: End[Tensor] = End(end=values, backwards=self._open, updates=updates)
        end.all_backwards, end.is_end_of_data = self._num_backwards, self._is_end_of_data
        end.schedules = [schedule for _, schedule in self._schedules]
        self._write(end)

    def _has_no_more_data(self) -> bool:
        """Whether data end where a schedule would, if each backward was a step of it.

        False if that is not known, as of a stream. Elsewhere the script is not asked for a length.
        """
        for _, schedule in self._schedules:
            if abs(schedule.length - self._num_backwards) <= 1:
                loader = self.last_loader()
                with contextlib.suppress(Exception):
                    return bool(loader._num_yielded == len(loader._index_sampler))
        return False

    def _follow_schedules(self) -> None:
        for held, schedule in self._schedules:
            found = held()
            if found is not None:
                schedule.position = int(found.last_epoch)

    # Samples

    def _reach(self, found: GraphSurvey) -> None:
        """Probe leaves that no backward has reached before, in the same order on all ranks."""
        new = [leaf for leaf in found.leaves if id(leaf) not in self._reached]
        rank = self._rank
        if rank is None:
            rank = self._start()
        if not new:
            return
        if self._num_scans < MOST_SCANS:
            self._num_scans += 1
            self._objects = FoundObjects()
            self._schedules = self._objects.schedules
        self._reached.update(map(id, new))
        trained = [leaf for leaf in new if self._is_trained(leaf)]
        large = []
        for leaf in trained:
            name, size = _name_of(leaf.dtype), _num_elements(leaf)
            num_bytes = size * leaf.element_size()
            rank.gradient_bytes[name] = rank.gradient_bytes.get(name, 0) + num_bytes
            if size >= LEAST_ELEMENTS:
                large.append(leaf)
        rank.num_leaves += len(trained)
        coordinates = MOST_COORDINATES
        if len(large) > MANY_LEAVES:
            coordinates = FEW_COORDINATES
        room = min(MOST_AT_ONCE, MOST_LEAVES - len(self._probes))
        for leaf in evenly(large, room):
            self._probe(leaf, coordinates, rank)
        self._watched, self._starts = evenly(self._probes, MOST_WATCHED), None
        rank.facts, rank.versions = self._objects.facts(), self._objects.versions()
        rank.deepspeed = self._objects.deepspeed_config()
        rank.is_zero = self._objects.zero is not None
        rank.obstacles = self._objects.reasons(trained, OBSTACLES)
        rank.parallel = sorted({*rank.parallel, *self._objects.reasons(trained, PARALLEL)})
        rank.batch_norms = max(rank.batch_norms, self._objects.batch_norms(trained))
        self._write(rank)

    def _is_trained(self, leaf: Tensor) -> bool:
        return isinstance(leaf, torch.nn.Parameter) or bool(self._objects.name_of(leaf))

    def _probe(self, leaf: Tensor, coordinates: int, rank: Rank[Tensor, Tensor]) -> None:
        probe = LeafProbe(leaf, len(self._probes), coordinates, self._objects, self.guard)
        self._probes.append(probe)
        is_own = any(getattr(leaf, name, None) is value for name, value in OWN.items())
        rank.leaves.append(Leaf(probe.name, probe.shape, probe.parameter(), probe.part, is_own))
        copy = self._objects.copies_of(leaf, probe.name)
        if copy is not None and len(self._copies) < MOST_COPIES:
            self._copies.append(copy)

    def _start(self) -> Rank[Tensor, Tensor]:
        rank: Rank[Tensor, Tensor] = Rank(job(), *place_in_world())
        if not are_shapes_shown():
            rank.unseen.append(INJECTED)
        self._rank, self._objects = rank, FoundObjects()
        self._write(rank)
        self.kernels.remove()  # where they are inherited by a fork
        try:
            self.kernels.install()
        except Exception:  # older versions of torch have other operators
            self.kernels.remove()
        return rank

    def _used(self, optimizer: Optimizer) -> list[Tensor | None]:
        """By leaf the gradient that this optimizer uses; None where the leaf is not its."""
        if not self.sampling or self._rank is None:
            return []
        factor, zero = self._factor(optimizer), self._objects.zero
        updated: set[int] = set()
        for group in optimizer.param_groups:
            updated.update(map(id, group["params"]))
        is_of_zero = zero is not None and optimizer is getattr(zero, "optimizer", None)
        used: list[Tensor | None] = []
        for probe in self._probes:
            if id(probe.holder) in updated:
                gradient = probe.gradient() * self._clip_factor(probe)
                if factor is not None:
                    gradient = gradient * factor
                used.append(gradient)
            elif is_of_zero:  # on another rank, or in another group of parameters
                used.append(torch.full((len(probe.flat),), math.nan, dtype=torch.float64))
            else:
                used.append(None)
        return used

    def _factor(self, optimizer: Optimizer) -> Tensor | None:
        """What makes of a gradient what it was before it was scaled, or clipped by DeepSpeed.

        None if it was not.
        """
        scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        limit = getattr(self._objects.zero, "clip_grad", 0.0)
        norm = getattr(self._objects.zero, "_global_grad_norm", None)
        if limit and norm is not None:
            return (torch.as_tensor(norm) / limit).clamp(min=1.0)
        if scale is None:
            return None
        return 1 / scale

    def _start_values(self) -> list[Tensor | None]:
        if not self.sampling or self._rank is None:
            return []
        return [probe.start() for probe in self._probes]

    def _count(self, number: int, name: str, since: int) -> None:
        """Write down an unsampled update if its window is of another length than those before."""
        if since and (number, since) not in self._known_lengths:
            self._known_lengths.add((number, since))
            update = self._num_updates[number]
            self._waiting.append(
                Step(number, name, backwards=since, update=update, is_sampled=False)
            )
            self._write()

    def _held(self) -> list[HeldValues]:
        """What to read at the end, without keeping it alive."""
        return [(weakref.ref(plain(probe.holder)), probe.start_places) for probe in self._probes]

    def _end_sampling(self) -> None:
        self.sampling = False
        self.kernels.remove()
        self._ends = self._held()
        for probe in self._probes:
            probe.handle.remove()
        self._probes.clear()
        self._watched.clear()
        self._seen.clear()
        self._copies.clear()
        self._clipped.clear()
        self._rates.clear()
        if self._rank is not None:
            self._objects.forget()
        self._backward = self._clip = self._starts = None
        self._before_step = BeforeStep(0, [], [])
        self._write()

    def _write(self, *more: LiveEvent | Rank[Tensor, Tensor]) -> None:
        events, self._waiting = [*self._waiting, *more], []
        if events:
            lines = []
            for event in events:
                line = {type(event).__name__.lower(): _fields(event)}
                lines.append(json.dumps(line, default=_plain) + "\n")
            path = self._folder / f"{process_name()}.jsonl"
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))


def _nothing() -> None:
    """What is left of an object that is gone."""


def _place() -> str:
    """File and line of the innermost caller outside of torch and the frameworks."""
    frame = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in FRAMEWORKS:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _rate(optimizer: Optimizer) -> float:
    """The learning rate of its first group; NaN where reading it would wait for a device."""
    if optimizer.param_groups:
        rate = optimizer.param_groups[0].get("lr")
        if isinstance(rate, (int, float)):
            return float(rate)
    return math.nan


def _num_elements(leaf: Tensor) -> int:
    size: int = getattr(leaf, "ds_numel", leaf.numel())
    return size


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fields(event: LiveEvent | Rank[Tensor, Tensor]) -> dict[str, object]:
    """Of a line. The samples of all leaves are one string, which is written faster than many."""
    fields = dict(vars(event))
    for name in SAMPLES:
        if name in fields:
            fields[name] = _joined(fields[name])
    return fields


def _joined(samples: Sequence[Tensor | None]) -> dict[str, object]:
    sizes: list[int | None] = []
    known: list[Tensor] = []
    for values in samples:
        if values is None:
            sizes.append(None)
        else:
            sizes.append(len(values))
            known.append(values)
    if len({values.device for values in known}) > 1:
        known = [values.cpu() for values in known]
    joined = None
    if known:
        joined = torch.cat(known)
    return {"sizes": sizes, "joined": joined}


def _plain(value: object) -> object:
    """For JSON: numbers as they are, values as bytes of doubles, which are faster than digits."""
    if not isinstance(value, Tensor):
        return vars(value)
    if not value.dim():
        return value.tolist()
    return binascii.b2a_base64(array("d", value.tolist()), newline=False).decode()
