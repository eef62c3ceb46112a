"""What happens in a rank: samples of gradients, the criteria of losses, and what is reduced.

``watched_calls`` reports backwards, clipping, hooks, batches and steps to the recorder. It imports nothing of bench but
``c10d_kernels``: the command may run in another environment. It communicates nothing, draws from no global generator,
changes no tensor, and never raises into the training.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ....measure.c10d_kernels import CollectiveCall, CollectiveKernels
from . import criteria
from .found_objects import OBSTACLES, PARALLEL, FoundObjects
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
from .records import Backward, Clipping, End, Leaf, Rank, Step

JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
"""Variables of launchers that tell one training from another."""
LEAST_BYTES = 64
"""What is smaller are metrics and norms."""
LEAST_ELEMENTS = 2
"""Smaller leaves are not sampled."""
MOST_SCANS = 8
"""Of all objects: where new leaves appear they are looked for again."""
MOST_COPIES = 4
OFTEN = 8
"""Sampling ends when every optimizer has made enough updates, or one this many times as many."""
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


class TrainingRecorder:
    """Writes a line per event until enough updates were sampled, and afterwards one for each new length of a window."""

    def __init__(self) -> None:
        self.kernels = CollectiveKernels(
            functools.partial(self.guard, self.on_collective), only="reduce"
        )
        self.restart()

    def restart(self) -> None:
        """Begin anew: a forked process trains by itself."""
        self._folder, self._num_sampled = (
            Path(os.environ["BENCH_AUDIT_FOLDER"]),
            int(os.environ["BENCH_AUDIT_UPDATES"]),
        )
        self.active = self.sampling = True
        self.fetched = 0
        """Batches that data loaders have handed out."""
        self._num_backwards = 0
        self._backward: Backward | None = None
        """The one that runs, or ran last while its update goes on."""
        self._open = 0
        """Backwards since the last step of any optimizer."""
        self._probes: list[LeafProbe] = []
        self._probed: set[int] = set()
        self._reached: set[int] = set()
        """Ids of the leaves that a backward has reached."""
        self._handles: list[Any] = []
        self._optimizers: dict[int, int] = {}
        """Numbers of optimizers by their ids."""
        self._seen: dict[int, Any] = {}
        """The optimizers themselves."""
        self._num_updates: dict[int, int] = {}
        self._last_backward: dict[int, int] = {}
        """By optimizer how many backwards had run at its last step."""
        self._rates: dict[int, list[float]] = {}
        self._clipped: dict[LeafProbe, Any] = {}
        """By what gradients were divided to clip them."""
        self._starts: dict[LeafProbe, Any] = {}
        self._ends: list[Any] = []
        self._copies: list[Any] = []
        self._waiting: list[Any] = []
        self._known_lengths: set[tuple[int, int]] = set()
        self._num_scans = 0
        self._rank: Rank | None = None

    def guard(self, method: Callable[..., None], *arguments: Any) -> None:
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
        if isinstance(error, OSError):
            print(
                f"audit: cannot record in {self._folder} (TMPDIR): {error.strerror}",
                file=sys.stderr,
            )
        if self._rank is None:
            self._write(Rank(_job(), *_place_in_world()))
        text = f"the recorder failed: {method.__name__}: {type(error).__name__}: {error}"
        self._write(End(text))

    # What is reported

    def on_collective(self, collective: CollectiveCall) -> None:
        """Bytes of gradients that are reduced during an update."""
        size, dtype = collective.payload_bytes, collective.dtype
        if self._backward is not None and "float" in dtype and size >= LEAST_BYTES:
            name = f"{collective.name} of {dtype} over {collective.group.size()} ranks"
            self._backward.reduced[name] = self._backward.reduced.get(name, 0) + size

    def on_hook(self, is_parameter: bool, before: Any, after: Any) -> None:
        """A hook has seen a gradient, or made another of it."""
        if self._backward is not None and self.sampling:
            self._backward.hooks.append([is_parameter, before, after])

    def before_backward(self, roots: Any, keeps_graph: bool) -> None:
        """Hooks on the criteria, and on leaves that were not seen before."""
        self._num_backwards += 1
        self._open += 1
        if not self.sampling:
            return
        tensors = [root for root in roots if isinstance(root, torch.Tensor)]
        found = survey(tensors)
        backward = Backward(
            self._num_backwards - 1, _place(), fetched=self.fetched, covered=found.covered
        )
        self._reach(found)
        backward.data = found.data
        backward.criteria = criteria.watch(tensors, self._handles)
        backward.injected = [criteria.watch_scalar(node, self._handles) for node in found.injected]
        if keeps_graph:
            backward.doubts.append("backwards share a graph")
        if any(root.numel() != 1 for root in tensors):
            backward.doubts.append("backward does not begin at a scalar")
        for probe in self._probes:
            probe.recording = True
            backward.left.append(probe.gradient() if probe.is_fresh else None)
            if probe.was_held and self._objects.zero is None and probe.held() is None:
                backward.cleared.append(probe.number)
            start, old = probe.start(), self._starts.get(probe)
            backward.moved.append(None if old is None or start is None else (start != old).any())
            self._starts[probe] = start
        backward.copies = [
            plain(copy).detach().reshape(-1)[:START_VALUES].double() for copy in self._copies
        ]
        for number, optimizer in self._seen.items():
            self._rates.setdefault(number, []).append(_rate(optimizer))
        self._backward = backward

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
            probe.was_held = probe.held() is not None
        backward.held = sorted({probe.held_dtype() for probe in self._probes} - {""})
        self._waiting.append(backward)

    def before_clip(self, parameters: list[Any], bound: Any) -> None:
        """Gradients before they are clipped."""
        clipped = set(map(id, parameters))
        self._unclipped = [
            (probe, probe.gradient()) for probe in self._probes if id(probe.holder) in clipped
        ]
        self._clip = Clipping([None] * len(self._probes))
        if isinstance(bound, (int, float)):
            self._clip.bound = float(bound)
        if self._unclipped:
            probe, before = self._unclipped[0]
            self._clip.before_leaf, self._clip.before = probe.number, before
            self._clip.loss_scale = self._objects.loss_scale()

    def after_clip(self) -> None:
        """By how much it was clipped."""
        for probe, before in self._unclipped:
            factor = (before / probe.gradient()).nan_to_num(1.0, 1.0, 1.0)
            self._clipped[probe] = factor * self._clipped.get(probe, 1.0)
            self._clip.factors[probe.number] = factor.max()
        if self._unclipped:
            self._waiting.append(self._clip)

    def before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self._before_step = (
            self._num_backwards,
            self._used(optimizer),
            self._start_values(optimizer),
        )

    def after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """The end of an update. A closure of the optimizer may have run the backward, as Lightning's does."""
        before, used, start = self._before_step
        key = id(optimizer)
        number = self._optimizers.setdefault(key, len(self._optimizers))
        since = self._num_backwards - self._last_backward.get(number, 0)
        self._last_backward[number] = self._num_backwards
        self._open = 0
        if since:
            self._num_updates[number] = self._num_updates.get(number, 0) + 1
        if not self.sampling:
            self._count(number, type(optimizer).__name__, since)
            return
        if self._num_backwards == 0:
            return
        self._seen[number] = optimizer
        inside = self._num_backwards - before
        if inside:
            used = self._used(optimizer)
        step = Step(number, type(optimizer).__name__, used=used, start=start, backwards=since)
        step.owned = [place for place, values in enumerate(used) if values is not None]
        step.asked = self._objects.asked()
        step.rates = self._rates.pop(number, [])
        if inside > 1:
            step.obstacles.append(
                f"{step.name} runs several backwards per step, which are no micro-batches"
            )
        if torch._C._current_graph_task_id() != -1:
            step.obstacles.append("the optimizer steps inside of the backward")
        for place in step.owned:
            probe = self._probes[place]
            probe.is_fresh = True
            self._clipped.pop(probe, None)
            self._starts.pop(probe, None)
        self._backward = None
        self._waiting.append(step)
        if all(
            probe.leaf.device.type == "cpu" for probe in self._probes
        ):  # elsewhere samples stay on the device
            self._write()
        counts = self._num_updates.values()
        if min(counts) >= self._num_sampled or max(counts) >= OFTEN * self._num_sampled:
            self._end_sampling()

    def end(self) -> None:
        """The process ends by itself."""
        if self.active and self._rank is not None:
            values = []
            for held, index in self._ends or self._held():
                tensor = held()
                values.append(None if tensor is None or index is None else _values(tensor, index))
            updates = [self._num_updates.get(number, 0) for number in range(len(self._optimizers))]
            self._write(End(end=values, backwards=self._open, updates=updates))
        else:
            self._write()

    # Samples

    def _reach(self, found: GraphSurvey) -> None:
        """Probe leaves that no backward has reached before, in the same order on all ranks."""
        new = [leaf for leaf in found.leaves if id(leaf) not in self._reached]
        if self._rank is None:
            self._start()
        if not new:
            return
        if self._num_scans < MOST_SCANS:
            self._num_scans += 1
            self._objects = FoundObjects()
        self._reached.update(map(id, new))
        rank = self._rank
        assert rank is not None
        trained = [
            leaf
            for leaf in new
            if isinstance(leaf, torch.nn.Parameter) or self._objects.name_of(leaf)
        ]
        for leaf in trained:
            name = str(leaf.dtype).removeprefix("torch.")
            size = getattr(leaf, "ds_numel", leaf.numel()) * leaf.element_size()
            rank.gradient_bytes[name] = rank.gradient_bytes.get(name, 0) + size
        rank.num_leaves += len(trained)
        large = [
            leaf for leaf in trained if getattr(leaf, "ds_numel", leaf.numel()) >= LEAST_ELEMENTS
        ]
        coordinates = MOST_COORDINATES if len(large) <= MANY_LEAVES else FEW_COORDINATES
        room = min(MOST_AT_ONCE, MOST_LEAVES - len(self._probes))
        for leaf in evenly(large, room):
            probe = LeafProbe(leaf, len(self._probes), coordinates, self._objects)
            self._probes.append(probe)
            rank.leaves.append(Leaf(probe.name, probe.shape, probe.parameter(), probe.part))
            copy = self._objects.copies_of(leaf, probe.name)
            if copy is not None and len(self._copies) < MOST_COPIES:
                self._copies.append(copy)
        rank.facts = self._objects.facts()
        rank.is_zero = self._objects.zero is not None
        rank.obstacles = self._objects.reasons(trained, OBSTACLES)
        rank.parallel = sorted({*rank.parallel, *self._objects.reasons(trained, PARALLEL)})
        rank.batch_norms = max(rank.batch_norms, self._objects.batch_norms(trained))
        self._write(rank)

    def _start(self) -> None:
        self._rank = Rank(_job(), *_place_in_world())
        self._objects = FoundObjects()
        self._write(self._rank)
        self.kernels.remove()  # where they are inherited by a fork
        try:
            self.kernels.install()
        except Exception:  # older versions of torch have other operators
            self.kernels.remove()

    def _used(self, optimizer: Any) -> list[Any]:
        """By leaf the gradient that this optimizer uses; None where the leaf is not its."""
        if not self.sampling or self._rank is None:
            return []
        scale, zero = getattr(optimizer, "grad_scale", None), self._objects.zero
        factor: Any = 1.0 if scale is None else 1 / scale
        if zero is not None and (
            limit := getattr(zero, "clip_grad", 0.0)
        ):  # DeepSpeed clips by itself
            norm = getattr(zero, "_global_grad_norm", None)
            if norm is not None:
                factor = (torch.as_tensor(norm) / limit).clamp(min=1.0)
        updated = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        is_of_zero = zero is not None and optimizer is getattr(zero, "optimizer", None)
        used: list[Any] = []
        for probe in self._probes:
            if id(probe.holder) in updated:
                used.append(probe.gradient() * (factor * self._clipped.get(probe, 1.0)))
            elif is_of_zero:  # on another rank, or in another group of parameters
                used.append(torch.full((len(probe.flat),), math.nan, dtype=torch.float64))
            else:
                used.append(None)
        return used

    def _start_values(self, optimizer: Any) -> list[Any]:
        if not self.sampling or self._rank is None:
            return []
        return [probe.start() for probe in self._probes]

    def _count(self, number: int, name: str, since: int) -> None:
        """An update that is not sampled is written down if its window has another length than those before."""
        if since and (number, since) not in self._known_lengths:
            self._known_lengths.add((number, since))
            update = self._num_updates[number]
            self._waiting.append(
                Step(number, name, backwards=since, update=update, is_sampled=False)
            )
            self._write()

    def _held(self) -> list[Any]:
        """What to read at the end, without keeping it alive."""
        return [(weakref.ref(plain(probe.holder)), probe.start_index) for probe in self._probes]

    def _end_sampling(self) -> None:
        self.sampling = False
        self.kernels.remove()
        self._ends = self._held()
        for probe in self._probes:
            probe.handle.remove()
        for kept in (
            self._probes,
            self._seen,
            self._starts,
            self._copies,
            self._clipped,
            self._rates,
        ):
            kept.clear()
        self._backward = None
        self._write()

    def _write(self, *more: Any) -> None:
        events, self._waiting = [*self._waiting, *more], []
        if events:
            lines = [
                json.dumps({type(event).__name__.lower(): event}, default=_plain) + "\n"
                for event in events
            ]
            with (self._folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                file.write("".join(lines))


def _job() -> str:
    return ":".join(os.environ.get(name, "") for name in JOB)


def _place_in_world() -> tuple[int, int]:
    """Rank and number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _place() -> str:
    """File and line of the innermost caller outside of torch and the frameworks."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in FRAMEWORKS:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _rate(optimizer: Any) -> float:
    """The learning rate of its first group; NaN where reading it would wait for a device."""
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return float(rate) if isinstance(rate, (int, float)) else math.nan


def _values(tensor: Any, index: Any) -> Any:
    if not tensor.untyped_storage().size():
        return None
    return tensor.detach()[index].double().reshape(-1)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else vars(value)
