"""What a config's numbers give: steps by ``bench.audit.stepcount``'s rules, and the error of a sum in 16 bits.

The end of an epoch may leave a window incomplete. Lightning then steps (FLUSH), DeepSpeed continues the window in the
next epoch (CARRY), and under Lightning with DeepSpeed the engine continues it while the trainer starts anew (SPLIT).
"""

from __future__ import annotations

import math

from bench.audit.stepcount import CARRIES, StepRule
from bench.audit.training import TrainingPlan
from bench.errors import InputError
from bench.plan.cell import Stepping

FLUSH, CARRY = StepRule(stepping=Stepping.FLUSH), StepRule(stepping=Stepping.CARRY)
SPLIT = StepRule(stepping=Stepping.SPLIT, clears=True, twice=True)


def batches_per_epoch(samples: int, batch_size: int, world_size: int, *, drop_last: bool) -> int:
    """NB, the micro-batches per epoch and rank; 0 if ``drop_last`` leaves none."""
    try:
        return TrainingPlan(
            samples=samples, batch_size=batch_size, world_size=world_size, drop_last=drop_last
        ).micro_batches_per_epoch
    except InputError:
        return 0


def windows_of(num_batches: int, accumulate: int) -> TrainingPlan:
    """The windows of an epoch with NB micro-batches, at least 1, of one sample each."""
    return TrainingPlan(samples=num_batches, batch_size=1, accumulate=accumulate)


BITS = {"bf16": 8, "fp16": 11}
"""Significant bits of a dtype, the hidden one included."""
SMALLEST = {"bf16": -133, "fp16": -24}
"""The power of two that is a dtype's smallest positive number."""


def equal_sum(accumulate: int, dtype: str) -> float:
    """The sum of N gradients of 1/N, each added in the dtype; 1 would be right."""
    addend, total = _rounded(1 / accumulate, dtype), 0.0
    for _ in range(accumulate):
        before, total = total, _rounded(total + addend, dtype)
        if total == before:  # all further addends are lost
            break
    return total


def _rounded(number: float, dtype: str) -> float:
    """The nearest number that the dtype has, ties to even."""
    unit = max(math.frexp(number)[1] - BITS[dtype], SMALLEST[dtype])
    return math.ldexp(round(math.ldexp(number, -unit)), unit)


def sum_error(accumulate: int, dtype: str) -> str:
    """What becomes of the sum of N gradients in a dtype of 16 bits.

    Each of the N - 1 additions after the first rounds by at most half a unit in the last place.
    """
    total = equal_sum(accumulate, dtype)
    if total != 1:
        return f"{accumulate} equal gradients of 1/{accumulate} sum to {total:.4g} instead of 1"
    return f"the sum may be off by {accumulate - 1} x 2^-{BITS[dtype] + 1} = {worst_error(accumulate, dtype):.2%}"


def worst_error(accumulate: int, dtype: str) -> float:
    """The largest relative error of a sum of N gradients of one sign."""
    return (accumulate - 1) / float(2 ** (BITS[dtype] + 1))


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
