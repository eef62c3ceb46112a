"""The step time of one cell with an interval: the estimate that ratios are made of, of one side alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.analysis.statistics import MIN_TRIALS, RESAMPLES, SEED, bootstrap_many, trimmed_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Seconds of an optimizer step: the trimmed mean of the logarithms of trials' medians, as in ``ratio``."""

    seconds: float
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval over the trials of the run; None with fewer than MIN_TRIALS of them."""
    num_trials: int
    reason: str = ""
    """Why there is no interval."""


def estimate(medians: Sequence[float], *, resamples: int = RESAMPLES, seed: int = SEED) -> Estimate:
    """From the seconds per step of each trial, at least one.

    The interval is about this run: what the machine does from day to day is not in it. Ratios are paired where they can
    be, and so are narrower than two such intervals would let one think.
    """
    if not len(medians):
        raise ValueError("an estimate needs a trial")
    logs = np.log(np.asarray(medians, dtype=float))
    n = len(logs)
    seconds = math.exp(float(trimmed_mean(logs)))
    if n < MIN_TRIALS:
        what = "trial" if n == 1 else "trials"
        return Estimate(seconds=seconds, num_trials=n, reason=f"no interval: {n} {what}, and {MIN_TRIALS} are needed")
    low, high = bootstrap_many(logs[None], resamples=resamples, seed=seed).interval()
    return Estimate(seconds=seconds, low=math.exp(float(low[0])), high=math.exp(float(high[0])), num_trials=n)
