"""Detects the warm-up of a trial from its step times. Needs only numpy, since the runner uses it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def warmup(seconds: Sequence[float]) -> int:
    """Number of first steps of a trial to drop, at most half.

    MSER (White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69(6), 1997):
    the number k that minimizes sum((x - mean)^2) / (n - k)^2 over the n - k steps kept. It is used on logarithms,
    smoothed by a running median of three so that a single slow step is not taken for a warm-up (the first step is not
    smoothed). Warm-up is slow, so k must satisfy: the first step and the median of the dropped steps are above the
    upper quartile of those kept, and every dropped step is above their median. Otherwise nothing is dropped. Of the
    rules simulated on 12 and 30 steps, pyperf's among them, this one leaves the least bias; docs/statistics.md has the
    table.
    """
    return int(warmups(np.asarray([seconds], dtype=float))[0]) if len(seconds) else 0


def warmups(seconds: Array) -> NDArray[np.intp]:
    """``warmup`` of many trials of equal length, one per row."""
    logs = np.log(seconds)
    rows, n = logs.shape
    if n < 4:
        return np.zeros(rows, dtype=np.intp)
    smooth = logs.copy()
    smooth[:, 1:-1] = np.median(np.stack([logs[:, :-2], logs[:, 1:-1], logs[:, 2:]]), axis=0)
    smooth -= smooth.mean(axis=1, keepdims=True)  # else the differences of sums below lose precision
    kept = n - np.arange(n // 2 + 1)
    sums, squares = (_sums_from(values)[:, : n // 2 + 1] for values in (smooth, smooth**2))
    scores = (squares - sums**2 / kept) / kept**2
    found = scores.argmin(axis=1)
    unsure = np.flatnonzero(found)
    while len(unsure):
        slow = np.empty(len(unsure), dtype=bool)
        for k in np.unique(found[unsure]):
            at = found[unsure] == k
            slow[at] = _slow_start(logs[unsure[at]], int(k))
        unsure = unsure[~slow]
        scores[unsure, found[unsure]] = np.inf
        found[unsure] = scores[unsure].argmin(axis=1)
        unsure = unsure[found[unsure] > 0]
    return np.asarray(found)


def _slow_start(logs: Array, k: int) -> NDArray[np.bool_]:
    """Whether the first k steps of each row are slower than the others."""
    dropped = logs[:, :k]
    middle, upper = np.quantile(logs[:, k:], [0.5, 0.75], axis=1)
    least = np.minimum(logs[:, 0], np.median(dropped, axis=1))
    return np.asarray((least > upper) & (dropped.min(axis=1) > middle))


def _sums_from(values: Array) -> Array:
    """Sums of each row from each column to the last."""
    return np.asarray(values[:, ::-1].cumsum(axis=1)[:, ::-1])
