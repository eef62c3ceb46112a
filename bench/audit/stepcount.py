"""How many optimizer steps a training takes under each backend's rule, calculated without training.

Micro-batches are counted per rank (all ranks have equally many), samples over all ranks. Sources are those of Lightning
2.6, DeepSpeed 0.19 and Accelerate 1.15.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.audit.training import TrainingPlan, ceil
from bench.plan.cell import Sharding, Stepping

CARRIES = (Stepping.CARRY, Stepping.CANCEL, Stepping.SPLIT)
"""Rules by which a window may hold micro-batches of two epochs."""
ESTIMATE = "trainer.estimated_stepping_batches"
ADDED = (
    *("micro_batches_consumed", "epochs_begun", "epochs_consumed", "optimizer_steps"),
    *("micro_batches_lost_in_mid_run", "micro_batches_left_open"),
    *(f"samples_{fate}" for fate in ("used", "padded", "dropped", "lost_in_mid_run", "left_open", "unread")),
)
"""What a training has as often as its phases together."""


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
    """``split`` only: the trainer's ``zero_grad`` clears the gradients of the engine's open window."""
    twice: bool = False
    """``split`` only: trainer and engine both divide the loss by N."""
    counted: bool = True
    """``flush`` only: a trainer counts the steps and foresees their number, as Lightning's does."""

    @classmethod
    def of(cls, stepping: Stepping, sharding: Sharding, *, divides_once: bool = False) -> StepRule:
        """The rule of a backend.

        With ``split``, only ZeRO-2 keeps its gradients over a ``zero_grad``: it accumulates in ``all_grad_tensors``,
        which ``zero_grad`` does not touch (deepspeed/runtime/zero/stage_1_and_2.py). ZeRO-1 accumulates in
        ``grad_accum``, which is set to None there, and ZeRO-3 overwrites its buffer after ``micro_step_id = 0``
        (deepspeed/runtime/zero/stage3.py).
        """
        split = stepping is Stepping.SPLIT
        return cls(stepping=stepping, clears=split and sharding is not Sharding.GRADS, twice=split and not divides_once)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The steps, micro-batches and samples of a training under one rule.

    samples_used + samples_lost_in_mid_run + samples_left_open + samples_dropped + samples_unread
    = samples x epochs_begun + samples_padded.

    If ``stops`` is ``never``, the counts are those after ``max_steps`` real optimizer steps.
    """

    stops: Stops
    """What ends the training."""
    micro_batches_consumed: int
    """Micro-batches fetched by each rank."""
    epochs_begun: int
    """Epochs with at least one micro-batch fetched."""
    epochs_consumed: float
    """Micro-batches consumed divided by micro-batches per epoch."""
    optimizer_steps: int
    """Real steps of the inner optimizer: parameter updates."""
    steps_per_epoch: tuple[int, ...]
    """The steps in each whole epoch, as a pattern that repeats; with an N by epoch, its last number repeats."""
    steps_reported: dict[str, int]
    """The framework's own counters, and its estimate before training, by their names."""
    equal_max_steps: int | None
    """The ``max_steps`` with the same updates as these epochs; None if there is none, or no epochs are given."""
    update_scales: dict[float, int]
    """Sum of the coefficients of an update's micro-batches (1 in a full batch) -> number of such updates."""
    samples_used: int
    """Samples in an update, repeated ones each time."""
    samples_padded: int
    """Samples that the sampler repeats in the epochs begun."""
    samples_dropped: int
    """Samples that ``drop_last``, of loader or sampler, leaves out of the epochs finished."""
    micro_batches_lost_in_mid_run: int
    """Micro-batches cleared from a window that then led to an update."""
    samples_lost_in_mid_run: int
    """Samples of these micro-batches on all ranks."""
    micro_batches_left_open: int
    """Micro-batches in the window that is open when training ends."""
    samples_left_open: int
    """Samples of these micro-batches on all ranks, whether cleared or not."""
    samples_unread: int
    """Samples left in an epoch that training did not finish, or beyond ``limit_batches``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``update_scales`` becomes a list of pairs."""
        scales = [[scale, count] for scale, count in self.update_scales.items()]
        # dataclasses.asdict would copy the tuple of up to a million epochs item by item.
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {
            "stops": str(self.stops),
            "steps_per_epoch": list(self.steps_per_epoch),
            "update_scales": scales,
        }


def calculate(training: TrainingPlan, rule: StepRule) -> Steps | None:
    """The training under a rule; None where none is known, for ``Stepping.UNKNOWN`` and some N by epoch (``by_epoch``).

    - ``window``, ``override`` and ``flush`` step after N micro-batches and at the end of the epoch (Lightning:
      loops/training_epoch_loop.py, ``_should_accumulate``; Accelerate: accelerator.py, ``_do_sync``).
    - ``carry`` steps after N micro-batches counted over the whole training (DeepSpeed: runtime/engine.py,
      ``is_gradient_accumulation_boundary``).
    - ``cancel`` steps as ``carry``, but counts the step that it begins and cancels when the data end before its
      ``training.steps``, here those of the naive formula (torchtitan: trainer.py, ``train``).
    - ``split`` steps as ``carry``, but compares ``max_steps`` with ``trainer.global_step``, which counts every N-th
      micro-batch of an epoch (Lightning: the same ``_should_accumulate`` under a strategy that
      ``handles_gradient_accumulation``; loops/optimization/automatic.py, ``_optimizer_step``).

    Lightning checks ``max_steps`` before every micro-batch and every epoch (``_TrainingEpochLoop.done``,
    ``_FitLoop.done``), so training ends right after the micro-batch whose step reaches it, and before the first with 0.
    """
    if rule.stepping is Stepping.UNKNOWN:
        return None
    if training.accumulate_later:
        return by_epoch(training, rule)
    epochs = None if rule.stepping is Stepping.OVERRIDE and training.max_steps else training.epochs
    end = None if epochs is None else epochs * training.micro_batches_per_epoch
    reached = None if training.max_steps is None else reaches(training, rule, training.max_steps)
    if reached is not None and (end is None or reached <= end):
        return _after(training, rule, reached, Stops.MAX_STEPS)
    if end is not None:
        return _after(training, rule, end, Stops.EPOCHS)
    return _after(training, rule, (training.max_steps or 0) * training.accumulate, Stops.NEVER)


def by_epoch(training: TrainingPlan, rule: StepRule) -> Steps | None:
    """A training whose N changes: the sum of its phases, each of one N.

    None where a window may hold micro-batches of two phases, and with ``split``: Lightning refuses
    ``GradientAccumulationScheduler`` there (callbacks/gradient_accumulation_scheduler.py, ``on_train_start``).
    """
    phases, per_epoch = training.phases, training.micro_batches_per_epoch
    is_whole = all(per_epoch % n == 0 for n, _ in phases)
    if rule.stepping not in (Stepping.WINDOW, Stepping.FLUSH) and not (rule.stepping is Stepping.CARRY and is_whole):
        return None
    parts: list[Steps] = []
    equal, left = 0, training.max_steps
    for n, epochs in phases:
        one = dataclasses.replace(training, accumulate=n, accumulate_later=(), epochs=epochs, max_steps=left)
        equal += updates(one, rule, (epochs or 0) * per_epoch)
        if parts and parts[-1].stops is Stops.MAX_STEPS:
            continue
        part = calculate(one, rule)
        assert part is not None
        parts.append(part)
        left = None if left is None else left - part.optimizer_steps
    counters = {name: sum(part.steps_reported[name] for part in parts) for name in parts[0].steps_reported}
    if ESTIMATE in counters:  # by the N of the moment, before the first epoch
        counters[ESTIMATE] = _reported(training, rule, 0)[ESTIMATE]
    scales = sum((Counter(part.update_scales) for part in parts), Counter[float]())
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in ADDED}
    return Steps(
        stops=parts[-1].stops,
        steps_per_epoch=tuple(steps for part in parts for steps in part.steps_per_epoch),
        steps_reported=counters,
        equal_max_steps=None if training.epochs is None else equal,
        update_scales=dict(sorted(scales.items(), reverse=True)),
        **sums,
    )


def reaches(training: TrainingPlan, rule: StepRule, steps: int) -> int | None:
    """The micro-batches after which the counter compared with ``max_steps`` reaches ``steps``; None if never."""
    if steps == 0:
        return 0
    if rule.stepping in (Stepping.CARRY, Stepping.CANCEL):
        return steps * training.accumulate
    per_epoch = training.full_windows if rule.stepping is Stepping.SPLIT else training.windows
    if per_epoch == 0:
        return None
    epochs = (steps - 1) // per_epoch
    windows = steps - epochs * per_epoch
    in_epoch = min(windows * training.accumulate, training.micro_batches_per_epoch)
    return epochs * training.micro_batches_per_epoch + in_epoch


def updates(training: TrainingPlan, rule: StepRule, micro_batches: int) -> int:
    """Real optimizer steps in the first ``micro_batches`` micro-batches."""
    if rule.stepping in CARRIES:
        return micro_batches // training.accumulate
    finished, begun = divmod(micro_batches, training.micro_batches_per_epoch)
    return finished * training.windows + begun // training.accumulate


def _after(training: TrainingPlan, rule: StepRule, consumed: int, stops: Stops) -> Steps:
    """The state of a training that ends after ``consumed`` micro-batches."""
    per_epoch, n = training.micro_batches_per_epoch, training.accumulate
    finished, begun = consumed // per_epoch, ceil(consumed, per_epoch)
    steps = updates(training, rule, consumed)
    stepped = consumed - consumed % n if rule.stepping in CARRIES else consumed
    cleared = _cleared(per_epoch, n, stepped) if rule.clears else Counter[int]()
    lost = sum(offset * windows for offset, windows in cleared.items())
    # The last micro-batch of an epoch has fewer samples. It is cleared if the next epoch begins in its window.
    boundaries = stepped // per_epoch
    short_lost = boundaries - boundaries // _period(per_epoch, n) if rule.clears else 0
    samples_lost = _samples(training, lost, short_lost)
    samples_open = _samples(training, consumed - stepped, finished - boundaries)
    seen = _samples(training, consumed, finished)
    offered = (training.samples + training.padding_per_epoch) * begun
    dropped = training.dropped_per_epoch * finished
    return Steps(
        stops=stops,
        micro_batches_consumed=consumed,
        epochs_begun=begun,
        epochs_consumed=consumed / per_epoch,
        optimizer_steps=steps,
        steps_per_epoch=_pattern(training, rule, training.epochs or max(1, begun)),
        steps_reported=_reported(training, rule, consumed),
        equal_max_steps=_equal_max_steps(training, rule),
        update_scales=_scales(training, rule, steps, finished, cleared),
        samples_used=seen - samples_lost - samples_open,
        samples_padded=training.padding_per_epoch * begun,
        samples_dropped=dropped,
        micro_batches_lost_in_mid_run=lost,
        samples_lost_in_mid_run=samples_lost,
        micro_batches_left_open=consumed - stepped,
        samples_left_open=samples_open,
        samples_unread=offered - dropped - seen,
    )


def _cleared(per_epoch: int, n: int, stepped: int) -> Counter[int]:
    """Micro-batches cleared from the start of a window of the engine, if any -> number of such windows.

    Lightning clears gradients between forward and backward of every micro-batch whose index in the epoch is a multiple
    of N (loops/optimization/automatic.py, ``_make_zero_grad_fn`` and ``Closure.closure``). In epoch e these are all at
    the offset (e x NB) mod N in the engine's windows, one per window, and clear what comes before them. If the next
    epoch begins in the same window, its first micro-batch clears more, and counts instead.
    """
    windows: Counter[int] = Counter()
    if stepped == 0:
        return windows
    period = _period(per_epoch, n)
    last = ceil(stepped, per_epoch) - 1
    full, tail = divmod(per_epoch - 1, n)
    for epoch in range(min(period, last)):
        offset = epoch * per_epoch % n
        times = (last - epoch - 1) // period + 1
        windows[offset] += times * (full + (offset + tail + 1 >= n))
    windows[last * per_epoch % n] += ceil(stepped - last * per_epoch, n)
    del windows[0]
    return +windows


def _pattern(training: TrainingPlan, rule: StepRule, epochs: int) -> tuple[int, ...]:
    """Optimizer steps in each whole epoch until the pattern repeats; one number if all are equal."""
    if rule.stepping not in CARRIES:
        return (training.windows,)
    per_epoch, n = training.micro_batches_per_epoch, training.accumulate
    shown = range(min(epochs, _period(per_epoch, n)))
    steps = tuple((epoch + 1) * per_epoch // n - epoch * per_epoch // n for epoch in shown)
    return steps[:1] if len(set(steps)) == 1 else steps


def _reported(training: TrainingPlan, rule: StepRule, consumed: int) -> dict[str, int]:
    """The framework's counters.

    ``estimated_stepping_batches`` is ceil(NB / N) x epochs under every strategy, and at most ``max_steps`` (Lightning:
    trainer/trainer.py).
    """
    engine = {"engine.global_steps": consumed // training.accumulate}
    if rule.stepping is Stepping.CARRY:
        return engine
    if rule.stepping is Stepping.CANCEL:
        taken = consumed // training.accumulate
        return {"trainer.step": taken + (taken < training.naive_steps)}
    if rule.stepping is Stepping.OVERRIDE:
        return {"state.global_step": updates(training, rule, consumed)}
    if rule.stepping is Stepping.WINDOW or not rule.counted:
        return {}
    finished, begun = divmod(consumed, training.micro_batches_per_epoch)
    split = rule.stepping is Stepping.SPLIT
    per_epoch = training.full_windows if split else training.windows
    limits = [] if training.max_steps is None else [training.max_steps]
    if training.epochs is not None:
        limits.append(training.windows * training.epochs)
    counters = {
        "trainer.global_step": finished * per_epoch + begun // training.accumulate,
        ESTIMATE: min(limits),
    }
    return counters | engine if split else counters


def _equal_max_steps(training: TrainingPlan, rule: StepRule) -> int | None:
    """The counter at the end of the epochs, if a training that stops there makes as many updates."""
    if training.epochs is None:
        return None
    end = training.epochs * training.micro_batches_per_epoch
    wanted = updates(training, rule, end)
    counter = training.full_windows * training.epochs if rule.stepping is Stepping.SPLIT else wanted
    reached = reaches(training, rule, counter)
    return counter if reached is not None and updates(training, rule, reached) == wanted else None


def _scales(
    training: TrainingPlan, rule: StepRule, steps: int, finished: int, cleared: Counter[int]
) -> dict[float, int]:
    """Sums of coefficients, the largest first.

    Lightning divides by N in incomplete windows too, whatever the strategy (loops/optimization/automatic.py,
    ``ClosureResult.from_training_step_output``), and the engine divides by N again.
    """
    n = training.accumulate
    unit = n if rule.twice else 1
    scales: Counter[float] = Counter()
    for offset, windows in cleared.items():
        scales[(n - offset) / (n * unit)] += windows
    if rule.stepping is Stepping.FLUSH and training.partial_window:
        scales[training.partial_window / n] += finished
    scales[1 / unit] += steps - scales.total()
    return dict(sorted((+scales).items(), reverse=True))


def _samples(training: TrainingPlan, micro_batches: int, short: int) -> int:
    """Samples of ``micro_batches`` micro-batches on all ranks, of which ``short`` are the last of an epoch."""
    missing = short * (training.batch_size - training.last_micro_batch)
    return (micro_batches * training.batch_size - missing) * training.world_size


def _period(per_epoch: int, n: int) -> int:
    """Epochs after which an epoch and a window of the engine begin together again."""
    return n // math.gcd(per_epoch, n)
