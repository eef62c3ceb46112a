"""The step time of one cell with an interval: the estimate that ratios are made of, of one side alone.

It is the step time of a cell wherever the bench says one: in summary, report, plots, frames and citations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.analysis.statistics import (
    MIN_TRIALS,
    RESAMPLES,
    SEED,
    TRIM,
    bootstrap_many,
    too_few,
    trimmed_mean,
)
from bench.cell import Status
from bench.warmup import Array

NAME = f"{100 * TRIM:g} % trimmed mean"
"""Of the estimate, for headers and captions; the mean is that of logarithms, so a geometric one."""


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
    return estimates([medians], resamples=resamples, seed=seed)[0]


def estimates(samples: Sequence[Sequence[float]], *, resamples: int = RESAMPLES, seed: int = SEED) -> list[Estimate]:
    """``estimate`` of many cells, in their order; those of equally many trials are resampled together."""
    found: list[Estimate | None] = [None] * len(samples)
    alike: dict[int, list[int]] = {}
    for place, medians in enumerate(samples):
        if not len(medians):
            raise ValueError("an estimate needs a trial")
        alike.setdefault(len(medians), []).append(place)
    for n, places in alike.items():
        logs = np.log(np.array([samples[place] for place in places], dtype=float))
        for place, one in zip(places, _estimates(logs, n, resamples, seed), strict=True):
            found[place] = one
    return [one for one in found if one is not None]


def _estimates(logs: Array, n: int, resamples: int, seed: int) -> list[Estimate]:
    """From logarithms: a row per cell, a column per trial."""
    seconds = [math.exp(float(centre)) for centre in trimmed_mean(logs)]
    if n < MIN_TRIALS:
        return [Estimate(seconds=one, num_trials=n, reason=too_few(n, "trial")) for one in seconds]
    low, high = bootstrap_many(logs, resamples=resamples, seed=seed).interval()
    return [
        Estimate(seconds=one, low=math.exp(float(least)), high=math.exp(float(most)), num_trials=n)
        for one, least, most in zip(seconds, low, high, strict=True)
    ]


def step_times(trials: pd.DataFrame) -> dict[str, Estimate]:
    """The estimate of each cell, by its id, from rows of the trials table: over its ok trials.

    Over all that have a step time if none is ok: such a cell is shown with its status. Without one it is left out.
    """
    seconds = trials["step_time_s"].to_numpy(dtype=float, na_value=np.nan)
    known = trials[np.isfinite(seconds) & (seconds > 0)]
    fine = known["status"] == Status.OK
    used = known[fine | ~fine.groupby(known["cell_id"]).transform("any")]
    samples: Mapping[str, Sequence[float]] = {
        str(cell_id): values.astype(float).tolist()
        for cell_id, values in used.groupby("cell_id", sort=False)["step_time_s"]
    }
    return dict(zip(samples, estimates(list(samples.values())), strict=True))


def tokens_per_step(trials: pd.DataFrame) -> pd.Series:
    """Tokens of an optimizer step, by cell_id, from rows of the trials table; NA in a virtual world: it has no rate."""
    products = (trials["tokens_per_s"] * trials["step_time_s"]).groupby(trials["cell_id"])
    return products.first().astype("Float64").round()
