"""Long runs: convergence over seeds, by MLPerf's test and its mirror image."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from bench import tables
from bench.analysis.gates import judge
from bench.analysis.longrun import COMPARED_STEPS, LONG_STEPS, MIN_SEEDS, SMOOTHED, finding, steps_to
from bench.cell import Cell
from tests.factories import make_cell, make_manifest, make_record

STEPS = 240


def curve(seed: int, rate: float = 1.0, start: float = 0.0) -> list[float]:
    """A loss that falls from 5 to 3, a little differently for each seed."""
    chance = random.Random(seed)
    speed = rate * (1 + chance.gauss(0, 0.02))
    return [start + 3 + 2 * math.exp(-speed * step / 60) + chance.gauss(0, 1e-3) for step in range(STEPS)]


def curves(rate: float = 1.0, start: float = 0.0, first: int = 0, count: int = 8) -> list[list[float]]:
    return [curve(first + seed, rate, start) for seed in range(count)]


def test_steps_to_a_target() -> None:
    falling = [10.0 - step for step in range(40)]
    assert steps_to(falling, falling[0]) == SMOOTHED, "the mean of the first ten steps is below the first loss"
    assert steps_to(falling, -3.0) == 19, "the mean of steps 9 to 18, 10 - 13.5, is the first that is at or below it"
    assert math.isinf(steps_to(falling, -1000.0))


def test_the_same_training_passes() -> None:
    assert finding(curves(), curves(first=100)) == ""


@pytest.mark.parametrize(("rate", "word"), [(0.8, "more than"), (1.25, "fewer than")])
def test_another_speed_of_convergence_is_found(rate: float, word: str) -> None:
    assert word in finding(curves(), curves(rate, first=100))


def test_never_reaching_the_loss_is_found() -> None:
    assert "8 of 8 seeds never reach" in finding(curves(), curves(start=0.5))


def judged(mine: Sequence[Sequence[float]], truth: Sequence[Sequence[float]]) -> Any:
    records = []
    for seed, (own, right) in enumerate(zip(mine, truth, strict=True)):
        cell = make_cell(seed=seed, timed_windows=STEPS - 2)
        records.append(make_record(cell.reference(), time={"losses": right}))
        records.append(make_record(cell, time={"losses": own}))
    return judge(tables.build(records, make_manifest())).trials.set_index("backend")


def drifting(one: Sequence[float]) -> list[float]:
    """The same start, and losses that rounding takes apart later on, without another speed."""
    return [loss + (0.004 * math.sin(step) if step >= COMPARED_STEPS else 0.0) for step, loss in enumerate(one)]


def test_a_long_run_may_drift_apart_after_its_first_steps() -> None:
    truth = curves()
    trials = judged([drifting(one) for one in truth], truth)
    assert set(trials["status"]) == {"ok"}
    early = [[*one[:30], one[30] + 0.004, *one[31:]] for one in truth]
    assert set(judged(early, truth).loc["ddp-deferred", "status"]) == {"invalid"}


def test_a_long_run_that_converges_more_slowly_is_invalid() -> None:
    truth = curves()
    slow = [[*one[:COMPARED_STEPS], *curve(seed, 0.8)[COMPARED_STEPS:]] for seed, one in enumerate(truth)]
    trials = judged(slow, truth)
    assert set(trials.loc["ddp-deferred", "status"]) == {"invalid"}
    assert "more than the reference's scatter explains" in trials.loc["ddp-deferred", "reason"].iloc[0]
    assert set(trials.loc["reference", "status"]) == {"ok"}


def test_too_few_seeds_are_not_tested() -> None:
    truth = curves(count=MIN_SEEDS - 1)
    slow = [[*one[:COMPARED_STEPS], *curve(seed, 0.8)[COMPARED_STEPS:]] for seed, one in enumerate(truth)]
    assert set(judged(slow, truth)["status"]) == {"ok"}


def test_short_runs_are_compared_step_by_step_to_their_end() -> None:
    assert Cell.from_dict(make_cell().to_dict()).windows < COMPARED_STEPS < LONG_STEPS <= STEPS
