"""Windows and steps of a config whose micro-batches per epoch and rank, NB, are known, and what a sum in bf16 loses.

The rules are ``bench.audit.stepcount``'s; here is only what remarks ask of them. The three ways in which a window that
the end of an epoch leaves incomplete is treated are ``flush`` (Lightning itself), ``carry`` (DeepSpeed) and ``split``
(DeepSpeed under Lightning) of ``bench.plan.cell.Stepping``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from bench.audit import stepcount
from bench.audit.stepcount import StepRule
from bench.audit.training import TrainingPlan
from bench.errors import InputError
from bench.plan.cell import Stepping

MAX_EPOCHS = 1000
"""Epochs that are looked at: as many as Lightning trains if it is told nothing."""
FLUSH, CARRY = StepRule(stepping=Stepping.FLUSH), StepRule(stepping=Stepping.CARRY)
SPLIT = StepRule(stepping=Stepping.SPLIT, clears=True, twice=True)


def batches_per_epoch(samples: int, batch_size: int, world_size: int, *, drop_last: bool) -> int:
    """NB of a loader that keeps or drops its last, smaller batch; 0 if it has none."""
    try:
        return TrainingPlan(
            samples=samples, batch_size=batch_size, world_size=world_size, drop_last=drop_last
        ).micro_batches_per_epoch
    except InputError:
        return 0


@dataclass(frozen=True, slots=True)
class Epochs:
    """The arithmetic of a run whose epochs all have NB micro-batches."""

    num_batches: int
    """NB, at least 1."""
    accumulate: int
    """N, at most ``bench.audit.training.LARGEST_ACCUMULATE``."""

    @property
    def _plan(self) -> TrainingPlan:
        return TrainingPlan(samples=self.num_batches, batch_size=1, accumulate=self.accumulate)

    @property
    def tail(self) -> int:
        """Micro-batches of the incomplete window at the end of an epoch; 0 if there is none."""
        return self._plan.partial_window

    @property
    def flushed(self) -> int:
        """Steps per epoch if the tail is stepped too: ceil(NB / N)."""
        return self._plan.windows

    @property
    def whole(self) -> int:
        """Complete windows per epoch, counted anew in each: floor(NB / N). Lightning's steps above DeepSpeed."""
        return self._plan.full_windows

    def carried(self, epochs: int) -> int:
        """Steps of an engine that counts micro-batches on over epochs: floor(NB E / N)."""
        return stepcount.updates(self._plan, CARRY, self.num_batches * epochs)

    def batches_at_flushed_step(self, step: int) -> int:
        """Micro-batches consumed when step number ``step`` (from 1) has been made, with ``flush``."""
        return stepcount.reaches(self._plan, FLUSH, step) or 0

    def batches_at_whole_step(self, step: int) -> int | None:
        """Micro-batches consumed when the trainer above DeepSpeed has counted ``step`` steps; None if it never does."""
        return stepcount.reaches(self._plan, SPLIT, step)

    def lost(self, epochs: int) -> int:
        """Micro-batches that no update sees, over the first epochs, where the trainer's ``zero_grad`` clears them.

        Those that are open after the last of these epochs are counted too.
        """
        plan = dataclasses.replace(self._plan, epochs=min(epochs, MAX_EPOCHS))
        found = stepcount.calculate(plan, SPLIT)
        assert found is not None
        return found.micro_batches_lost_in_mid_run + found.micro_batches_left_open


EXACT = 256
"""Equal addends that bf16 sums without error: 8 significant bits."""


def effect(accumulate: int) -> str:
    """What becomes of the sum of ``accumulate`` gradients that are added in bf16."""
    if accumulate > EXACT:
        return f"{accumulate} equal gradients sum to {EXACT}/{accumulate} = {EXACT / accumulate:.3g} of the truth"
    return f"the sum may be off by {accumulate - 1} x 2^-9 = {(accumulate - 1) / 512:.2%}"
