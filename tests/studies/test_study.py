from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import studies.__main__ as command
from studies import choices, rivals, study, trial_noise
from studies.page import Results

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results() -> Results:
    return command.simulate(60, 60)


def test_rates_of_made_noise_are_as_theory_has_them() -> None:
    """Independent normal noise: a t-test's power, coverage, and few false differences."""
    logs = 0.03 * np.random.default_rng(3).normal(size=(400, 12))
    row = study.rates(trial_noise.Noise("made", (logs,)), 13, 4, 300)
    assert row["false"] <= 0.08 and 0.92 <= row["coverage"] <= 0.98
    assert row["power 10 %"] == pytest.approx(row["t 10 %"], abs=0.1) and row["wrong 10 %"] == 0
    assert study.misses(study.pd.DataFrame([row | {"false": 0.2}])) != []


def test_blocks_are_resampled_with_all_their_cells() -> None:
    part = np.arange(10.0)[:, None] + 100 * np.arange(3.0)
    found = trial_noise.Noise("made", (part,)).reports(20, 3, 7, np.random.default_rng(0))
    assert found.shape == (20, 7, 3)
    assert (np.ptp(found % 100, axis=2) == 0).all(), "a row has one block"
    places = np.abs(found[:, :2, 0]) % 100  # a draw has a random sign
    assert (np.diff(places, axis=1) % 10 == 1).all(), "pairs are consecutive"


def test_the_bench_is_less_often_wrong_than_the_others_and_the_page_says_what_is_not_met(
    results: Results, tmp_path: Path
) -> None:
    calls = results.rivals.set_index("rule")["A/A"]
    assert calls["mean of one run"] > 0.5 and calls["pyperf, 100 processes"] > 0.05
    assert results.rates["false"].max() < 0.15
    assert (results.rates[[f"wrong {name}" for name in ("5 %", "10 %")]] < 0.02).all(axis=None)
    command.write(results, tmp_path / "statistics.md")
    page = (tmp_path / "statistics.md").read_text(encoding="utf-8")
    assert "python -m studies --reports 60 --pools 60" in page and "nan" not in page
    assert all(miss in page for miss in study.misses(results.rates))
    assert all(rule.name in page for rule in rivals.RULES)


@pytest.mark.parametrize("rule", rivals.RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("by", [-0.2, 0.2])
def test_large_differences_are_seen_by_all_rules(rule: rivals.Rule, by: float) -> None:
    logs = 0.002 * np.random.default_rng(0).normal(size=(2, 30, 100, 12))
    signs = rule.judge(np.exp(logs[0] + by), np.exp(logs[1]))
    assert (signs == np.sign(by)).all()


def test_our_interval_covers_more_often_than_a_bootstrap(results: Results) -> None:
    by = results.intervals.pivot_table(index="method", columns="blocks", values="coverage")
    assert by.loc[choices.OURS].between(0.88, 1.0).all() and by.loc["mean, bootstrap", 5] < 0.9
