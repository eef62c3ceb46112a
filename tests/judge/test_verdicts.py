from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bench.judge import verdicts
from bench.judge.evidence import CellEvidence
from bench.judge.statistics import PRECISION, Interval, Sample, ratio
from bench.judge.verdicts import (
    Comparison,
    Reason,
    Verdict,
    compare,
    judge_all,
    next_precision,
    num_judged,
)

RUN = "run"
OPPOSITE = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}


def interval(low: float, high: float, p_different: float = 1e-6, p_same: float = 1e-6) -> Interval:
    center = math.sqrt(low * high)
    return Interval(
        ratio=center,
        low=low,
        high=high,
        p_different=p_different,
        p_same=p_same,
        num_trials=20,
        paired=True,
    )


CONTROL = interval(0.995, 1.004, 0.6)


def evidence(
    low: float, high: float, control: Interval | None = CONTROL, **changes: Any
) -> Comparison:
    return Comparison(**({"time": interval(low, high), "control": control} | changes))


def judged(comparison: Comparison) -> tuple[Verdict, Reason]:
    judgement = judge_all([comparison])[0]
    return judgement.verdict, judgement.reason


def cell(center: float, trials: int = 12, seed: int = 0, noise: float = 0.004) -> Sample:
    logs = math.log(center) + noise * np.random.default_rng(seed).normal(size=(trials, 12))
    return Sample(np.exp(np.median(logs, axis=1)).tolist(), list(range(trials)))


def quiet_control() -> Interval:
    return ratio(cell(1.0, seed=90), cell(1.0, seed=91))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.93, 0.96, (Verdict.FASTER, Reason.DIFFERENT)),
        (1.04, 1.07, (Verdict.SLOWER, Reason.DIFFERENT)),
        (0.99, 1.01, (Verdict.SAME, Reason.INSIDE_MARGIN)),
        (
            1.006,
            1.015,
            (Verdict.SAME, Reason.INSIDE_MARGIN),
        ),  # a difference, smaller than the margin
        (0.96, 1.01, (Verdict.AMBIGUOUS, Reason.WIDE)),
        (1.001, 1.03, (Verdict.SLOWER, Reason.DIFFERENT)),
        (0.96, 0.997, (Verdict.FASTER, Reason.DIFFERENT)),
    ],
)
def test_verdicts(low: float, high: float, expected: tuple[Verdict, Reason]) -> None:
    assert judged(evidence(low, high)) == expected


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        (interval(0.9, 1.2), (Verdict.SLOWER, Reason.DIFFERENT)),
        (
            interval(1.004, 1.02),
            (Verdict.SLOWER, Reason.DIFFERENT),
        ),  # not by chance, but within the margin
        (interval(1.021, 1.05), (Verdict.AMBIGUOUS, Reason.CONTROL_OFF)),
        (interval(1 / 1.05, 1 / 1.021), (Verdict.AMBIGUOUS, Reason.CONTROL_OFF)),
        (interval(0.98, 1.1), (Verdict.SLOWER, Reason.DIFFERENT)),  # off, but that may be noise
    ],
)
def test_an_a_a_pair_that_is_off_withdraws_verdicts_and_widens_nothing(
    control: Interval, expected: tuple[Verdict, Reason]
) -> None:
    a, b = (
        CellEvidence(label=name, sample=cell(c, seed=i))
        for i, (name, c) in enumerate((("a", 1.05), ("b", 1.0)))
    )
    (found,) = judge_all([compare({RUN: (a, b)}, control)])
    assert (found.verdict, found.reason) == expected and found.time == ratio(a.sample, b.sample)
    assert found.scope == ("" if found.verdict is Verdict.AMBIGUOUS else " in this run")


def test_an_invalid_cell_decides_nothing_on_the_others() -> None:
    """p = 0.01 in each of four comparisons: with a fifth that counts, none would be below 5 %."""
    sound = [evidence(0.93, 0.96, time=interval(0.93, 0.96, p_different=0.0101)) for _ in range(4)]
    sound[0] = evidence(0.9, 0.92)
    planted = evidence(
        0.9, 1.1, time=None, blocked=True, verdict=Verdict.NOT_COMPARABLE, reason=Reason.GATE
    )
    alone, among = judge_all(sound), judge_all([planted, *sound])
    assert among[1:] == alone and {found.verdict for found in alone} == {Verdict.FASTER}
    assert num_judged(among) == num_judged(alone) == 4 and among[0].p_different is None


class TestSeveralRuns:
    def runs(self, *centers: float) -> Comparison:
        sides = {}
        for number, center in enumerate(centers):
            a, b = cell(center, seed=10 + number), cell(1.0, seed=20 + number)
            sides[str(number)] = (
                CellEvidence(label="a", sample=a),
                CellEvidence(label="b", sample=b),
            )
        (found,) = judge_all([compare(sides, CONTROL)])
        return found

    def test_a_run_counts_once(self) -> None:
        found = self.runs(1.10, 1.12, 1.14)
        time = found.time
        assert (
            time is not None
            and time.low is not None
            and time.next_low is not None
            and time.next_high is not None
        )
        logs = np.log(time.runs)
        known = stats.ttest_1samp(logs, 0.0)
        assert math.log(time.low) == pytest.approx(known.confidence_interval(0.95).low)
        assert time.p_different == pytest.approx(known.pvalue)
        reach = stats.t.ppf(0.975, 2) * logs.std(ddof=1) * math.sqrt(1 + 1 / 3)
        assert math.log(time.next_high) - logs.mean() == pytest.approx(reach)
        assert found.words == "slower over 3 runs"

    def test_another_day_may_differ(self) -> None:
        found = self.runs(1.04, 1.10, 1.16, 1.05, 1.12)
        assert found.verdict is Verdict.SLOWER and found.may_differ
        assert found.words == "slower over 5 runs, may differ on another day"

    def test_two_runs_are_two_values(self) -> None:
        found = self.runs(1.10, 1.12)
        assert (found.verdict, found.reason) == (Verdict.AMBIGUOUS, Reason.FEW_RUNS)
        assert found.time is not None and found.time.low is None and len(found.time.runs) == 2
        assert "an interval needs 3 runs; there are 2" in found.detail

    def test_what_is_wrong_in_one_run_is_wrong_and_named(self) -> None:
        good = CellEvidence(label="a", sample=cell(1.0)), CellEvidence(label="b", sample=cell(1.1))
        bad = (
            CellEvidence(label="a", sample=cell(1.0), failed_gates=(("the update is off",),)),
            good[1],
        )
        (found,) = judge_all([compare({"monday": good, "tuesday": bad}, CONTROL)])
        assert (found.verdict, found.reason) == (Verdict.NOT_COMPARABLE, Reason.GATE)
        assert found.detail.startswith("tuesday: ")

    def test_what_bars_in_a_later_run_counts_before_failed_trials(self) -> None:
        a, crashed = CellEvidence(label="a", sample=cell(1.0)), {("crashed", "no"): 1}
        some = CellEvidence(label="b", sample=cell(1.1), failures=crashed)
        none = CellEvidence(label="b", sample=Sample([]), failures=crashed)
        (found,) = judge_all([compare({"monday": (a, some), "tuesday": (a, none)}, CONTROL)])
        assert (found.verdict, found.reason) == (Verdict.NOT_COMPARABLE, Reason.NO_TRIALS)
        assert found.time is None and found.detail.startswith("tuesday: ")


def test_holm_counts_all_verdicts_of_the_report() -> None:
    alone = evidence(0.93, 0.96, time=interval(0.93, 0.96, p_different=0.02))
    assert judge_all([alone])[0].verdict is Verdict.FASTER
    among = judge_all([alone, *[evidence(0.9, 1.1, time=interval(0.9, 1.1, 0.9, 0.9))] * 2])
    assert (among[0].verdict, among[0].reason) == (Verdict.AMBIGUOUS, Reason.MANY)
    assert among[0].p_different == pytest.approx(0.06)


def test_cycles_must_agree() -> None:
    assert judged(evidence(0.93, 0.96, cycles=interval(0.94, 0.97)))[0] is Verdict.FASTER
    for other in (
        interval(0.99, 1.01),
        interval(1.05, 1.08),
        Interval(ratio=0.9, num_trials=2, paired=True),
    ):
        assert judged(evidence(0.93, 0.96, cycles=other)) == (Verdict.AMBIGUOUS, Reason.CLOCKS)


class TestCompare:
    def made(self, **changes: Any) -> tuple[CellEvidence, CellEvidence]:
        common: dict[str, Any] = {
            "precision": "fp32",
            "accumulation_dtype": "fp32",
            "work": "llama tiny",
        }
        a = CellEvidence(**({"label": "a", "sample": cell(0.9, seed=1), **common} | changes))
        return a, CellEvidence(label="b", sample=cell(1.0, seed=2), **common)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"precision": "bf16"}, Reason.PRECISION),  # mutant 19
            ({"accumulation_dtype": "bf16"}, Reason.ACCUMULATION),
            ({"work": "llama small"}, Reason.WORK),
            ({"failed_gates": (("the update is off",),)}, Reason.GATE),
            ({"sample": Sample([]), "failures": {("oom", ""): 12}}, Reason.NO_TRIALS),
        ],
    )
    def test_not_comparable(self, changes: dict[str, Any], reason: Reason) -> None:
        a, b = self.made(**changes)
        for pair in ((a, b), (b, a)):
            found = judge_all([compare({RUN: pair}, quiet_control())])[0]
            assert (found.verdict, found.reason) == (Verdict.NOT_COMPARABLE, reason)
            assert found.time is None and found.detail and verdicts.NEXT[reason]

    def test_failed_trials_are_not_dropped_in_silence(self) -> None:  # mutant 13
        a, b = self.made(failures={("oom", ""): 2})
        for pair in ((a, b), (b, a)):
            found = judge_all([compare({RUN: pair}, quiet_control())])[0]
            assert (found.verdict, found.reason) == (Verdict.AMBIGUOUS, Reason.FAILED_TRIALS)
            assert "2 of 14 trials failed" in found.detail

    @given(st.floats(0.85, 1.15), st.integers(0, 50), st.floats(0.001, 0.08))
    @settings(max_examples=40)
    def test_from_the_other_side(self, by: float, seed: int, noise: float) -> None:
        a, b = (
            CellEvidence(label=name, sample=cell(c, 8, seed + i, noise))
            for i, (name, c) in enumerate((("a", by), ("b", 1)))
        )
        twins = cell(1, 8, seed + 2, noise), cell(1, 8, seed + 3, noise)
        here = judge_all([compare({RUN: (a, b)}, ratio(*twins))])[0]
        there = judge_all([compare({RUN: (b, a)}, ratio(*reversed(twins)))])[0]
        assert (
            there.verdict is OPPOSITE.get(here.verdict, here.verdict)
            and there.reason is here.reason
        )


def test_every_reason_says_what_to_do_next() -> None:
    assert set(verdicts.NEXT) == set(Reason) and all(verdicts.NEXT.values())
    assert not verdicts.BLOCKS & verdicts.MORE_HELPS


def test_repeats_go_on_until_the_precision_and_then_only_if_undecided() -> None:
    assert next_precision(judge_all([evidence(0.9, 0.93)]), PRECISION) == PRECISION
    wide = evidence(0.9, 0.91, control=interval(0.97, 1.01))
    assert next_precision(judge_all([wide]), PRECISION) == PRECISION
    assert (
        next_precision(judge_all([evidence(0.9, 0.91), evidence(0.995, 1.005)]), PRECISION) is None
    )
