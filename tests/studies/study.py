"""The study: simulated reports through the whole pipeline, and how often its verdicts and intervals are right.

A report has a baseline, its A/A twin and four more cells. Blocks of all six are added until every interval is narrower
than the precision, or the largest number of repeats is reached; see ``verdicts.next_precision``. Since what differs
between cells is a factor, one simulation serves every effect: a cell that is 5 % slower has 1.05 times the steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bench.judge.statistics import MARGIN, MAX_REPEATS, MIN_REPEATS, PRECISION, SAME_WIDTH, Array, Interval, bootstrap
from bench.judge.verdicts import Comparison, Verdict, judge_all
from bench.plan.schedule import next_look
from bench.run.trial_record import warmups
from tests.studies.rivals import RULES
from tests.studies.simulation import FAMILIES, FITTED, Noise, simulate

COMPARISONS = 4
"""How many a report has, all with the baseline."""
STEPS = 12
RESAMPLES = 1999
"""Fewer than in a real report, for the time it takes."""
REPORTS = 400
SEED = 4
BENCH, PLAIN = "this bench", "this bench, not extended"
CHUNK = 100_000
"""Trials whose warm-up is looked for at a time: bounds the memory."""

EFFECTS: dict[str, float] = {"A/A": 0.0, "1 %": math.log(1.01), "2 %": math.log(1.02), "5 %": math.log(1.05)}
"""How much slower the first cell of a comparison is, as logarithms."""

Row = dict[str, Any]
Shares = dict[str, dict[Verdict, float]]
"""How often each verdict comes up, by effect."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a column of the study's table must be."""

    column: str
    words: str
    low: float
    high: float

    def met(self, value: float) -> bool:
        """Whether a rate is within the target."""
        return self.low <= value <= self.high


TARGETS: tuple[Target, ...] = (
    Target("false_different", "A/A called faster or slower", 0.0, 0.01),
    Target("found", "5 % difference found", 0.95, 1.0),
    Target("same", "1 % difference called same", 0.80, 1.0),
    Target("coverage", "intervals that hold the truth", 0.93, 0.97),
)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the reports stopped: arrays over reports and ratios, the A/A pair first."""

    blocks: NDArray[np.int_]
    centres: Array
    low: Array
    high: Array
    p_different: dict[str, Array]
    p_same: dict[str, Array]

    def width(self) -> Array:
        """The widest interval of each report."""
        return np.asarray(np.expm1(self.high - self.low).max(axis=1))


def medians(logs: Array) -> Array:
    """Logarithms of trial medians after warm-up, from those of steps along the last axis."""
    flat = logs.reshape(-1, logs.shape[-1])
    found = np.empty(len(flat))
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        dropped = warmups(np.exp(part))
        for k in np.unique(dropped):
            at = np.flatnonzero(dropped == k)
            found[start + at] = np.median(part[at, k:], axis=1)
    return found.reshape(logs.shape[:-1])


def run_until(differences: Array, start: Sequence[int] | NDArray[np.int_], precision: float, seed: int) -> Stage:
    """Adds blocks to each report until all of its intervals are narrower than the precision.

    ``differences`` has the logarithms of the paired ratios over reports, ratios and all blocks that could be run.
    """
    reports, ratios, most = differences.shape
    at = np.minimum(np.asarray(start, dtype=int), most)
    shape = (reports, ratios)
    stage = Stage(
        at.copy(),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
        {name: np.empty(shape) for name in EFFECTS},
        {name: np.empty(shape) for name in EFFECTS},
    )
    waiting = np.arange(reports)
    while len(waiting):
        n = int(at[waiting].min())
        group = waiting[at[waiting] == n]
        drawn = bootstrap(differences[group, :, :n].reshape(-1, n), resamples=RESAMPLES, seed=seed + n)
        here = (len(group), ratios)
        low, high = (end.reshape(here) for end in drawn.interval())
        stage.low[group], stage.high[group], stage.centres[group] = low, high, drawn.centres.reshape(here)
        stage.blocks[group] = n
        for name, by in EFFECTS.items():
            moved = replace(drawn, centres=drawn.centres + by, draws=drawn.draws + by)
            stage.p_different[name][group] = moved.p_different().reshape(here)
            stage.p_same[name][group] = moved.p_same(MARGIN).reshape(here)
        widest = np.expm1(high - low).max(axis=1)
        wanted = np.minimum(np.ceil(n * (widest / precision) ** 2), 2 * n)
        goes_on = (widest >= precision) & (n < most)
        at[group] = [min(most, next_look(n, int(want))) for want in wanted]  # as the runner does it
        waiting = np.concatenate([np.setdiff1d(waiting, group), group[goes_on]])
    return stage


def verdicts(stage: Stage, effect: str) -> list[list[Verdict]]:
    """The verdicts of every report if all its cells are slower than the baseline by an effect."""
    by = EFFECTS[effect]
    found = []
    for i in range(len(stage.blocks)):
        intervals = [
            Interval(
                ratio=math.exp(stage.centres[i, j] + shift),
                low=math.exp(stage.low[i, j] + shift),
                high=math.exp(stage.high[i, j] + shift),
                p_different=stage.p_different[effect][i, j],
                p_same=stage.p_same[effect][i, j],
                num_trials=int(stage.blocks[i]),
                paired=True,
            )
            for j, shift in enumerate([0.0] + [by] * (stage.low.shape[1] - 1))
        ]
        floor, *others = intervals
        compared = [Comparison(time=one, floor=floor) for one in others]
        found.append([judgement.verdict for judgement in judge_all(compared)])
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """Verdicts of one rule on one kind of noise, a row each, and rates of them."""

    rates: pd.DataFrame
    counts: pd.DataFrame


def study_noise(
    noise: Noise,
    reports: int = REPORTS,
    seed: int = SEED,
    *,
    most: int = MAX_REPEATS,
    comparisons: int = COMPARISONS,
    rivals: bool = True,
) -> Outcome:
    """Simulates one kind of noise; returns the rates per rule, and how often each verdict came up per effect."""
    rng = np.random.default_rng([seed, *noise.name.encode()])
    logs = simulate(noise, reports=reports, cells=comparisons + 2, blocks=most, steps=STEPS, rng=rng)
    differences = ratios(logs)
    first = run_until(differences, np.full(reports, MIN_REPEATS), PRECISION, seed)
    more = [min(most, next_look(n, 0)) if n < most else n for n in first.blocks]
    second = run_until(differences, more, min(PRECISION, SAME_WIDTH * MARGIN), seed)
    rates, counts = [], []
    for name, extended in ((BENCH, True), (PLAIN, False)):
        row, seen = _ours(first, second, extended=extended)
        rates.append({"noise": noise.name, "rule": name, **row})
        counts += [{"noise": noise.name, "rule": name, **one} for one in seen]
    for row, seen in [] if not rivals else _rivals(logs[:, : max(rule.trials for rule in RULES)]):
        rates.append({"noise": noise.name, **row})
        counts += [{"noise": noise.name, **one} for one in seen]
    return Outcome(pd.DataFrame(rates), pd.DataFrame(counts))


def _rates(shares: Shares, coverage: float, trials: dict[str, float]) -> tuple[Row, list[Row]]:
    """Rates of one rule, and how often each verdict came up, from the shares of verdicts by effect."""
    row: Row = {
        "false_different": shares["A/A"][Verdict.FASTER] + shares["A/A"][Verdict.SLOWER],
        "found": shares["5 %"][Verdict.SLOWER],
        "same": shares["1 %"][Verdict.SAME],
        "coverage": coverage,
        "wrong": shares["5 %"][Verdict.FASTER] + shares["5 %"][Verdict.SAME] + shares["1 %"][Verdict.FASTER],
        "same_at_margin": shares["2 %"][Verdict.SAME],
        **{f"trials {effect}": number for effect, number in trials.items()},
    }
    seen: list[Row] = [
        {"effect": effect, "verdict": str(verdict), "share": share}
        for effect, of in shares.items()
        for verdict, share in of.items()
    ]
    return row, seen


def _ours(first: Stage, second: Stage, *, extended: bool) -> tuple[Row, list[Row]]:
    """Rates and counts of the bench's own rule, with or without the extension of what is ambiguous."""
    shares: Shares = {}
    covered, trials = [], {}
    for effect in EFFECTS:
        early, late = verdicts(first, effect), verdicts(second, effect)
        goes_on = np.array([extended and Verdict.AMBIGUOUS in report for report in early])
        flat = [one for i in range(len(early)) for one in (late[i] if goes_on[i] else early[i])]
        shares[effect] = {one: flat.count(one) / len(flat) for one in Verdict}
        low, high = (np.where(goes_on[:, None], b, a) for a, b in ((first.low, second.low), (first.high, second.high)))
        covered.append(float(((low <= 0) & (high >= 0))[:, 1:].mean()))
        trials[effect] = float(np.median(np.where(goes_on, second.blocks, first.blocks)))
    return _rates(shares, float(np.mean(covered)), trials)


def _rivals(logs: Array) -> list[tuple[Row, list[Row]]]:
    """Rates and counts of the rules of other tools: every cell but the twin against the baseline."""
    found = []
    for rule in RULES:
        used = min(rule.trials, logs.shape[1])
        seconds = np.exp(logs[:, :used])
        base = np.repeat(seconds[:, None, :, 0], COMPARISONS, axis=1).reshape(-1, used, logs.shape[-1])
        other = seconds[:, :, 2:].transpose(0, 2, 1, 3).reshape(-1, used, logs.shape[-1])
        called = {effect: rule.judge(other * math.exp(by), base) for effect, by in EFFECTS.items()}
        covered = [
            float(((c.low <= math.exp(EFFECTS[e])) & (c.high >= math.exp(EFFECTS[e]))).mean())
            for e, c in called.items()
            if c.low is not None and c.high is not None
        ]
        words = {Verdict.SLOWER: 1, Verdict.FASTER: -1, Verdict.SAME: 0}
        shares = {e: {word: float((c.sign == sign).mean()) for word, sign in words.items()} for e, c in called.items()}
        coverage = float(np.mean(covered)) if covered else math.nan
        row, seen = _rates(shares, coverage, dict.fromkeys(EFFECTS, float(used)))
        found.append(({"rule": rule.name, **row}, [{"rule": rule.name, **one} for one in seen]))
    return found


def study(reports: int = REPORTS, seed: int = SEED) -> Outcome:
    """``study_noise`` of all kinds of noise."""
    outcomes = [study_noise(noise, reports, seed) for noise in FAMILIES]
    return Outcome(
        pd.concat([outcome.rates for outcome in outcomes], ignore_index=True),
        pd.concat([outcome.counts for outcome in outcomes], ignore_index=True),
    )


def ratios(logs: Array) -> Array:
    """Logarithms of the paired ratios of trial medians to the baseline's: over reports, ratios and blocks."""
    cells = medians(logs)
    return np.asarray((cells[..., 1:] - cells[..., :1]).transpose(0, 2, 1))


def precisions(widths: Sequence[float], reports: int, seed: int = SEED) -> pd.DataFrame:
    """What a precision costs and finds in the fitted noise, if nothing is extended."""
    rng = np.random.default_rng([seed, *FITTED.name.encode()])  # the trials of study_noise, so that its row comes again
    logs = simulate(FITTED, reports=reports, cells=COMPARISONS + 2, blocks=MAX_REPEATS, steps=STEPS, rng=rng)
    differences = ratios(logs)
    rows = []
    for width in widths:
        stage = run_until(differences, np.full(reports, MIN_REPEATS), width, seed)
        rows.append({"precision": width, **_ours(stage, stage, extended=False)[0]})
    return pd.DataFrame(rows)


def limits(numbers: Sequence[int], reports: int, seed: int = SEED) -> pd.DataFrame:
    """What the fitted noise leaves of the verdicts if no more than so many repeats are run."""
    found = [study_noise(FITTED, reports, seed, most=number, rivals=False).rates.head(1) for number in numbers]
    return pd.concat(found, ignore_index=True).assign(limit=list(numbers))


def sizes(numbers: Sequence[int], reports: int, seed: int = SEED) -> pd.DataFrame:
    """The same rates for reports of fewer and of more comparisons, in the fitted noise; as many comparisons in all."""
    found = [
        study_noise(FITTED, max(1, reports * COMPARISONS // n), seed, comparisons=n, rivals=False).rates.head(1)
        for n in numbers
    ]
    return pd.concat(found, ignore_index=True).assign(comparisons=list(numbers))
