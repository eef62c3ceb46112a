"""Simulated step times with realistic noise, its parameters fitted from a real journal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, signal, stats

from bench.judge.statistics import Array
from bench.judge.tables import Tables
from bench.plan.cell import Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """What makes step times of one cell differ; standard deviations of their logarithms."""

    name: str
    about: str = ""
    step: float
    """Between steps."""
    step_freedom: float = math.inf
    """Degrees of freedom of Student's t: heavy tails where this is small, the normal distribution where infinite."""
    trial: float
    """Between trials, beyond drift."""
    trial_freedom: float = math.inf
    drift: float = 0.0
    """What the machine does to all cells alike: an autoregressive process over the trials in their order."""
    memory: float = 0.0
    """Correlation of that between one trial and the next."""
    trend: float = 0.0
    """How much slower the last of 100 blocks is than the first."""
    slow_share: float = 0.0
    """The share of trials in a second mode."""
    slow_by: float = 0.0
    """How much slower those are."""
    warm: float = 0.0
    """How much slower the first recorded step is; it decays with e^(-step / warm_steps)."""
    warm_steps: float = 1.5


FITTED = Noise(
    name="cpu-reference",
    about="fitted from the 84 trials of results/old/cpu-reference: "
    "28 cells, 3 repeats, 12 timed steps, two shared cores",
    step=0.0516,
    step_freedom=5.14,
    trial=0.0248,
    drift=0.0271,
    memory=0.732,
)
"""Found by ``fit``; the test of this module fits it again."""

FAMILIES: tuple[Noise, ...] = (
    FITTED,
    replace(
        FITTED,
        name="drift",
        about="the same, drifting twice as much, and 10 % slower after 100 blocks, with warm-up",
        drift=2 * FITTED.drift,
        trend=math.log(1.1),
        warm=0.2,
    ),
    replace(
        FITTED,
        name="two modes",
        about="the same, and 15 % of the trials are 10 % slower, with warm-up",
        slow_share=0.15,
        slow_by=math.log(1.1),
        warm=0.2,
    ),
    replace(
        FITTED,
        name="heavy tails",
        about="the same, with Student's t with 3 degrees of freedom between trials and steps, with warm-up",
        trial_freedom=3.0,
        step_freedom=3.0,
        warm=0.2,
    ),
    Noise(
        name="quiet",
        about="not fitted: 1 % between trials and between steps, as with locked clocks and nobody else, with warm-up",
        step=0.01,
        trial=0.01,
        drift=0.005,
        memory=0.8,
        warm=0.2,
    ),
)
"""What the study simulates."""


def fit(tables: Tables, name: str = "fitted") -> Noise:
    """The parameters of a run's noise, from its trials table (in the order of the journal) and its steps table.

    - step: standard deviation of the logarithms around their trial's median; its tails by the excess kurtosis of
      Student's t, 6 / (freedom - 4).
    - trial and drift: variance of trial medians around their cell's mean, times R / (R - 1) for R repeats, less what a
      median of n steps has by itself, pi/2 s^2 / n with s from the quartiles. How it divides is fitted to the
      autocorrelation of the residuals over the order of the trials at lags 1 to 8: share * memory^lag.
    """
    keys = ["cell_id", "repeat"]
    good = tables.trials[tables.trials["status"].isin([Status.OK, Status.INVALID])][keys].reset_index(drop=True)
    logs = tables.steps.assign(log=np.log(tables.steps["seconds"].astype(float)))
    medians = logs.groupby(keys)["log"].median().rename("median").reset_index()
    order = good.merge(medians, on=keys, how="inner")
    repeats = order.groupby("cell_id")["median"].transform("size").to_numpy(dtype=float)
    if len(order) < 20 or repeats.min() < 2:
        raise ValueError("noise is fitted to at least 20 trials, with at least 2 repeats of each cell")
    within = (logs["log"] - logs.groupby(keys)["log"].transform("median")).to_numpy(dtype=float)
    num_steps = len(logs) / len(order)
    residuals = (order["median"] - order.groupby("cell_id")["median"].transform("mean")).to_numpy(dtype=float)
    residuals = residuals * np.sqrt(repeats / (repeats - 1))
    robust = float(stats.iqr(within)) / 1.349
    between = max(0.0, float(np.mean(residuals**2)) - math.pi / 2 * robust**2 / num_steps)
    share, memory = _autocorrelation(residuals)
    share = min(share * float(np.mean(residuals**2)) / between, 1.0) if between else 0.0
    kurtosis = float(stats.kurtosis(within))
    return Noise(
        name=name,
        about=f"fitted from {len(order)} trials",
        step=float(within.std()),
        step_freedom=min(4 + 6 / kurtosis, 100.0) if kurtosis > 0 else math.inf,
        trial=math.sqrt(between * (1 - share)),
        drift=math.sqrt(between * share),
        memory=memory,
    )


def _autocorrelation(residuals: Array, lags: int = 8) -> tuple[float, float]:
    """Share and memory of an autoregressive process in noise."""
    at = np.arange(1, lags + 1)
    seen = np.array([np.corrcoef(residuals[:-lag], residuals[lag:])[0, 1] for lag in at])
    bounds = ([0.0, 0.0], [1.0, 0.99])
    (share, memory), _ = optimize.curve_fit(lambda lag, s, m: s * m**lag, at, seen, p0=(0.4, 0.7), bounds=bounds)
    return float(share), float(memory)


def simulate(noise: Noise, *, reports: int, cells: int, blocks: int, steps: int, rng: np.random.Generator) -> Array:
    """Logarithms of step times: an array over reports, blocks, cells and steps. All cells are equally fast.

    The cells of a block run one after the other, in random order.
    """
    slots = blocks * cells
    kicks = rng.normal(size=(reports, slots)) * noise.drift * math.sqrt(1 - noise.memory**2)
    kicks[:, 0] = rng.normal(size=reports) * noise.drift
    shared = signal.lfilter([1.0], [1.0, -noise.memory], kicks, axis=1)
    shared += noise.trend * np.arange(slots) / (100 * cells)
    order = rng.permuted(np.tile(np.arange(cells), (reports, blocks, 1)), axis=2)
    trials = np.take_along_axis(shared.reshape(reports, blocks, cells), order, axis=2)
    trials += noise.trial * _student(rng, noise.trial_freedom, trials.shape)
    if noise.slow_share:
        trials += noise.slow_by * (rng.random(trials.shape) < noise.slow_share)
    found = noise.step * _student(rng, noise.step_freedom, (*trials.shape, steps))
    found += trials[..., None]
    return np.asarray(found + noise.warm * np.exp(-np.arange(steps) / noise.warm_steps))


def _student(rng: np.random.Generator, freedom: float, shape: tuple[int, ...]) -> Array:
    """Noise of standard deviation 1."""
    if math.isinf(freedom):
        return rng.normal(size=shape)
    return np.asarray(rng.standard_t(freedom, size=shape) * math.sqrt((freedom - 2) / freedom))
