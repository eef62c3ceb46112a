"""Verdicts in words: what is certain is said with its interval, and what is not is not said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench.judge.loading import Run, load
from bench.judge.pairs import ComparedPair
from bench.judge.standing import Standing, standings
from bench.judge.verdicts import NEXT, Reason, Verdict, exact
from bench.report.answer import answer, headline, sentence
from bench.report.terminal import by_cell
from tests.pages import write_run

FACTORS = {"alpha-eager": 1.0, "alpha-deferred": 0.75, "beta": 1.2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load(write_run(tmp_path_factory.mktemp("answer") / "run", FACTORS, world_size=(1, 2)))


@pytest.fixture(scope="module")
def standing(run: Run) -> Standing:
    return standings(run)["alpha-eager"]


def judged(row: ComparedPair, verdict: Verdict, reason: Reason, detail: str = "", **changes: Any) -> ComparedPair:
    comparison = row.judgement.comparison
    if changes:
        comparison = dataclasses.replace(comparison, time=dataclasses.replace(comparison.time, **changes))  # type: ignore[type-var]
    judgement = dataclasses.replace(
        row.judgement, verdict=verdict, reason=reason, detail=detail or str(reason), comparison=comparison
    )
    return dataclasses.replace(row, judgement=judgement)


def with_memory(row: ComparedPair, a: int | None, b: int | None) -> ComparedPair:
    return dataclasses.replace(row, memory=dataclasses.replace(row.memory, a=a, b=b, verdict=exact(b, a)))


def test_the_headline_is_at_the_largest_n_and_most_ranks(standing: Standing) -> None:
    rows = headline(standing)
    assert {(row.pair.b.accumulate, row.pair.b.world_size) for row in rows} == {(4, 2)}
    assert [row.pair.b.backend for row in rows] == ["alpha-deferred", "beta"]
    assert headline(dataclasses.replace(standing, rows=[])) == []


def test_each_verdict_has_a_sentence(run: Run, standing: Standing) -> None:
    row = with_memory(headline(standing)[0], 10 * 2**30, 8 * 2**30)
    time = {"ratio": 0.8, "low": 0.75, "high": 0.84}
    assert sentence(run, judged(row, Verdict.FASTER, Reason.OUTSIDE_FLOOR, **time)) == (
        "alpha-deferred is 1.25x (95 % 1.19-1.33) faster than alpha-eager at N=4 W=2 and takes 2.00 GiB less memory."
    )
    slow = with_memory(row, 100 * 2**20, 101 * 2**20)
    assert sentence(run, judged(slow, Verdict.SLOWER, Reason.OUTSIDE_FLOOR, ratio=1.3, low=1.2, high=1.4)) == (
        "alpha-deferred takes 1.30x (95 % 1.20-1.40) as long as alpha-eager at N=4 W=2 and takes 1.0 MiB more memory."
    )
    equal = with_memory(row, 5, 5)
    assert sentence(run, judged(equal, Verdict.SAME, Reason.INSIDE_MARGIN, ratio=1.001, low=0.995, high=1.004)) == (
        "alpha-deferred is as fast as alpha-eager at N=4 W=2, the same within 2 % (time 1.001x, 95 % 0.995-1.004) and "
        "takes the same memory."
    )
    unknown = with_memory(row, None, 5)
    assert sentence(run, judged(unknown, Verdict.AMBIGUOUS, Reason.WIDE, ratio=1.0, low=0.9, high=1.1)) == (
        "Whether alpha-deferred is faster than alpha-eager at N=4 W=2 is open (time 1.000x, 95 % 0.900-1.100): wide "
        "interval (add repeats: --max-repeats, --budget, or a smaller --interval-width)."
    )
    barred = judged(row, Verdict.NOT_COMPARABLE, Reason.GATE, "alpha-deferred N=4: repeat 0, 1: the loss is wrong")
    assert sentence(run, barred) == (
        "alpha-deferred and alpha-eager are not comparable at N=4 W=2: alpha-deferred N=4: the loss is wrong."
    )


def test_no_number_without_a_verdict(run: Run, standing: Standing) -> None:
    row = judged(headline(standing)[0], Verdict.NOT_COMPARABLE, Reason.WORK, "a has lr 1, b has lr 2")
    assert not any(digit in sentence(run, row).replace("N=4 W=2", "") for digit in ("0.7", "1.3", "%"))


def test_if_nothing_is_comparable_the_answer_begins_with_that(run: Run, standing: Standing) -> None:
    busy = "beta N=4: the machine was not idle: others took 40 % of its CPUs (limit 10 %)"
    rows = [judged(row, Verdict.NOT_COMPARABLE, Reason.DISTURBED, busy) for row in standing.rows]
    rows[-1] = judged(rows[-1], Verdict.NOT_COMPARABLE, Reason.GATE, "the update is off")
    found = {"alpha-eager": dataclasses.replace(standing, rows=rows)}
    first, second, *others = answer(run, found, by_cell(run.tables))
    share = f"({len(rows) - 1} of {len(rows)} cells)"
    assert first == (
        f"Nothing can be compared with alpha-eager: machine disturbed {share}. To do: {NEXT[Reason.DISTURBED]}."
    )
    assert second == f"The first of them: {busy}."
    assert [line for line in others if "comparable" in line or "aster than" in line] == [], "it is said once"


def test_one_process_is_said_beside_the_speed(tmp_path: Path) -> None:
    words = "One process: no bytes move between ranks, so times show host overhead and memory policy"
    for world_size, expected in (((1,), 1), ((1, 2), 0), ((2,), 0)):
        folder = write_run(tmp_path / f"run-{world_size[-1]}-{len(world_size)}", FACTORS, world_size=world_size)
        one = load(folder)
        lines = answer(one, standings(one), by_cell(one.tables))
        assert sum(line.startswith(words) for line in lines) == expected
