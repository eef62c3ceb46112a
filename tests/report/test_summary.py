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
from bench.report.terminal import TITLE, by_cell, findings, show
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


def test_the_table_shows_every_number() -> None:
    line = next(line for line in shown(GOOD).splitlines() if line.strip().startswith("ddp-deferred"))
    for text in ("1.8171 (1.000 - 3.000)", "282", " 40.0 ", "5/5/-", " 1 ", "ok"):
        assert text in line


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


def test_one_bad_trial_of_three_is_told() -> None:
    made = judged(record(CELL, 0, 1.0), make_failure(CELL, 1, "timeout", "slow"), record(CELL, 2, 3.0), REFERENCE)
    row = by_cell(made).iloc[1]
    assert (row["status"], row["num_bad"], row["num_trials"]) == ("timeout", 1, 3)
    assert row["step_time_s"] == pytest.approx(3**0.5)
    assert "timeout 1/3" in shown(made)


def test_a_cell_that_is_invalid_throughout_still_shows_its_numbers() -> None:
    row = by_cell(judged(record(CELL, 0, 1.0, num_updates=4), REFERENCE)).iloc[1]
    assert (row["status"], row["step_time_s"]) == ("invalid", pytest.approx(1.0))


def test_an_invalid_trial_is_not_in_the_mean_of_good_ones() -> None:
    made = judged(record(CELL, 0, 1.0), record(CELL, 1, 2.0), record(CELL, 2, 90.0, num_updates=4), REFERENCE)
    row = by_cell(made).iloc[1]
    assert (row["status"], row["num_bad"]) == ("invalid", 1)
    assert row["step_time_s"] == pytest.approx(2**0.5)


def test_findings_tell_world_sizes_apart() -> None:
    made = judged(make_failure(CELL), make_record(make_cell(world_size=1)), REFERENCE)
    assert "W=2" in findings(by_cell(made), {})[0]


def test_optimizers_and_clips_are_told_apart_where_there_are_several() -> None:
    cells = [make_cell(optimizer=name, clip_norm=clip) for name in ("adamw-foreach", "sgd") for clip in (0.0, 0.5)]
    references = [make_record(cell.reference()) for cell in cells]
    made = judged(*references, *(make_failure(cell) for cell in cells))
    assert len(by_cell(made)) == 8
    where = [
        f"{name} {clip} N=4 W=2" for name in ("adamw-foreach", "sgd") for clip in ("not clipped", "clipped to 0.5")
    ]
    assert findings(by_cell(made), {}) == [f"oom: ddp-deferred {each}: rank 0: too big" for each in where]
    lines = shown(made).splitlines()
    assert any(re.match(r" backend +N +W +dtype +optimizer +clip ", line) for line in lines)
    assert any(re.match(r" ddp-deferred +4 +2 +fp32 +sgd +0.5 ", line) for line in lines)
    only = shown(judged(references[3], make_record(cells[3])))
    assert "sgd" not in only and "clip" not in only
    assert "optimizer" not in shown(GOOD).replace(TITLE, "").replace("optimizer steps", "").replace(
        "inner optimizer", ""
    )


def test_no_column_is_lost_on_a_narrow_console() -> None:
    cells = [
        make_cell(backend="lightning-deepspeed-zero2-corrected", optimizer=name) for name in ("adamw-foreach", "sgd")
    ]
    made = judged(*(make_record(each) for cell in cells for each in (cell.reference(), cell)))
    text = io.StringIO()
    show(Console(file=text, width=60), made, STANDING, {})
    for words in (" N ", "s/step (min - max)", "steps due/taken/told", "loss off by", "status"):
        assert words in text.getvalue()
    assert "lightning-deepspeed-zero2-corrected" in text.getvalue() and "\u2026" not in text.getvalue()


def test_a_run_of_failures_only() -> None:
    assert "crashed 1/1" in shown(judged(make_failure(CELL, 0, "crashed", "why")))
