"""How many optimizer steps a training takes, by rule: what a plan must know before it sets ``max_steps`` or a schedule.

Pure arithmetic on integers; nothing is trained and nothing is imported but the words. Counts of micro-batches are per
rank (all ranks have equally many), counts of samples are over all ranks. Each rule names the source it was read from:
Lightning 2.6 and DeepSpeed 0.19.
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


class Stops(StrEnum):
    """What ends a training."""

    EPOCHS = "epochs"
    """All epochs are over, and ``max_steps``, if any, is not reached."""
    MAX_STEPS = "max_steps"
    """The counter that is compared with ``max_steps`` has reached it."""
    NEVER = "never"
    """Nothing: no epochs are given, and that counter stays below ``max_steps`` for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRule:
    """When a backend steps and by what it divides: all that the calculator knows of it."""

    stepping: Stepping
    """What becomes of the incomplete window at the end of an epoch."""
    clears: bool = False
    """``split`` only: the trainer's ``zero_grad`` clears what the engine's open window has accumulated."""
    twice: bool = False
    """``split`` only: trainer and engine both divide the loss by N."""

    @classmethod
    def of(cls, stepping: Stepping, sharding: Sharding, *, divides_once: bool = False) -> StepRule:
        """The rule of a backend.

        With ``split``, ZeRO-2 alone keeps gradients over a ``zero_grad``: it accumulates in ``all_grad_tensors``, which
        ``zero_grad`` leaves (deepspeed/runtime/zero/stage_1_and_2.py); ZeRO-1 accumulates in ``grad_accum``, set to
        None there, and ZeRO-3 overwrites its buffer after ``micro_step_id = 0`` (deepspeed/runtime/zero/stage3.py).
        """
        split = stepping is Stepping.SPLIT
        return cls(
            stepping=stepping,
            clears=split and sharding is not Sharding.GRADS,
            twice=split and not divides_once,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What one rule makes of a training.

    samples_used + samples_lost_in_mid_run + samples_left_open + samples_dropped + samples_unread
    = samples x epochs_begun + samples_padded.

    Where ``stops`` is ``never``, the counts are those of the moment when ``max_steps`` optimizer steps are really
    taken; training goes on behind it.
    """

    stops: Stops
    """What ends the training."""
    micro_batches_consumed: int
    """Micro-batches that one rank has trained on."""
    epochs_begun: int
    """Epochs of which at least one micro-batch was trained on."""
    epochs_consumed: float
    """Micro-batches consumed over micro-batches per epoch."""
    optimizer_steps: int
    """Steps that the inner optimizer really takes: parameter updates."""
    steps_per_epoch: tuple[int, ...]
    """Of them, those in each whole epoch; a pattern that repeats if there are more epochs."""
    steps_reported: dict[str, int]
    """The framework's own counters, and its estimate before training, by their names."""
    equal_max_steps: int | None
    """The ``max_steps`` that makes the same updates as these epochs; None if there is none, or no epochs are given."""
    update_scales: dict[float, int]
    """Sum of the coefficients of an update's micro-batches, 1 in the full batch's -> number of such updates."""
    samples_used: int
    """Samples that reached an update, repeated ones each time."""
    samples_padded: int
    """Samples that the sampler repeats in the epochs begun."""
    samples_dropped: int
    """Left out by ``drop_last`` in the epochs finished."""
    micro_batches_lost_in_mid_run: int
    """Micro-batches cleared out of a window that then became an update."""
    samples_lost_in_mid_run: int
    """Samples of these micro-batches on all ranks."""
    micro_batches_left_open: int
    """Micro-batches in the window that is open when training ends."""
    samples_left_open: int
    """Samples of these micro-batches on all ranks, whether cleared there or not."""
    samples_unread: int
    """Left in an epoch that training did not finish."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``update_scales`` becomes a list of pairs."""
        scales = [[scale, count] for scale, count in self.update_scales.items()]
        # Not dataclasses.asdict, which would turn the tuple of many epochs over one by one.
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {
            "stops": str(self.stops),
            "steps_per_epoch": list(self.steps_per_epoch),
            "update_scales": scales,
        }


def calculate(training: TrainingPlan, rule: StepRule) -> Steps | None:
    """What the rule makes of the training; None for ``Stepping.UNKNOWN``.

    - ``window`` and ``flush`` step after N micro-batches and at the end of the epoch (Lightning:
      loops/training_epoch_loop.py, ``_should_accumulate``).
    - ``carry`` steps after N micro-batches counted over the whole training (DeepSpeed: runtime/engine.py,
      ``is_gradient_accumulation_boundary``).
    - ``split`` steps as ``carry``, but what is compared with ``max_steps`` is ``trainer.global_step``, which counts the
      micro-batches of an epoch that are multiples of N (Lightning: the same ``_should_accumulate`` under a strategy
      that ``handles_gradient_accumulation``; loops/optimization/automatic.py, ``_optimizer_step``).

    Lightning looks at ``max_steps`` before every micro-batch and before every epoch (``_TrainingEpochLoop.done``,
    ``_FitLoop.done``), so training ends right after the micro-batch whose step reaches it, and with 0 before the first.
    """
    if rule.stepping is Stepping.UNKNOWN:
        return None
    end = None if training.epochs is None else training.epochs * training.micro_batches_per_epoch
    reached = None if training.max_steps is None else reaches(training, rule, training.max_steps)
    if reached is not None and (end is None or reached <= end):
        return _after(training, rule, reached, Stops.MAX_STEPS)
    if end is not None:
        return _after(training, rule, end, Stops.EPOCHS)
    assert training.max_steps is not None
    return _after(training, rule, training.max_steps * training.accumulate, Stops.NEVER)


def reaches(training: TrainingPlan, rule: StepRule, steps: int) -> int | None:
    """The micro-batches after which the counter that is compared with ``max_steps`` is ``steps``; None if never."""
    if steps == 0:
        return 0
    if rule.stepping is Stepping.CARRY:
        return steps * training.accumulate
    per_epoch = training.full_windows if rule.stepping is Stepping.SPLIT else training.windows
    if per_epoch == 0:
        return None
    epochs = (steps - 1) // per_epoch
    windows = steps - epochs * per_epoch
    in_epoch = min(windows * training.accumulate, training.micro_batches_per_epoch)
    return epochs * training.micro_batches_per_epoch + in_epoch


def updates(training: TrainingPlan, rule: StepRule, micro_batches: int) -> int:
    """Optimizer steps really taken in the first ``micro_batches`` micro-batches."""
    if rule.stepping in (Stepping.CARRY, Stepping.SPLIT):
        return micro_batches // training.accumulate
    finished, begun = divmod(micro_batches, training.micro_batches_per_epoch)
    return finished * training.windows + begun // training.accumulate


def _after(training: TrainingPlan, rule: StepRule, consumed: int, stops: Stops) -> Steps:
    """The state of a training that ends after ``consumed`` micro-batches."""
    per_epoch, n = training.micro_batches_per_epoch, training.accumulate
    carries = rule.stepping in (Stepping.CARRY, Stepping.SPLIT)
    finished, begun = consumed // per_epoch, ceil(consumed, per_epoch)
    steps = updates(training, rule, consumed)
    stepped = consumed - consumed % n if carries else consumed
    cleared = _cleared(per_epoch, n, stepped) if rule.clears else Counter[int]()
    lost = sum(offset * windows for offset, windows in cleared.items())
    # The epochs' last micro-batches have fewer samples. Cleared are those after which the next epoch begins in the
    # same window of the engine.
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
    """Micro-batches cleared at the start of a window of the engine -> number of such windows; 0 is left out.

    Lightning zeroes gradients between forward and backward of every micro-batch whose index in the epoch is a multiple
    of N (loops/optimization/automatic.py, ``_make_zero_grad_fn`` and ``Closure.closure``). In epoch e all of these lie
    at the same offset (e x NB) mod N of the engine's windows, one per window, and clear what stands before them. If the
    next epoch begins in the window of the last one, its own clears more, and counts instead.
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
    """Optimizer steps in each whole epoch until they repeat; one number if all are equal."""
    if rule.stepping not in (Stepping.CARRY, Stepping.SPLIT):
        return (training.windows,)
    per_epoch, n = training.micro_batches_per_epoch, training.accumulate
    shown = range(min(epochs, _period(per_epoch, n)))
    steps = tuple((epoch + 1) * per_epoch // n - epoch * per_epoch // n for epoch in shown)
    return steps[:1] if len(set(steps)) == 1 else steps


def _reported(training: TrainingPlan, rule: StepRule, consumed: int) -> dict[str, int]:
    """What the framework says of itself.

    ``estimated_stepping_batches``: ceil(NB / N) x epochs under every strategy, no more than ``max_steps``, which alone
    is said where there are no epochs (Lightning: trainer/trainer.py).
    """
    engine = {"engine.global_steps": consumed // training.accumulate}
    if rule.stepping is Stepping.CARRY:
        return engine
    if rule.stepping is Stepping.WINDOW:
        return {}
    finished, begun = divmod(consumed, training.micro_batches_per_epoch)
    split = rule.stepping is Stepping.SPLIT
    per_epoch = training.full_windows if split else training.windows
    limits = [] if training.max_steps is None else [training.max_steps]
    if training.epochs is not None:
        limits.append(training.windows * training.epochs)
    counters = {
        "trainer.global_step": finished * per_epoch + begun // training.accumulate,
        "trainer.estimated_stepping_batches": min(limits),
    }
    return counters | engine if split else counters


def _equal_max_steps(training: TrainingPlan, rule: StepRule) -> int | None:
    """The counter at the end of the epochs, if a training that stops when it gets there makes as many updates."""
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

    Lightning divides by N also what is no full window (loops/optimization/automatic.py,
    ``ClosureResult.from_training_step_output``), whatever the strategy, and the engine divides by N again.
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
    """Samples of so many micro-batches on all ranks, so many of which are the last of an epoch."""
    missing = short * (training.batch_size - training.last_micro_batch)
    return (micro_batches * training.batch_size - missing) * training.world_size


def _period(per_epoch: int, n: int) -> int:
    """Epochs after which a window of the engine begins with an epoch again."""
    return n // math.gcd(per_epoch, n)
