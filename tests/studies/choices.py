"""Simulations behind the choices of method: which interval, and which rule for the warm-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special, stats

from bench.judge.statistics import LEVEL, TRIM, Array, resampled_means, trimmed_mean
from bench.run.trial_record import warmups
from tests.studies.simulation import FAMILIES, FITTED, Noise, simulate

SIZES = (5, 7, 10, 20, 40)
OURS = "trimmed mean, expanded"
STEPS = 12
RESAMPLES = 1999
SLOW_VARIANT = 300
"""Samples on which the variants that cannot be calculated at once are tried."""
TRANSIENTS: dict[str, tuple[float, float]] = {
    "none": (0.0, 1.0),
    "first step 30 % slower": (0.3, 0.05),
    "30 % at first, time constant 2 steps": (0.3, 2.0),
    "15 % at first, time constant 5 steps": (0.15, 5.0),
    "100 % at first, time constant 1 step": (1.0, 1.0),
}
"""How much slower the first step is, and after how many steps that is down to a third."""


def intervals(samples: int, seed: int, families: Sequence[Noise] = FAMILIES[:4]) -> pd.DataFrame:
    """Coverage of 95 % intervals by several methods, per number of blocks: the share that holds the true ratio, 1.

    Every sample has two equally fast cells in paired blocks; shares are means over the kinds of noise.
    """
    rows: list[dict[str, Any]] = []
    for index, noise in enumerate(families):
        for n in SIZES:
            rng = np.random.default_rng([seed, index, n])
            logs = simulate(noise, reports=samples, cells=2, blocks=n, steps=STEPS, rng=rng)
            found = _methods(logs, seed)
            rows += [
                {
                    "method": name,
                    "noise": noise.name,
                    "blocks": n,
                    "coverage": float(((low <= 0) & (high >= 0)).mean()),
                    "width": float(np.median(high - low)),
                }
                for name, (low, high) in found.items()
            ]
    return pd.DataFrame(rows)


def _methods(logs: Array, seed: int) -> dict[str, tuple[Array, Array]]:
    """Ends of the intervals of each method."""
    cells = np.median(logs, axis=-1)
    a = cells[..., 0] - cells[..., 1]
    n = a.shape[1]
    plain = (1 - LEVEL) / 2
    wide = float(special.ndtr(-math.sqrt(n / (n - 1)) * stats.t.ppf((1 + LEVEL) / 2, n - 1)))
    by = {
        "mean": resampled_means(a, 0, RESAMPLES, seed),
        "median": resampled_means(a, (n - 1) // 2, RESAMPLES, seed),
        "trimmed mean": resampled_means(a, int(TRIM * n), RESAMPLES, seed),
    }
    found = {f"{name}, percentile": _ends(draws, plain) for name, draws in by.items()}
    found |= {f"{name}, expanded": _ends(draws, wide) for name, draws in by.items()}
    bca: Any = stats.bootstrap(
        (a[:SLOW_VARIANT],), np.mean, axis=-1, vectorized=True, n_resamples=RESAMPLES, method="BCa", rng=seed, batch=50
    )
    found["mean, BCa"] = bca.confidence_interval.low, bca.confidence_interval.high
    two = _two_levels(logs[:SLOW_VARIANT], seed)
    found["trimmed mean, steps resampled too, percentile"] = _ends(two, plain)
    found["trimmed mean, steps resampled too, expanded"] = _ends(two, wide)
    return found


def _ends(draws: Array, tail: float) -> tuple[Array, Array]:
    low, high = np.quantile(draws, [tail, 1 - tail], axis=1)
    return low, high


def _two_levels(logs: Array, seed: int, resamples: int = 299) -> Array:
    """Trimmed means of resampled blocks with resampled steps within each trial."""
    rng = np.random.default_rng(seed)
    samples, n, _, steps = logs.shape
    found = np.empty((samples, resamples))
    for i in range(samples):
        blocks = rng.integers(0, n, (resamples, n, 1))
        ours, theirs = (
            np.median(logs[i, blocks, cell, rng.integers(0, steps, (resamples, n, steps))], axis=-1) for cell in (0, 1)
        )
        found[i] = trimmed_mean(ours - theirs)
    return found


def fence(seconds: Array) -> NDArray[np.intp]:
    """The first step, at most half way, that is no outlier above the second half: pyperf's first condition."""
    half = seconds.shape[1] // 2
    q1, q3 = np.quantile(seconds[:, half:], [0.25, 0.75], axis=1)
    settled = seconds[:, : half + 1] <= (q3 + 1.5 * (q3 - q1))[:, None]
    settled[:, half] = True
    return np.asarray(settled.argmax(axis=1))


def pyperf_like(seconds: Array) -> NDArray[np.intp]:
    """pyperf's rule on what a trial has: no outlier first, and the halves of what is kept differ by no more than noise.

    pyperf compares two windows of 20 values by fixed percentages; with 12 steps the limit must follow the noise, here
    two standard errors of the difference of medians.
    """
    n = seconds.shape[1]
    found = np.full(len(seconds), n // 2)
    for k in range(n // 2, -1, -1):
        kept = seconds[:, k:]
        cut = kept.shape[1] // 2
        first, second = kept[:, :cut], kept[:, cut:]
        q1, q3 = np.quantile(second, [0.25, 0.75], axis=1)
        error = 1.2533 * (q3 - q1) / 1.349 * math.sqrt(1 / first.shape[1] + 1 / second.shape[1])
        settled = kept[:, 0] <= q3 + 1.5 * (q3 - q1)
        settled &= np.median(first, axis=1) - np.median(second, axis=1) <= 2 * error
        found[settled] = k
    return found


def mser(seconds: Array) -> NDArray[np.intp]:
    """MSER without the safeguards of ``statistics.warmup``, but for the limit of half the steps."""
    logs = np.log(seconds)
    n = logs.shape[1]
    scores = [logs[:, k:].var(axis=1) / (n - k) for k in range(n // 2 + 1)]
    return np.asarray(np.argmin(scores, axis=0))


WARMUP_RULES = {
    "nothing dropped": lambda seconds: np.zeros(len(seconds), dtype=np.intp),
    "outlier fence": fence,
    "pyperf's, adapted": pyperf_like,
    "MSER": mser,
    "this bench": warmups,
}


def warmup_rules(samples: int, seed: int, lengths: Sequence[int] = (12, 30)) -> pd.DataFrame:
    """Bias and root mean square error of a trial's median, in per cent, by rule, transient and number of steps."""
    rows = []
    for length in lengths:
        for name, (amount, constant) in TRANSIENTS.items():
            rng = np.random.default_rng([seed, length])
            noise = replace(FITTED, trial=0.0, drift=0.0, warm=math.log1p(amount), warm_steps=constant)
            logs = simulate(noise, reports=samples, cells=1, blocks=1, steps=length, rng=rng)[:, 0, 0]
            for rule, drop in WARMUP_RULES.items():
                dropped = drop(np.exp(logs))
                found = np.nanmedian(np.where(np.arange(length) < dropped[:, None], np.nan, logs), axis=1)
                rows.append(
                    {
                        "steps": length,
                        "transient": name,
                        "rule": rule,
                        "dropped": float(dropped.mean()),
                        "bias": 100 * float(found.mean()),
                        "error": 100 * math.sqrt(float((found**2).mean())),
                    }
                )
    return pd.DataFrame(rows)
