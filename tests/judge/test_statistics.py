from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from bench.judge import samples, statistics
from bench.judge.statistics import (
    MIN_REPEATS,
    MIN_TRIALS,
    Interval,
    LogMean,
    Sample,
    allowing_for_days,
    between_days,
    ratio,
    required_trials,
)


def sample(
    center: float = 1.0,
    trials: int = 12,
    seed: int = 0,
    *,
    blocks: bool = True,
    noise: float = 0.03,
) -> Sample:
    rng = np.random.default_rng(seed)
    logs = (
        math.log(center)
        + noise * rng.normal(size=(trials, 1))
        + noise * rng.normal(size=(trials, 12))
    )
    return Sample(np.exp(np.median(logs, axis=1)).tolist(), list(range(trials)) if blocks else [])


class TestRatio:
    @pytest.mark.parametrize("blocks", [True, False])
    @pytest.mark.parametrize("trials", range(1, MIN_TRIALS))
    def test_few_trials_have_no_interval(self, trials: int, blocks: bool) -> None:
        found = ratio(
            sample(trials=trials, seed=1, blocks=blocks),
            sample(trials=trials, seed=2, blocks=blocks),
        )
        assert found.low is found.high is found.p_different is found.p_same is None
        assert str(MIN_TRIALS) in found.reason and str(trials) in found.reason
        assert found.width == math.inf and not statistics.equivalent(found)


class TestLogMean:
    def test_is_scipys_t_test(self) -> None:
        rng = np.random.default_rng(0)
        a, b = rng.normal(0.02, 0.03, size=(5, 8)), rng.normal(0.0, 0.05, size=(5, 12))
        known = stats.ttest_1samp(a, 0.0, axis=1), stats.ttest_ind(a, b, axis=1, equal_var=False)
        for found, test in zip((LogMean.of(a), LogMean.of(a, b)), known, strict=True):
            ends = test.confidence_interval()
            assert found.interval() == (pytest.approx(ends.low), pytest.approx(ends.high))
            assert found.p_different() == pytest.approx(test.pvalue)

    def test_the_same_is_two_one_sided_tests(self) -> None:
        a, edge = np.random.default_rng(0).normal(0.005, 0.01, size=(5, 8)), math.log1p(0.02)
        above, below = (
            stats.ttest_1samp(a, -edge, 1, alternative="greater"),
            stats.ttest_1samp(a, edge, 1, alternative="less"),
        )
        assert LogMean.of(a).p_same(0.02) == pytest.approx(np.maximum(above.pvalue, below.pvalue))

    def test_equal_values_are_no_division_by_zero(self) -> None:
        same, apart = (
            ratio(Sample([seconds] * 6, range(6)), Sample([1.0] * 6, range(6)))
            for seconds in (1.0, 2.0)
        )
        assert (same.ratio, same.low, same.high, same.p_different) == (1, 1, 1, 1)
        assert apart.low == apart.high == pytest.approx(2) and apart.p_different == 0
        unpaired = ratio(Sample([1.0] * 6), Sample([1.0] * 6))
        assert (unpaired.low, unpaired.high, unpaired.p_different) == (1, 1, 1)

    def test_the_error_of_unpaired_trials_has_welchs_freedom(self) -> None:
        few, many = (np.random.default_rng(n).normal(0, 0.01, size=n) for n in (5, 9))
        found = ratio(Sample(np.exp(few)), Sample(np.exp(many)))
        known = stats.ttest_ind(few, many, equal_var=False)
        assert found.freedom == pytest.approx(known.df)
        error = math.sqrt(few.var(ddof=1) / 5 + many.var(ddof=1) / 9)
        assert statistics.standard_error(found) == pytest.approx(error)


class TestHolm:
    def test_known_example(self) -> None:
        assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


class TestPrecision:
    def interval(self, low: float, high: float, n: int = 20) -> Interval:
        return Interval(ratio=1.0, low=low, high=high, num_trials=n, paired=True)

    def test_required_trials(self) -> None:
        assert required_trials(self.interval(0.995, 1.005), 0.02) == 0
        assert required_trials(self.interval(0.985, 1.015), 0.02) > 0, (
            "1.5 % to either side: the whole width counts"
        )
        assert required_trials(self.interval(1.0, 1.024), 0.02) == math.ceil(20 * 1.2**2) - 20
        assert required_trials(self.interval(0.8, 1.2), 0.02) == 20  # no more than there are
        nothing = Interval(ratio=1.0, num_trials=3, paired=True)
        assert (
            required_trials(nothing) == MIN_REPEATS - 3
            and required_trials(replace(nothing, num_trials=40)) == 1
        )


class TestQuality:
    def test_outliers(self) -> None:
        values = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 3.0]
        assert samples.outliers(values) == [6]
        assert samples.outliers([1.0, 1.1, 0.9, 1.2, 0.8]) == []
        assert samples.outliers([1.0] * 5 + [2.0]) == samples.outliers([]) == []

    def test_drift(self) -> None:
        slots = list(range(20))
        noise = np.exp(0.01 * np.random.default_rng(0).normal(size=20))
        found = samples.drift(slots, noise * np.exp(0.1 * np.arange(20) / 19))
        assert found.found and found.size == pytest.approx(math.expm1(0.1), abs=0.02)
        assert not samples.drift(slots, noise).found
        # Of the 120 orders of five values, one rises and one falls throughout.
        assert samples.drift(range(5), [1.0, 1.1, 1.2, 1.4, 1.5]).p_value == pytest.approx(2 / 120)
        assert (
            samples.drift([1, 2], [1.0, 2.0]).p_value
            == samples.drift(slots, [1.0] * 20).p_value
            == 1
        )

    @pytest.mark.parametrize("kind", ["normal", "heavy"])
    @pytest.mark.parametrize("n", [8, 12, 30])
    def test_one_mode_is_seldom_called_two(self, kind: str, n: int) -> None:
        rng = np.random.default_rng([n, len(kind)])
        noise = rng.normal(size=(400, n)) if kind == "normal" else rng.standard_t(4, size=(400, n))
        found = [samples.bimodal(np.exp(0.03 * row).tolist()) for row in noise]
        assert sum(split is not None and split.found for split in found) <= stats.binom.ppf(
            0.999, 400, samples.ALPHA
        )

    def test_two_modes(self) -> None:
        rng = np.random.default_rng(0)
        values = np.exp(0.01 * rng.normal(size=20) + 0.15 * (np.arange(20) % 3 == 0))
        found = samples.bimodal(values.tolist())
        assert found is not None and found.found
        assert found.size == pytest.approx(
            math.exp(0.15), rel=0.02
        ) and found.share == pytest.approx(0.35)
        assert samples.bimodal(values[:7].tolist()) is None


class TestBetweenDays:
    def test_a_new_run_is_held_against_what_the_others_differ_by(self) -> None:
        """A side of one run: the interval of a prediction."""
        days = [1.0, 1.1, 1.2, 1.05]
        found = between_days([1.5], days)
        logs = np.log(days)
        reach = stats.t.ppf(0.975, 3) * logs.std(ddof=1) * math.sqrt(1 + 1 / 4)
        assert found is not None and found.low is not None
        assert math.log(found.low) == pytest.approx(math.log(1.5) - logs.mean() - reach)
        assert between_days([1.5, 1.4], [1.0, 1.1]) is None

    def test_a_known_deviation_widens_a_ratio_of_two_runs(self) -> None:
        within = ratio(sample(1.1, seed=1), sample(1.0, seed=2))
        same, wide = allowing_for_days(within, 0.0, 6), allowing_for_days(within, 0.1, 6)
        assert same.low == pytest.approx(within.low) and same.ratio == pytest.approx(within.ratio)
        assert wide.low is not None and wide.high is not None and wide.low < 1 < wide.high
        assert wide.width > math.exp(2 * stats.norm.ppf(0.975) * 0.1 * math.sqrt(2)) - 1

    def test_the_better_the_deviation_is_known_the_narrower_it_is(self) -> None:
        """Also where it has as many degrees of freedom as the ratio itself."""
        within = ratio(sample(1.1, seed=1), sample(1.0, seed=2))
        deviation = math.log1p(within.width) / 8
        widths = [allowing_for_days(within, deviation, freedom).width for freedom in range(2, 40)]
        assert widths == sorted(widths, reverse=True)
