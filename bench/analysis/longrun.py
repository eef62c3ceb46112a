"""Long runs: rounding takes their losses apart, so what is tested is in how many steps they converge, over seeds.

A run is long from LONG_STEPS optimizer steps on. Its first COMPARED_STEPS losses are still compared one by one with the
reference's (``gates``); after that MLPerf's test is used (``convergence``), with the cells' seeds as the runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from bench.analysis.convergence import Convergence, converges
from bench.cell import REFERENCE, Status
from bench.warmup import Array

LONG_STEPS = 200
"""Optimizer steps from which a run is long."""
COMPARED_STEPS = 50
"""Of a long run whose losses are compared one by one: 2e-4 nats is how far sound backends came apart in 60."""
SMOOTHED = 10
"""Steps in the running mean of the loss that has to reach the target."""
TARGET_AT = 0.75
"""Of the reference's steps: the loss that it has then is the one to be reached."""
MIN_SEEDS = 5
"""On both sides: without the best and the worst run, three are left."""


def steps_to(losses: Sequence[float], target: float) -> float:
    """Optimizer steps until the running mean of the loss is at or below the target; infinite if it never is."""
    reached = np.flatnonzero(_smooth(losses) <= target)
    return float(reached[0] + SMOOTHED) if len(reached) else math.inf


def _smooth(losses: Sequence[float]) -> Array:
    return np.convolve(np.asarray(losses, dtype=float), np.full(SMOOTHED, 1 / SMOOTHED), mode="valid")


def finding(reference: Sequence[Sequence[float]], losses: Sequence[Sequence[float]]) -> str:
    """What is wrong with how a cell converges, one list of losses per seed; empty if nothing is.

    The target is the highest smoothed loss that a reference had after TARGET_AT of its steps, so that there is room for
    a cell that needs more. MLPerf's test asks whether the cell needs fewer steps than the reference's scatter explains;
    mirrored, whether it needs more.
    """
    target = max(float(_smooth(one)[: int(TARGET_AT * len(one))][-1]) for one in reference)
    due, taken = ([steps_to(one, target) for one in many] for many in (reference, losses))
    if sum(map(math.isinf, taken)) > 1:
        return f"{sum(map(math.isinf, taken))} of {len(taken)} seeds never reach the reference's loss of {target:.4g}"
    faster, slower = converges(due, taken), _mirrored(due, taken)
    if not faster.passed:
        return (
            f"converges in {faster.submission:.4g} steps, fewer than the reference's scatter explains "
            f"({faster.reference:.4g}, limit {faster.limit:.4g})"
        )
    if not slower.passed:
        return (
            f"converges in {-slower.submission:.4g} steps, more than the reference's scatter explains "
            f"({-slower.reference:.4g}, limit {-slower.limit:.4g})"
        )
    return ""


def _mirrored(reference: Sequence[float], taken: Sequence[float]) -> Convergence:
    return converges([-steps for steps in reference], [-steps for steps in taken])


def findings(trials: pd.DataFrame, losses: dict[Any, Any], work: Sequence[str]) -> dict[str, str]:
    """What is wrong with each long cell, by id, where enough seeds were run on both sides.

    ``work`` are the columns that are equal in cells that train the same; ``losses`` are by cell id and repeat.
    """
    long = trials[(trials["optimizer_steps_expected"] >= LONG_STEPS) & (trials["status"] == Status.OK)]
    first = long.sort_values("repeat").drop_duplicates("cell_id")
    alike = [*(name for name in work if name != "seed"), "optimizer_steps_expected"]
    found: dict[str, str] = {}
    for _, rows in first.groupby(alike, dropna=False):
        curves = {key: losses[key] for key in zip(rows["cell_id"], rows["repeat"], strict=True) if key in losses}
        own = rows[rows["backend"] == REFERENCE]
        truth = [curves[key] for key in zip(own["cell_id"], own["repeat"], strict=True) if key in curves]
        if len(truth) < MIN_SEEDS:
            continue
        others = rows[rows["backend"] != REFERENCE]
        way = ["backend", "accumulate", "world_size", "precision", "accumulation_dtype", "twin"]
        for _, cells in others.groupby(way, dropna=False):
            mine = [curves[key] for key in zip(cells["cell_id"], cells["repeat"], strict=True) if key in curves]
            if len(mine) >= MIN_SEEDS and (text := finding(truth, mine)):
                found |= dict.fromkeys(cells["cell_id"].astype(str), text)
    return found
