"""What speaks for the interval and for the warm-up rule, on the noise of real trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from bench.judge.statistics import Array, LogMean
from bench.run.trial_record import warmups
from studies.trial_noise import Noise

SIZES = (5, 8, 13, 26)
OURS = "mean, Student's t"
TRANSIENTS: dict[str, tuple[float, float]] = {
    "none": (0.0, 1.0),
    "first step 30 % slower": (0.3, 0.05),
    "30 % at first, time constant 2 steps": (0.3, 2.0),
    "100 % at first, time constant 1 step": (1.0, 1.0),
}
"""How much slower the first step is, and after how many steps that is down to a third."""


def intervals(noises: Sequence[Noise], samples: int, seed: int) -> pd.DataFrame:
    """95 % intervals by method and number of blocks: the share that holds the true ratio, 1, and the median width."""
    rows: list[dict[str, Any]] = []
    for noise in noises:
        for n in SIZES:
            logs = noise.reports(samples, 2, n, np.random.default_rng([seed, n]))
            for name, (low, high) in _methods(logs[:, :, 1] - logs[:, :, 0], seed).items():
                held, width = ((low <= 0) & (high >= 0)).mean(), np.median(np.expm1(high - low))
                rows.append({"method": name, "noise": noise.name, "blocks": n, "coverage": held, "width": width})
    return pd.DataFrame(rows)


def _methods(a: Array, seed: int) -> dict[str, tuple[Array, Array]]:
    """Ends of the intervals of each method."""
    found = {OURS: LogMean.of(a).interval()}
    centres = {"mean": np.mean, "20 % trimmed mean": lambda values, axis: stats.trim_mean(values, 0.2, axis=axis)}
    for name, centre in centres.items():
        drawn = stats.bootstrap((a,), centre, axis=1, n_resamples=999, batch=100, method="percentile", rng=seed)
        found[f"{name}, bootstrap"] = drawn.confidence_interval.low, drawn.confidence_interval.high
    return found


def fence(seconds: Array) -> NDArray[np.intp]:
    """The first step, at most half way, that is no outlier above the second half: pyperf's first condition."""
    half = seconds.shape[1] // 2
    q1, q3 = np.quantile(seconds[:, half:], [0.25, 0.75], axis=1)
    settled = seconds[:, : half + 1] <= (q3 + 1.5 * (q3 - q1))[:, None]
    settled[:, half] = True
    return np.asarray(settled.argmax(axis=1))


def mser(seconds: Array) -> NDArray[np.intp]:
    """MSER without the safeguards of ``trial_record.warmup``, but for the limit of half the steps."""
    logs = np.log(seconds)
    n = logs.shape[1]
    scores = [logs[:, k:].var(axis=1) / (n - k) for k in range(n // 2 + 1)]
    return np.asarray(np.argmin(scores, axis=0))


WARMUP_RULES: dict[str, Callable[[Array], NDArray[np.intp]]] = {
    "nothing dropped": lambda seconds: np.zeros(len(seconds), dtype=np.intp),
    "outlier fence": fence,
    "MSER": mser,
    "this bench": warmups,
}


def warmup_rules(steps: Array, samples: int, seed: int) -> pd.DataFrame:
    """Bias and root mean square error of a trial's median, in per cent, by transient and rule.

    ``steps`` has logarithms of the steps of settled trials less their median, a row each; to rows drawn from them, in
    random order within a row, a transient is added.
    """
    rows = []
    for name, (amount, constant) in TRANSIENTS.items():
        rng = np.random.default_rng(seed)
        logs = rng.permuted(steps[rng.integers(len(steps), size=samples)], axis=1)
        logs = logs + np.log1p(amount * np.exp(-np.arange(logs.shape[1]) / constant))
        for rule, drop in WARMUP_RULES.items():
            dropped = drop(np.exp(logs))
            found = np.nanmedian(np.where(np.arange(logs.shape[1]) < dropped[:, None], np.nan, logs), axis=1)
            bias, error = 100 * float(found.mean()), 100 * math.sqrt(float((found**2).mean()))
            rows.append({"transient": name, "rule": rule, "bias": bias, "error": error})
    return pd.DataFrame(rows)
