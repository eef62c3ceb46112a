from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.judge import verdicts
from bench.judge.evidence import CellEvidence
from bench.judge.statistics import PRECISION, Interval, Sample, ratio
from bench.judge.verdicts import Comparison, Reason, Verdict, compare, judge_all, next_precision

OPPOSITE = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}


def interval(low: float, high: float, p_different: float = 1e-6, p_same: float = 1e-6) -> Interval:
    center = math.sqrt(low * high)
    return Interval(
        ratio=center, low=low, high=high, p_different=p_different, p_same=p_same, num_trials=20, paired=True
    )


CONTROL = interval(0.995, 1.004, 0.6)


def evidence(low: float, high: float, control: Interval | None = CONTROL, **changes: Any) -> Comparison:
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
        (1.006, 1.015, (Verdict.SAME, Reason.INSIDE_MARGIN)),  # a difference, smaller than the margin
        (0.96, 1.01, (Verdict.AMBIGUOUS, Reason.WIDE)),
        (1.001, 1.03, (Verdict.SLOWER, Reason.DIFFERENT)),
        (0.96, 0.997, (Verdict.FASTER, Reason.DIFFERENT)),
    ],
)
def test_verdicts(low: float, high: float, expected: tuple[Verdict, Reason]) -> None:
    assert judged(evidence(low, high)) == expected


def test_a_control_that_contains_1_changes_nothing_and_one_that_does_not_widens_every_interval() -> None:
    a, b = (CellEvidence(label=name, sample=cell(c, seed=i)) for i, (name, c) in enumerate((("a", 1.03), ("b", 1.0))))
    (plain,) = judge_all([compare(a, b, interval(0.9, 1.2))])
    assert plain.verdict is Verdict.SLOWER and plain.time == ratio(a.sample, b.sample)
    for control in (interval(1.01, 1.02), interval(1 / 1.02, 1 / 1.01)):
        (wide,) = judge_all([compare(a, b, control)])
        ours, theirs = plain.time, wide.time
        assert ours is not None and theirs is not None and ours.low and ours.high and theirs.low and theirs.high
        assert (theirs.low, theirs.high) == pytest.approx((ours.low / 1.01, ours.high * 1.01))
    (lost,) = judge_all([compare(a, b, interval(1.05, 1.08))])
    assert (lost.verdict, lost.reason) == (Verdict.AMBIGUOUS, Reason.WIDE)


def test_holm_counts_all_verdicts_of_the_report() -> None:
    alone = evidence(0.93, 0.96, time=interval(0.93, 0.96, p_different=0.02))
    assert judge_all([alone])[0].verdict is Verdict.FASTER
    among = judge_all([alone, *[evidence(0.9, 1.1, time=interval(0.9, 1.1, 0.9, 0.9))] * 2])
    assert (among[0].verdict, among[0].reason) == (Verdict.AMBIGUOUS, Reason.MANY)
    assert among[0].p_different == pytest.approx(0.06)


def test_cycles_must_agree() -> None:
    assert judged(evidence(0.93, 0.96, cycles=interval(0.94, 0.97)))[0] is Verdict.FASTER
    for other in (interval(0.99, 1.01), interval(1.05, 1.08), Interval(ratio=0.9, num_trials=2, paired=True)):
        assert judged(evidence(0.93, 0.96, cycles=other)) == (Verdict.AMBIGUOUS, Reason.CLOCKS)


class TestCompare:
    def made(self, **changes: Any) -> tuple[CellEvidence, CellEvidence]:
        common: dict[str, Any] = {"precision": "fp32", "accumulation_dtype": "fp32", "work": "llama tiny"}
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
            found = judge_all([compare(*pair, quiet_control())])[0]
            assert (found.verdict, found.reason) == (Verdict.NOT_COMPARABLE, reason)
            assert found.time is None and found.detail and verdicts.NEXT[reason]

    def test_failed_trials_are_not_dropped_in_silence(self) -> None:  # mutant 13
        a, b = self.made(failures={("oom", ""): 2})
        for pair in ((a, b), (b, a)):
            found = judge_all([compare(*pair, quiet_control())])[0]
            assert (found.verdict, found.reason) == (Verdict.AMBIGUOUS, Reason.FAILED_TRIALS)
            assert "2 of 14 trials failed" in found.detail

    @given(st.floats(0.85, 1.15), st.integers(0, 50), st.floats(0.001, 0.08))
    @settings(deadline=None, max_examples=40)
    def test_from_the_other_side(self, by: float, seed: int, noise: float) -> None:
        a, b = (
            CellEvidence(label=name, sample=cell(c, 8, seed + i, noise))
            for i, (name, c) in enumerate((("a", by), ("b", 1)))
        )
        twins = cell(1, 8, seed + 2, noise), cell(1, 8, seed + 3, noise)
        here = judge_all([compare(a, b, ratio(*twins))])[0]
        there = judge_all([compare(b, a, ratio(*reversed(twins)))])[0]
        assert there.verdict is OPPOSITE.get(here.verdict, here.verdict) and there.reason is here.reason


def test_every_reason_says_what_to_do_next() -> None:
    assert set(verdicts.NEXT) == set(Reason) and all(verdicts.NEXT.values())
    assert not verdicts.BLOCKS & verdicts.MORE_HELPS


def test_repeats_go_on_until_the_precision_and_then_only_if_undecided() -> None:
    assert next_precision(judge_all([evidence(0.9, 0.93)]), PRECISION) == PRECISION
    wide = evidence(0.9, 0.91, control=interval(0.97, 1.01))
    assert next_precision(judge_all([wide]), PRECISION) == PRECISION
    assert next_precision(judge_all([evidence(0.9, 0.91), evidence(0.995, 1.005)]), PRECISION) is None
