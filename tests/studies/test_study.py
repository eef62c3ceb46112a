from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import tests.studies.__main__ as command
import tests.studies.page as report
from bench.judge.statistics import MIN_REPEATS, PRECISION
from bench.judge.tables import Tables, build
from bench.judge.verdicts import Verdict
from bench.run.journal import Journal, read_manifest
from tests.conftest import ROOT
from tests.legible import assert_legible
from tests.studies import choices, rivals, study
from tests.studies.simulation import FAMILIES, FITTED, Noise, fit, simulate
from tests.studies.study import BENCH, PLAIN, TARGETS, study_noise

pytestmark = pytest.mark.slow
QUIET = FAMILIES[-1]
REPORTS = 60


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def reference_run() -> Tables:
    folder = ROOT / "results" / "old" / "cpu-reference"
    return build(Journal(folder).read(), read_manifest(folder))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, study.Outcome]:
    return {noise.name: study_noise(noise, REPORTS, seed=11) for noise in (FITTED, QUIET)}


@pytest.fixture(scope="module")
def results() -> report.Results:
    return command.simulate(10)


class TestFit:
    def test_the_constants_are_those_of_the_run(self) -> None:
        found = fit(reference_run(), FITTED.name)
        for name in ("step", "step_freedom", "trial", "drift", "memory"):
            assert getattr(found, name) == pytest.approx(getattr(FITTED, name), rel=5e-3), name

    def test_finds_what_was_simulated(self) -> None:
        true = Noise(name="true", step=0.04, step_freedom=8.0, trial=0.03, drift=0.04, memory=0.8)
        logs = simulate(true, reports=1, cells=20, blocks=40, steps=30, rng=rng())[0]
        repeats, cells, steps = (index.ravel() for index in np.indices(logs.shape))
        names = np.array([f"cell{i:02d}" for i in range(20)])
        rows = pd.DataFrame(
            {"cell_id": names[cells], "repeat": repeats, "step": steps, "seconds": np.exp(logs).ravel()}
        )
        trials = rows[["cell_id", "repeat"]].drop_duplicates().assign(status="ok")
        found = fit(replace(reference_run(), trials=trials, steps=rows))
        assert found.step == pytest.approx(0.04, rel=0.1)
        # The order within a block is not in this table, so what drift there is within one counts as noise of trials.
        assert math.hypot(found.trial, found.drift) == pytest.approx(0.05, rel=0.2)


class TestStudy:
    def test_targets_are_met_and_no_verdict_is_wrong(self, outcomes: dict[str, study.Outcome]) -> None:
        """Allows for luck in a small study: comparisons of a report share a baseline, so reports are counted."""
        for name, outcome in outcomes.items():
            row = outcome.rates[outcome.rates["rule"] == BENCH].iloc[0]
            for target in TARGETS:
                low = stats.binom.ppf(0.001, REPORTS, target.low) / REPORTS
                high = stats.binom.ppf(0.999, REPORTS, target.high) / REPORTS
                assert low <= row[target.column] <= high, (name, target.column, row[target.column])
            assert row["wrong"] <= 0.01 and row["same_at_margin"] <= 0.1

    def test_the_others_are_worse(self, outcomes: dict[str, study.Outcome]) -> None:
        rates = outcomes[FITTED.name].rates.set_index("rule")
        assert rates.loc["mean of one run", "false_different"] > 0.5
        assert rates.loc["pyperf, 100 processes", "false_different"] > 0.03
        assert rates.loc["asv", "found"] < 0.3
        assert rates.loc[PLAIN, "same"] < rates.loc[BENCH, "same"]

    def test_runs_until_the_intervals_are_narrow(self) -> None:
        differences = study.ratios(simulate(QUIET, reports=20, cells=3, blocks=100, steps=12, rng=rng()))
        stage = study.run_until(differences, np.full(20, MIN_REPEATS), PRECISION, seed=0)
        assert (stage.width() < PRECISION).all() and len(set(stage.blocks)) > 1
        few = study.run_until(differences[..., :12], np.full(20, MIN_REPEATS), 1e-4, seed=0)
        assert (few.blocks == 12).all()

    def test_with_few_repeats_verdicts_are_ambiguous_and_not_wrong(self) -> None:
        outcome = study_noise(FITTED, 40, seed=3, most=10, rivals=False)
        counts = outcome.counts[outcome.counts["rule"] == BENCH].set_index(["effect", "verdict"])["share"]
        assert counts["A/A", str(Verdict.AMBIGUOUS)] > 0.95
        assert counts["5 %", str(Verdict.FASTER)] == counts["5 %", str(Verdict.SAME)] == 0


class TestRivals:
    def cells(self, by: float) -> tuple[np.ndarray, np.ndarray]:
        logs = 0.002 * rng().normal(size=(2, 30, 100, 12))
        return np.exp(logs[0] + by), np.exp(logs[1])

    @pytest.mark.parametrize("rule", rivals.RULES, ids=lambda rule: rule.name)
    @pytest.mark.parametrize("by", [-0.2, 0.2])
    def test_large_differences_are_seen_by_all(self, rule: rivals.Rule, by: float) -> None:
        called = rule.judge(*self.cells(by))
        assert (called.sign == np.sign(by)).all()
        if called.low is not None and called.high is not None:
            assert ((called.low < math.exp(by)) & (math.exp(by) < called.high)).mean() > 0.8

    def test_asvs_interval_of_a_median(self) -> None:
        low, high = rivals._median_interval(np.arange(20.0)[None])
        # P(X <= 3) = 0.0013 and P(X <= 4) = 0.0059 for 20 tosses: the 4th and the 17th value.
        assert (low[0], high[0]) in {(3.0, 16.0), (2.0, 17.0)}


class TestChoices:
    def test_our_interval_covers(self) -> None:
        frame = choices.intervals(300, 1, FAMILIES[:1])
        by = frame.pivot_table(index="method", columns="blocks", values="coverage")
        assert by.loc[choices.OURS].between(0.90, 0.99).all()
        assert by.loc["mean, percentile", 5] < 0.9 and by.loc["mean, BCa", 5] < 0.9

    def test_our_warmup_leaves_the_least_bias(self) -> None:
        frame = choices.warmup_rules(600, 1).pivot_table(index=["steps", "transient"], columns="rule", values="bias")
        slow = frame[[("time constant" in transient) for _, transient in frame.index]]
        assert (slow.drop(columns="this bench").min(axis=1) >= slow["this bench"] - 0.15).all()


class TestCommand:
    def test_the_page_and_its_picture(self, results: report.Results, tmp_path: Path) -> None:
        written = command.write(results, tmp_path / "statistics.md")
        page = (tmp_path / "statistics.md").read_text(encoding="utf-8")
        assert "(statistics.png)" in page and "python -m tests.studies --scenarios 10" in page and "nan" not in page
        assert "until the intervals were narrower than 3 %." in page, "those of the runs in results/noise"
        assert f'whose row "{PLAIN}" is that of 2 %' in page
        for rule in rivals.RULES:
            assert rule.name in page
        assert len(results.outcome.rates) == len(FAMILIES) * (2 + len(rivals.RULES))
        assert {path.name for path in written} == {path.name for path in tmp_path.iterdir()}
        assert_legible(report.draw(results, FITTED.name).figure)

    def test_a_missed_target_is_exit_status_1(
        self, results: report.Results, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(command, "simulate", lambda *_: results)
        monkeypatch.setattr(command, "write", lambda *_: [])
        for target, status in ((study.Target("found", "x", 0.0, 1.0), 0), (study.Target("found", "x", 2.0, 3.0), 1)):
            monkeypatch.setattr(report, "TARGETS", (target,))
            assert command.main([]) == status
            assert ("missed: quiet" in capsys.readouterr().out) == bool(status)
