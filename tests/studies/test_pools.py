"""The runs that are kept contradict no text, and simulated pools of them are judged as the page says."""

from __future__ import annotations

import json
from itertools import permutations

import numpy as np
import pytest

from bench.judge import run_spread
from bench.judge.pairs import judge_pairs, pairs_of_runs
from bench.judge.pool import Pool, load_pool
from bench.judge.statistics import MARGIN, LogMean, interval_of, over_runs
from bench.judge.verdicts import Verdict
from studies import pools


@pytest.fixture(scope="module")
def sets() -> list[pools.RunSet]:
    return pools.kept()


def test_what_reports_say_of_other_days_is_of_the_kept_runs(sets: list[pools.RunSet]) -> None:
    assert json.loads(run_spread.STORED.read_text()) == [pools.spread(sets)]
    found = pools.repeated(sets)
    pairs, outside, beyond = (
        sum(getattr(each, name) for each in found) for name in ("pairs", "outside", "beyond")
    )
    assert outside / pairs > 0.2, "the interval of one run does not cover other days"
    assert beyond / pairs < 0.05, "what its report says of them does"


def test_no_run_of_the_same_cells_is_called_slower_than_another() -> None:
    """These machines were up to twice as fast on some days."""
    runs = load_pool(pools.folders("cpu")).runs
    for a, b in permutations(runs, 2):
        sides = Pool(runs=(a,)), Pool(runs=(b,))
        rows = judge_pairs(*sides, pairs_of_runs(a, b), thresholds={"slower": 0.05})
        assert not {row.verdict for row in rows} & {Verdict.SLOWER, Verdict.FASTER}
        assert not any(row.regressions for row in rows)


def test_simulated_pools_are_judged_as_the_bench_judges(sets: list[pools.RunSet]) -> None:
    runs = pools.simulated(sets[0], 3, pools.NORMAL, np.random.default_rng(0))
    for number, interval in enumerate(pools._intervals(runs)):
        alone = [
            interval_of(LogMean.of(run[:, number]), MARGIN, len(run), paired=True) for run in runs
        ]
        known = over_runs(alone)
        for name in (
            "ratio",
            "low",
            "high",
            "next_low",
            "next_high",
            "p_different",
            "p_same",
            "runs",
        ):
            assert getattr(interval, name) == pytest.approx(getattr(known, name)), name
    (of_one, *_) = pools._intervals(runs[:1])
    of_first = interval_of(LogMean.of(runs[0][:, 0]), MARGIN, len(runs[0]), paired=True)
    assert (of_one.low, of_one.high) == (pytest.approx(of_first.low), pytest.approx(of_first.high))


def test_three_runs_hold_on_another_day_and_one_does_not(sets: list[pools.RunSet]) -> None:
    """500 pools: a share of 5 % has a standard error of 1 point, and the 18 comparisons of a pool are alike."""
    alone, three = (pools.rates(sets, runs, pools.NORMAL, 500) for runs in (1, 3))
    assert alone["false"] > 0.2 and alone["next"] < 0.8
    assert three["false"] < 0.08 and three["false faster"] < 0.05 and 0.92 < three["next"] < 0.98
