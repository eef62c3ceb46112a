"""The summary: one row per cell, the reference first, every finding in words."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from bench.judge import tables
from bench.judge.gates import judge
from bench.judge.standing import Standing
from bench.judge.tables import Tables
from bench.report.terminal import by_cell, findings, show
from tests.factories import make_cell, make_failure, make_manifest, make_record

CELL = make_cell()
STANDING = Standing(baseline="ddp-deferred", floor=None, rows=[])
TRUTH = CELL.reference()


def record(cell: Any, repeat: int, seconds: float, **time: Any) -> dict[str, Any]:
    return make_record(cell, repeat, time={"step_seconds": [seconds]} | time)


def judged(*records: dict[str, Any]) -> Tables:
    return judge(tables.build(list(records), make_manifest()))


def shown(made: Tables) -> str:
    text = io.StringIO()
    show(Console(file=text, width=200), made, STANDING, {})
    return text.getvalue()


REFERENCE = make_record(TRUTH)
GOOD = judged(*(record(CELL, repeat, seconds) for repeat, seconds in enumerate([3.0, 1.0, 2.0])), REFERENCE)


def test_one_row_per_cell_with_the_cited_step_time_and_the_reference_first() -> None:
    cells = by_cell(GOOD)
    assert cells["backend"].tolist() == ["reference", "ddp-deferred"]
    row = cells.iloc[1]
    assert row["step_time_s"] == pytest.approx(6 ** (1 / 3)) and (row["fastest_s"], row["slowest_s"]) == (1.0, 3.0)
    assert row["tokens_per_s"] == pytest.approx(512 / 6 ** (1 / 3))
    assert (row["num_trials"], row["num_bad"], row["status"]) == (3, 0, "ok")
    assert (row["steps_expected"], row["steps_observed"]) == (5, 5)
    assert findings(cells, {}) == []


def test_cells_are_ordered_by_n_and_then_by_speed() -> None:
    other, larger = make_cell(backend="ddp-eager"), make_cell(backend="ddp-eager", accumulate=8)
    alone = make_cell(accumulate=1, world_size=1)
    faster = record(alone, 0, 0.01)
    made = judged(record(larger, 0, 0.1), record(CELL, 0, 2.0), record(other, 0, 1.0), faster, REFERENCE)
    assert list(zip(by_cell(made)["backend"], by_cell(made)["accumulate"], strict=True)) == [
        ("reference", 1),
        ("ddp-deferred", 1),
        ("ddp-eager", 4),
        ("ddp-deferred", 4),
        ("ddp-eager", 8),
    ]


def test_failures_are_shown_with_their_reason_once() -> None:
    cells = [make_cell(accumulate=n) for n in (1, 2)]
    made = judged(
        *(make_failure(cell, repeat, "oom", "rank 0: too big") for cell in cells for repeat in (0, 1)), REFERENCE
    )
    (line,) = findings(by_cell(made), {})
    assert re.fullmatch(r"oom: ddp-deferred N=1, 2( W=2)?: rank 0: too big", line)
    text = shown(made)
    assert text.count("rank 0: too big") == 1
    assert text.count("oom 2/2") == 2


def test_an_invalid_trial_is_not_in_the_mean_of_good_ones() -> None:
    made = judged(record(CELL, 0, 1.0), record(CELL, 1, 2.0), record(CELL, 2, 90.0, num_updates=4), REFERENCE)
    row = by_cell(made).iloc[1]
    assert (row["status"], row["num_bad"]) == ("invalid", 1)
    assert row["step_time_s"] == pytest.approx(2**0.5)
