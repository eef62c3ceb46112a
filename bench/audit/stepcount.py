"""How many optimizer steps a training takes under each backend's rule, counted without training.

An epoch is counted a block of N micro-batches at a time. After some epochs, one and a window begin
together again: these are a period, and a training is so many periods and a rest.

Micro-batches are counted per rank (all ranks have equally many), samples over all ranks. Sources
are those of Lightning 2.6, DeepSpeed 0.19 and Accelerate 1.15.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.audit.training_plan import TrainingPlan, ceil
from bench.backends.accelerate import AccelerateBackend
from bench.backends.base import Backend
from bench.plan.cell import Sharding, Stepping
from bench.validation import MisfitError

CARRIES = (Stepping.CARRY, Stepping.CANCEL, Stepping.SPLIT)
"""Rules by which a window may hold micro-batches of two epochs."""
CEILING, FLUSHING = (4, 52), (4, 46)
"""Versions of transformers from which on the Trainer counts partial windows, and steps at the end
of every epoch."""
ESTIMATE = "trainer.estimated_stepping_batches"


class Stops(StrEnum):
    """What ends a training."""

    EPOCHS = "epochs"
    """The last epoch ends, and ``max_steps``, if given, is not reached."""
    MAX_STEPS = "max_steps"
    """The counter that is compared with ``max_steps`` reaches it."""
    NEVER = "never"
    """No epochs are given, and that counter never reaches ``max_steps``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRule:
    """When a backend steps and by what it divides the loss."""

    stepping: Stepping
    """What happens to the incomplete window at the end of an epoch."""
    clears: bool = False
    """``split`` only: the trainer's ``zero_grad`` clears the gradients of the engine's open
    window."""
    twice: bool = False
    """``split`` only: trainer and engine both divide the loss by N."""
    counted: bool = True
    """``flush`` only: a trainer counts the steps and foresees their number, as Lightning's does
    and no loop can."""
    whole_windows: bool = False
    """``override`` only: training ends after as many steps as its epochs have whole windows, at
    least one in each."""
    carries: bool = False
    """``override`` only: a window that an epoch leaves open goes on in the next, if an epoch is
    longer than it."""
    deals: bool = False
    """Whether the loader's micro-batches are dealt to the ranks in turn, and not samples as by
    ``DistributedSampler``: with ``drop_last``, those that are too few for all ranks are left out
    (accelerate: data_loader.py, ``BatchSamplerShard``)."""

    @classmethod
    def of_backend(cls, backend: type[Backend]) -> StepRule:
        """The rule of a backend.

        With ``split``, only ZeRO-2 keeps its gradients over a ``zero_grad``: it accumulates in
        ``all_grad_tensors``, which ``zero_grad`` does not touch
        (deepspeed/runtime/zero/stage_1_and_2.py). ZeRO-1 accumulates in ``grad_accum``, which is
        set to None there, and ZeRO-3 overwrites its buffer after ``micro_step_id = 0``
        (deepspeed/runtime/zero/stage3.py). Lightning's backends may multiply the loss by N: one
        division is undone.
        """
        split = backend.stepping is Stepping.SPLIT
        return cls(
            stepping=backend.stepping,
            clears=split and backend.sharding is not Sharding.GRADS,
            twice=split and getattr(backend, "loss_factor", "") != "N",
            counted=not issubclass(backend, AccelerateBackend),
        )

    def of_trainer(self, transformers: tuple[int, ...] | None) -> StepRule:
        """The rule of a training that Hugging Face's Trainer runs with its own loader.

        The newest without a version.

        Up to 4.51.3 it ends after ceil(epochs x max(NB // N, 1)) steps, from 4.52.1 on after
        ceil(epochs x ceil(NB / N)); up to 4.45.2 it counts micro-batches over all epochs
        (transformers: trainer.py, ``_inner_training_loop`` and ``set_initial_training_values``, of
        4.45.2, 4.51.3 and 4.52.1; #37923).
        """
        if self.stepping is not Stepping.OVERRIDE:
            return self
        is_whole = transformers is not None and transformers < CEILING
        is_carried = transformers is not None and transformers < FLUSHING
        return dataclasses.replace(self, whole_windows=is_whole, carries=is_carried, deals=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The steps, micro-batches and samples of a training under one rule.

    samples_used + samples_lost_in_mid_run + samples_left_open + samples_dropped + samples_unread
    = samples x epochs_begun + samples_padded.

    If ``stops`` is ``never``, the counts are those after ``max_steps`` real optimizer steps.
    """

    stops: Stops
    micro_batches_consumed: int
    """Micro-batches fetched by each rank."""
    epochs_begun: int
    """Epochs with at least one micro-batch fetched."""
    epochs_consumed: float
    optimizer_steps: int
    """Real steps of the inner optimizer: parameter updates."""
    steps_per_epoch: tuple[int, ...]
    """The steps in each whole epoch, as a pattern that repeats; with an N by epoch, its last number
    repeats."""
    steps_reported: dict[str, int]
    """The framework's own counters, and its estimate before training, by their names."""
    update_scales: dict[float, int]
    """Sum of the coefficients of an update's micro-batches (1 in a full batch) -> number of such
    updates."""
    samples_used: int
    """Samples in an update, repeated ones each time; as all numbers of samples, over all ranks."""
    samples_padded: int
    """Samples that the sampler repeats in the epochs begun."""
    samples_dropped: int
    """Samples that ``drop_last``, of loader or sampler, leaves out of the epochs finished."""
    micro_batches_lost_in_mid_run: int
    """Micro-batches cleared from a window that then led to an update."""
    samples_lost_in_mid_run: int
    micro_batches_left_open: int
    """Micro-batches in the window that is open when training ends, whether cleared or not."""
    samples_left_open: int
    samples_unread: int
    """Samples left in an epoch that training did not finish, or beyond ``limit_batches``."""

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; ``update_scales`` becomes a list of pairs."""
        return dataclasses.asdict(self) | {
            "update_scales": [[*pair] for pair in self.update_scales.items()]
        }


class _Count:
    """What is counted of a training with one N."""

    def __init__(self, training: TrainingPlan, rule: StepRule, n: int, *, by_updates: bool) -> None:
        self.n, self.per_epoch = n, training.micro_batches_per_epoch
        self.carries = rule.stepping in CARRIES
        if rule.carries and self.per_epoch > n:
            self.carries = True
        self.clears = rule.clears
        self.flushes = rule.stepping is Stepping.FLUSH
        self.by_updates = by_updates
        """Whether ``max_steps`` is compared with the updates, not with the full windows of the
        epochs."""
        self.pattern: list[int] = []
        """Updates of each epoch, until they repeat."""
        self.size = self.ends = self.cleared = self.cleared_ends = 0
        """Micro-batches in the open window, those of them that end an epoch, and how many of both
        are cleared."""
        self.consumed = self.updates = self.full_windows = self.lost = self.lost_ends = 0
        """Micro-batches, updates, windows of N of the epochs, and micro-batches cleared from
        windows of updates."""
        self.kept: Counter[int] = Counter()
        """Updates by their micro-batches that are not cleared; by N where those are what the loss
        is divided by."""

    @property
    def counter(self) -> int:
        """What is compared with ``max_steps``."""
        if self.by_updates:
            return self.updates
        return self.full_windows

    def block(self, size: int, times: int = 1, *, ends_epoch: bool = False) -> None:
        """Count blocks of at most N micro-batches, each of which begins at a multiple of N.

        There Lightning clears gradients, between forward and backward
        (loops/optimization/automatic.py, ``_make_zero_grad_fn`` and ``Closure.closure``).
        """
        self.consumed += size * times
        if self.clears:
            self.cleared, self.cleared_ends = self.size, self.ends
        room = self.n - self.size
        if not self.carries:
            divisor = self.n
            if self.flushes:
                divisor = size
            self.updates += times
            self.kept[divisor] += times
        elif size < room:
            self.size += size
            self.ends += ends_epoch
        else:
            self.updates += times
            self.kept[self.n - self.cleared] += times
            self.lost += self.cleared * times
            self.lost_ends += self.cleared_ends * times
            self.size, self.cleared, self.cleared_ends = size - room, 0, 0
            self.ends = int(ends_epoch and self.size > 0)
        if size == self.n:
            self.full_windows += times

    def epoch(self, limit: int | None = None) -> None:
        """Count an epoch, up to where the counter reaches the limit.

        The counter changes in every block, or not in the last.
        """
        blocks = ceil(self.per_epoch, self.n)
        left = None
        number = blocks
        if limit is not None:
            left = limit - self.counter
            number = min(blocks, left)
        if number > 1:
            self.block(self.n)
        if number > 2:
            self.block(self.n, number - 2)  # all are like the second
        size = self.n
        if number >= blocks:
            size = self.per_epoch - (blocks - 1) * self.n
        if number == left and self.carries and self.by_updates:
            size = min(size, self.n - self.size)
        self.block(size, ends_epoch=number == blocks)

    def multiply(self, times: int) -> None:
        """Count the same again, ``times`` times in all; no window is open."""
        for name in ("consumed", "updates", "full_windows", "lost", "lost_ends"):
            setattr(self, name, getattr(self, name) * times)
        self.kept = Counter({kept: number * times for kept, number in self.kept.items()})


def _count(
    training: TrainingPlan,
    rule: StepRule,
    n: int,
    epochs: int | None,
    limit: int | None,
    *,
    by_updates: bool,
) -> _Count:
    """A training with one N until its epochs end, or the counter reaches the limit."""
    found = _Count(training, rule, n, by_updates=by_updates)
    period = 1
    if found.carries:
        period = n // math.gcd(found.per_epoch, n)
    length = period
    if epochs is not None:
        length = min(epochs, period)
    pattern: list[int] = []
    while len(pattern) < length:
        before = found.updates
        found.epoch()
        pattern.append(found.updates - before)
    if limit is not None or len(pattern) == period:
        most = []
        if epochs is not None:
            most.append(epochs // period)
        if limit is not None and (found.counter or limit == 0):
            most.append(max(0, limit - 1) // max(1, found.counter))
        done = min(most) * period
        if done:
            found.multiply(done // period)
        else:
            found = _Count(training, rule, n, by_updates=by_updates)
        while done != epochs and (limit is None or found.counter < limit):
            found.epoch(limit)
            done += 1
    num_epochs = epochs
    if num_epochs is None:
        num_epochs = max(1, ceil(found.consumed, found.per_epoch))
    found.pattern = _shortened(pattern[:num_epochs])
    return found


def _shortened(pattern: list[int]) -> list[int]:
    """One number where all are the same."""
    if len(set(pattern)) == 1:
        return pattern[:1]
    return pattern


def _is_known(training: TrainingPlan, rule: StepRule) -> bool:
    """Whether the rule is, and no window may hold micro-batches of epochs with different N.

    With ``split`` Lightning refuses ``GradientAccumulationScheduler``
    (callbacks/gradient_accumulation_scheduler.py, ``on_train_start``).
    """
    if rule.stepping is Stepping.UNKNOWN or not training.accumulate[1:]:
        return rule.stepping is not Stepping.UNKNOWN
    is_whole = all(training.micro_batches_per_epoch % n == 0 for n, _ in training.phases)
    return rule.stepping in (Stepping.WINDOW, Stepping.FLUSH) or (
        rule.stepping is Stepping.CARRY and is_whole
    )


def never_reached(training: TrainingPlan, rule: StepRule) -> bool:
    """Whether the counter that is compared with ``max_steps`` stays 0."""
    return (
        rule.stepping is Stepping.SPLIT and training.full_windows == 0 and bool(training.max_steps)
    )


def calculate(training: TrainingPlan, rule: StepRule) -> Steps | None:
    """The training under a rule; None where none is known (``_is_known``).

    - ``window``, ``override`` and ``flush`` step after N micro-batches and at the end of the epoch
      (Lightning: loops/training_epoch_loop.py, ``_should_accumulate``; Accelerate: accelerator.py,
      ``_do_sync``).
    - ``carry`` steps after N micro-batches counted over the whole training (DeepSpeed:
      runtime/engine.py, ``is_gradient_accumulation_boundary``).
    - ``cancel`` steps as ``carry``, but counts the step that it begins and cancels when the data
      end before its ``training.steps``, here those of the naive formula (torchtitan: trainer.py,
      ``train``).
    - ``split`` steps as ``carry``, but compares ``max_steps`` with ``trainer.global_step``, which
      counts every N-th micro-batch of an epoch (Lightning: the same ``_should_accumulate`` under a
      strategy that ``handles_gradient_accumulation``; loops/optimization/automatic.py,
      ``_optimizer_step``).

    Lightning checks ``max_steps`` before every micro-batch and every epoch
    (``_TrainingEpochLoop.done``, ``_FitLoop.done``), so training ends right after the micro-batch
    whose step reaches it, and before the first with 0.
    """
    if not _is_known(training, rule):
        return None
    asked = training
    if rule.deals and training.drop_last:
        training = dataclasses.replace(training, samples=_dealt(training))
    if rule.whole_windows and training.max_steps is None:
        assert training.epochs is not None, "without max_steps only epochs end a training"
        most = max(training.full_windows, 1) * training.epochs
        training = dataclasses.replace(training, epochs=None, max_steps=most)
    by_updates, limit = rule.stepping is not Stepping.SPLIT, training.max_steps
    parts: list[_Count] = []
    stops = Stops.EPOCHS
    for n, epochs in training.phases:
        end = epochs
        if rule.stepping is Stepping.OVERRIDE and limit:
            end = None
        if end is None and never_reached(training, rule):
            stops, by_updates = Stops.NEVER, True
        left = _left(limit, parts)
        parts.append(_count(training, rule, n, end, left, by_updates=by_updates))
        if parts[-1].counter == left:
            if stops is not Stops.NEVER:
                stops = Stops.MAX_STEPS
            break
    if rule.whole_windows and asked.max_steps is None:
        stops = Stops.EPOCHS
    return _with_undealt(
        _steps(training, rule, parts, stops), asked.samples - training.samples, training
    )


def _left(limit: int | None, parts: Sequence[_Count]) -> int | None:
    """What is left of a limit; None if there is none."""
    if limit is None:
        return None
    return limit - sum(part.counter for part in parts)


def _dealt(training: TrainingPlan) -> int:
    """The samples of the micro-batches that are enough for all ranks.

    Raises InputError if there are none.
    """
    together = training.batch_size * training.world_size
    if training.samples < together:
        few = (
            f" is {training.samples}, fewer than the {together} of a micro-batch on each rank, "
            "so drop_last drops all"
        )
        raise MisfitError("samples", f"{few}; it must be at least as many")
    return training.samples // together * together


def _with_undealt(found: Steps, samples: int, training: TrainingPlan) -> Steps:
    """The counts with so many samples of each epoch that were not dealt to any rank."""
    if not samples:
        return found
    finished = found.micro_batches_consumed // training.micro_batches_per_epoch
    return dataclasses.replace(
        found,
        samples_dropped=found.samples_dropped + samples * finished,
        samples_unread=found.samples_unread + samples * (found.epochs_begun - finished),
    )


def _steps(training: TrainingPlan, rule: StepRule, parts: Sequence[_Count], stops: Stops) -> Steps:
    """What was counted, in samples."""
    per_epoch, last = training.micro_batches_per_epoch, parts[-1]
    consumed = steps = lost = lost_ends = counted = 0
    scales: Counter[float] = Counter()
    pattern: list[int] = []
    for part in parts:
        consumed += part.consumed
        steps += part.updates
        lost += part.lost
        lost_ends += part.lost_ends
        pattern += part.pattern
        if stops is not Stops.NEVER:
            counted += part.counter
        for kept, number in part.kept.items():
            divisor = part.n
            if rule.twice:
                divisor *= part.n
            scales[kept / divisor] += number
    finished, begun = consumed // per_epoch, ceil(consumed, per_epoch)
    samples_lost = _samples(training, lost, lost_ends)
    samples_open = _samples(training, last.size, last.ends)
    seen = _samples(training, consumed, finished)
    offered = (training.samples + training.padding_per_epoch) * begun
    dropped = training.dropped_per_epoch * finished
    return Steps(
        stops=stops,
        micro_batches_consumed=consumed,
        epochs_begun=begun,
        epochs_consumed=consumed / per_epoch,
        optimizer_steps=steps,
        steps_per_epoch=tuple(pattern),
        steps_reported=_reported(training, rule, steps, counted),
        update_scales=dict(sorted((+scales).items(), reverse=True)),
        samples_used=seen - samples_lost - samples_open,
        samples_padded=training.padding_per_epoch * begun,
        samples_dropped=dropped,
        micro_batches_lost_in_mid_run=lost,
        samples_lost_in_mid_run=samples_lost,
        micro_batches_left_open=last.size,
        samples_left_open=samples_open,
        samples_unread=offered - dropped - seen,
    )


def _reported(training: TrainingPlan, rule: StepRule, steps: int, counted: int) -> dict[str, int]:
    """The framework's counters.

    ``estimated_stepping_batches`` is ceil(NB / N) x epochs under every strategy, and at most
    ``max_steps`` (Lightning: trainer/trainer.py); N is that of the first epoch.
    """
    engine = {"engine.global_steps": steps}
    if rule.stepping is Stepping.CARRY:
        return engine
    if rule.stepping is Stepping.CANCEL:
        return {"trainer.step": steps + (steps < training.naive_steps)}
    if rule.stepping is Stepping.OVERRIDE:
        return {"state.global_step": steps}
    if rule.stepping is Stepping.WINDOW or not rule.counted:
        return {}
    limits = []
    if training.max_steps is not None:
        limits.append(training.max_steps)
    if training.epochs is not None:
        limits.append(training.windows * training.epochs)
    counters = {"trainer.global_step": counted, ESTIMATE: min(limits)}
    if rule.stepping is Stepping.SPLIT:
        return counters | engine
    return counters


def _samples(training: TrainingPlan, micro_batches: int, short: int) -> int:
    """Samples of micro-batches on all ranks, of which ``short`` are the last of an epoch."""
    missing = short * (training.batch_size - training.last_micro_batch)
    return (micro_batches * training.batch_size - missing) * training.world_size
