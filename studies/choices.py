"""What speaks for the interval, on the noise of real trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from bench.judge.statistics import Array, LogMean
from studies.trial_noise import Noise

SIZES = (5, 8, 13, 26)
OURS = "mean, Student's t"


def intervals(noises: Sequence[Noise], samples: int, seed: int) -> pd.DataFrame:
    """95 % intervals by method and number of blocks: the share that holds the true ratio, 1, and the median width."""
    rows: list[dict[str, Any]] = []
    for noise in noises:
        for n in SIZES:
            logs = noise.reports(samples, 2, n, np.random.default_rng([seed, n]))
            for name, (low, high) in _methods(logs[:, :, 1] - logs[:, :, 0], seed).items():
                held, width = ((low <= 0) & (high >= 0)).mean(), np.median(np.expm1(high - low))
                rows.append(
                    {
                        "method": name,
                        "noise": noise.name,
                        "blocks": n,
                        "coverage": held,
                        "width": width,
                    }
                )
    return pd.DataFrame(rows)


def _methods(a: Array, seed: int) -> dict[str, tuple[Array, Array]]:
    """Ends of the intervals of each method."""
    found = {OURS: LogMean.of(a).interval()}
    centres = {
        "mean": np.mean,
        "20 % trimmed mean": lambda values, axis: stats.trim_mean(values, 0.2, axis=axis),
    }
    for name, centre in centres.items():
        drawn = stats.bootstrap(
            (a,), centre, axis=1, n_resamples=999, batch=100, method="percentile", rng=seed
        )
        found[f"{name}, bootstrap"] = drawn.confidence_interval.low, drawn.confidence_interval.high
    return found
