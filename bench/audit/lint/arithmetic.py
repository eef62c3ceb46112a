"""What a config's numbers give: steps by ``bench.audit.stepcount``'s rules, and the error of a sum in bf16.

The end of an epoch may leave a window incomplete. Lightning then steps (FLUSH), DeepSpeed continues the window in the
next epoch (CARRY), and under Lightning with DeepSpeed the engine continues it while the trainer starts anew (SPLIT).
"""

from __future__ import annotations

import dataclasses

from bench.audit.stepcount import StepRule, calculate
from bench.audit.training import TrainingPlan
from bench.errors import InputError
from bench.plan.cell import Stepping

MAX_EPOCHS = 1000
"""Epochs that are looked at: Lightning's default."""
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


def num_lost(plan: TrainingPlan, epochs: int) -> int:
    """Micro-batches in no update of the first epochs, where the trainer's ``zero_grad`` clears the engine's gradients.

    Those in the window that is open at the end are counted too.
    """
    found = calculate(dataclasses.replace(plan, epochs=min(epochs, MAX_EPOCHS)), SPLIT)
    assert found is not None
    return found.micro_batches_lost_in_mid_run + found.micro_batches_left_open


EXACT = 256
"""Equal addends that bf16 sums without error: 8 significant bits."""


def bf16_error(accumulate: int) -> str:
    """What becomes of the sum of ``accumulate`` gradients that are added in bf16."""
    if accumulate > EXACT:
        return f"{accumulate} equal gradients sum to {EXACT}/{accumulate} = {EXACT / accumulate:.3g} of the truth"
    return f"the sum may be off by {accumulate - 1} x 2^-9 = {(accumulate - 1) / 512:.2%}"
