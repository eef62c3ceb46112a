"""How often verdicts and intervals are right: reports made of the noise of real trials, judged as a run is judged.

A report has a baseline, its A/A twin and a number of other cells, all of them equally fast. Since what differs between
cells is a factor, one set of reports serves every effect: a cell that is 5 % slower has 1.05 times the step times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from bench.judge.statistics import MARGIN, Array, Interval, LogMean, holm
from bench.judge.verdicts import ALPHA, Comparison, Verdict, judge_all
from studies.rivals import RULES
from studies.trial_noise import Noise, steps

EFFECTS = {
    "A/A": 0.0,
    "1 %": math.log(1.01),
    "2 %": math.log(1.02),
    "5 %": math.log(1.05),
    "10 %": math.log(1.1),
}
"""How much slower the cells of a report are than the baseline, as logarithms."""
SIZES = (12, 24)
"""Numbers of blocks beside those that a run has."""
QUICK = (5, 4)
"""Blocks and comparisons of the matrix ``quick``, of which one backend is wrong."""
REPORTS = 10_000
SEED = 4
Row = dict[str, Any]


FALSE_TARGET = "reports with any false difference, at most 5 %"
TARGETS: Mapping[str, Callable[[Row], bool]] = {
    FALSE_TARGET: lambda row: row["false"] <= ALPHA,
    "5 % and 10 % found, at most 10 points less than by a paired t-test of the same size": lambda row: (
        all(row[f"power {name}"] >= row[f"t {name}"] - 0.1 for name in ("5 %", "10 %"))
    ),
    "intervals that contain the true ratio, 93 to 97 %": lambda row: (
        0.93 <= row["coverage"] <= 0.97
    ),
}
"""What the rates of a row must be, and whether they are."""


def rates(noise: Noise, blocks: int, comparisons: int, reports: int = REPORTS) -> Row:
    """The rates of one kind of noise and number of blocks.

    ``false`` is the share of reports of equal cells that call any of them different, ``power X`` and ``t X`` the shares
    of comparisons in which a difference of X is found by the bench and by scipy's paired t-test with Holm's correction.
    The t-test has the same size: it is called at the p-value at which as many reports have a false difference.
    """
    rng = np.random.default_rng([SEED, blocks, comparisons, *noise.name.encode()])
    logs = noise.reports(reports, comparisons + 2, blocks, rng)
    apart = (logs[:, :, 1:] - logs[:, :, :1]).transpose(0, 2, 1)
    means = LogMean.of(apart)
    low, high = means.interval()
    row: Row = {"noise": noise.name, "blocks": blocks, "comparisons": comparisons}
    row["coverage"] = float(((low <= 0) & (high >= 0))[:, 1:].mean())
    row["control excludes 1"] = float(((low > 0) | (high < 0))[:, 0].mean())
    row["width"] = float(np.median(np.expm1(high - low)[:, 1:]))
    smallest = _t_tests(apart[:, 1:]).min(axis=1)
    for effect, by in EFFECTS.items():
        found = _verdicts(means, by)
        ours = (found == Verdict.SLOWER) | (found == Verdict.FASTER)
        if effect == "A/A":
            row["false"] = float(ours.any(axis=1).mean())
            level = float(np.quantile(smallest, row["false"]))
        theirs = _t_tests(apart[:, 1:] + by) < level
        row |= {f"power {effect}": float(ours.mean()), f"t {effect}": float(theirs.mean())}
        row |= {
            f"wrong {effect}": float((found == Verdict.FASTER).mean()),
            f"same {effect}": _share(found, Verdict.SAME),
        }
    return row


def _share(found: NDArray[Any], verdict: Verdict) -> float:
    return float((found == verdict).mean())


def _verdicts(means: LogMean, by: float) -> NDArray[Any]:
    """The verdicts of each report if its cells are slower by an effect: reports x comparisons."""
    moved = replace(means, centre=means.centre + by)
    controls, ends = (
        np.stack([each.centre, *each.interval(), each.p_different(), each.p_same(MARGIN)], axis=-1)
        for each in (means, moved)
    )
    found = []
    for first, others in zip(controls[:, 0], ends[:, 1:], strict=True):
        control = _interval(*first)
        report = [Comparison(time=_interval(*row), control=control) for row in others]
        found.append([judgement.verdict for judgement in judge_all(report)])
    return np.array(found, dtype=object)


def _interval(
    centre: float, low: float, high: float, p_different: float, p_same: float
) -> Interval:
    return Interval(
        ratio=math.exp(centre),
        low=math.exp(low),
        high=math.exp(high),
        p_different=p_different,
        p_same=p_same,
        num_trials=8,
        paired=True,
    )


def _t_tests(apart: Array) -> Array:
    """The p-values of paired t-tests, with Holm's correction over the comparisons of a report."""
    return np.array([holm(values) for values in stats.ttest_1samp(apart, 0.0, axis=2).pvalue])


def study(noises: Sequence[Noise], reports: int = REPORTS) -> pd.DataFrame:
    """``rates`` of every noise, at the size of its run and with more blocks, and at the size of a quick run."""
    sizes = [
        (noise, blocks, noise.cells - 2)
        for noise in noises
        for blocks in dict.fromkeys((noise.blocks, *SIZES))
    ]
    return pd.DataFrame([rates(*size, reports) for size in (*sizes, (noises[0], *QUICK))])


def misses(found: pd.DataFrame) -> list[str]:
    """The targets that are not met, each as a sentence."""
    rows = found.to_dict("records")
    told = []
    for target, met in TARGETS.items():
        bad = [row for row in rows if not met(row)]
        if not bad:
            continue
        sentence = f"{target}: not in {', '.join(map(name, bad))}."
        if target == FALSE_TARGET:
            rates_of_bad = sorted(100 * row["false"] for row in bad)
            ends = " to ".join(
                dict.fromkeys(f"{rate:.1f}" for rate in (rates_of_bad[0], rates_of_bad[-1]))
            )
            sentence = f"{ends} % of simulated reports name a false difference (target {100 * ALPHA:g} %): "
            sentence += f"{', '.join(map(name, bad))}."
        told.append(sentence)
    return told


def name(row: Row) -> str:
    return f"{row['noise']} ({row['blocks']} blocks, {row['comparisons']} comparison{'s' * (row['comparisons'] > 1)})"


def rivals(noise: Noise, reports: int) -> pd.DataFrame:
    """How often the rules of other tools call two cells different, on step times made of the same noise."""
    rng = np.random.default_rng([SEED, 1])
    known, rows = steps(), []
    for rule in RULES:
        logs = noise.reports(reports, 2, rule.trials, rng)
        seconds = np.exp(logs[..., None] + known[rng.integers(len(known), size=logs.shape)])
        base, other = seconds[:, :, 0], seconds[:, :, 1]
        called = {effect: rule.judge(other * math.exp(by), base) for effect, by in EFFECTS.items()}
        rows.append(
            {"rule": rule.name, "trials": rule.trials}
            | {n: float((sign != 0).mean()) for n, sign in called.items()}
        )
    return pd.DataFrame(rows)
