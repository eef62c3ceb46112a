"""Bootstrap of trimmed means: the intervals and p-values of ``bench.judge.statistics``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Array = NDArray[np.float64]

LEVEL = 0.95

TRIM = 0.2
"""Share of the trials trimmed on each side: Wilcox, Introduction to Robust Estimation and Hypothesis Testing."""
RESAMPLES = 9999
SEED = 20
BATCH = 4_000_000
"""Number of values resampled at a time, to limit memory."""


def trimmed_mean(values: Array, axis: int = -1) -> Array:
    """Mean along the last axis without the smallest and the largest TRIM share of the values."""
    assert axis in {-1, values.ndim - 1}, "scipy.stats.bootstrap resamples along the last axis"
    n = values.shape[-1]
    out = int(TRIM * n)
    middle = np.partition(values, (out, n - out - 1), axis=-1)[..., out : n - out] if out else values
    return np.asarray(middle.mean(axis=-1))


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Resampled centres of many comparisons, as logarithms: one row per comparison."""

    centres: Array
    draws: Array
    inflation: Array
    """Factor by which the bootstrap underestimates the standard error, per comparison: sqrt(n / (n - 1)) if paired."""
    freedom: Array
    """Degrees of freedom of Student's t, per comparison."""

    def interval(self, level: float = LEVEL) -> tuple[Array, Array]:
        """Ends of the expanded percentile intervals."""
        tails = special.ndtr(-self.inflation * stats.t.ppf((1 + level) / 2, self.freedom))
        ends = [np.quantile(draws, (tail, 1 - tail)) for draws, tail in zip(self.draws, tails, strict=True)]
        low, high = np.array(ends).reshape(-1, 2).T
        return np.asarray(low), np.asarray(high)

    def p_above(self, value: float) -> Array:
        """One-sided p-values of the hypothesis that the centre is at most ``value``; consistent with ``interval``."""
        return self._p((self.draws <= value).mean(axis=1), self.centres - value)

    def p_below(self, value: float) -> Array:
        """One-sided p-values of the hypothesis that the centre is at least ``value``."""
        return self._p((self.draws >= value).mean(axis=1), value - self.centres)

    def p_different(self) -> Array:
        """Two-sided p-values of the hypothesis that the centre is 0."""
        smaller = np.minimum(self.p_above(0), self.p_below(0))
        return np.asarray(np.minimum(1, 2 * smaller))

    def p_same(self, margin: float) -> Array:
        """p-values of the hypothesis that the centre is outside the margin: the larger of two one-sided ones."""
        ends = self.p_above(-math.log1p(margin)), self.p_below(math.log1p(margin))
        return np.asarray(np.maximum(*ends))

    def shifted(self, by: float) -> Bootstrap:
        """The same with all first cells slower by a factor of e^by."""
        return replace(self, centres=self.centres + by, draws=self.draws + by)

    def _p(self, tails: Array, distances: Array) -> Array:
        """p-values from the share of draws on the wrong side, or from a normal tail if there are too few such draws."""
        few = 5 / self.draws.shape[1]
        errors = self.draws.std(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            normal = np.where(errors > 0, distances / errors, np.sign(distances) * np.inf)
        normal = np.nan_to_num(normal, nan=0.0, posinf=np.inf, neginf=-np.inf)
        reach = -special.ndtri(few)
        scores = np.where(tails < few, np.maximum(normal, reach), -special.ndtri(np.maximum(tails, few)))
        return np.asarray(stats.t.sf(scores / self.inflation, self.freedom))


def bootstrap_two_samples(a: Array, b: Array, *, resamples: int = RESAMPLES, seed: int = SEED) -> Bootstrap:
    """Resample unpaired trials of comparisons: one row per comparison, one column per trial.

    The centre is the trimmed mean of ``a`` minus that of ``b``, with Welch's degrees of freedom. Hesterberg's expansion
    uses the ratio of the unbiased variance to the bootstrap's.
    """
    result: Any = stats.bootstrap(
        (np.sort(a, axis=1), np.sort(b, axis=1)),  # so that the order of trials does not matter
        difference_of_centres,
        n_resamples=resamples,
        batch=max(1, BATCH // (a.size + b.size)),
        vectorized=True,
        axis=-1,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    draws = result.bootstrap_distribution.reshape(a.shape[0], -1)
    sizes = a.shape[1], b.shape[1]
    parts = [np.maximum(s.var(axis=1, ddof=1), np.finfo(float).tiny) / s.shape[1] for s in (a, b)]
    biased = sum(part * (n - 1) / n for part, n in zip(parts, sizes, strict=True))
    welch = sum(part**2 / (n - 1) for part, n in zip(parts, sizes, strict=True))
    both = sum(parts)
    with np.errstate(invalid="ignore", divide="ignore"):
        freedom = np.where(welch > 0, np.square(both) / welch, min(sizes) - 1)
    return Bootstrap(difference_of_centres(a, b), draws, np.sqrt(both / biased), freedom)


def bootstrap_one_sample(a: Array, *, resamples: int = RESAMPLES, seed: int = SEED) -> Bootstrap:
    """Resample single or paired samples: one row per comparison, one column per trial or block.

    The draws are those of ``scipy.stats.bootstrap``, computed faster for thousands of rows.
    """
    rows, n = a.shape
    full = np.ones(rows)
    draws = resampled_means(a, int(TRIM * n), resamples, seed)
    return Bootstrap(trimmed_mean(a), draws, full * math.sqrt(n / (n - 1)), full * (n - 1))


def resampled_means(a: Array, out: int, resamples: int, seed: int) -> Array:
    """Means of resamples of each row without the ``out`` smallest and largest values.

    All rows are resampled with the same random numbers, which pick the same order statistics of every row: the mean
    of a resample is a weighted sum of the sorted row, with the same weights for every row.
    """
    return np.asarray(np.sort(a, axis=1) @ _weights(a.shape[1], out, resamples, seed).T)


@lru_cache(maxsize=2)
def _weights(n: int, out: int, resamples: int, seed: int) -> Array:
    """Weights of the n order statistics in each resample without its ``out`` smallest and largest values."""
    picked = np.sort(np.random.default_rng(seed).integers(0, n, (resamples, n)), axis=1)[:, out : n - out]
    places = picked + n * np.arange(resamples)[:, None]
    return np.asarray(np.bincount(places.ravel(), minlength=n * resamples).reshape(resamples, n) / (n - 2 * out))


def difference_of_centres(a: Array, b: Array, axis: int = -1) -> Array:
    """Trimmed mean of a minus that of b, along the last axis."""
    return np.asarray(trimmed_mean(a, axis) - trimmed_mean(b, axis))
