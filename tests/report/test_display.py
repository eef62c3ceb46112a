"""The display: plain lines where there is no terminal, counts, failures in words, and the time to go."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from typing import Any

import pytest
from rich.console import Console

from bench.plan.cell import Cell
from bench.plan.schedule import Cost, Trial
from bench.report.progress import Display, JsonLines
from tests.factories import (
    make_cell,
    make_failure,
    make_manifest,
    make_record,
    make_tables,
    manifest_of,
    parsed_records,
)

CELL = make_cell()


def run(
    trials: list[Trial],
    records: list[dict[str, Any]],
    estimate: float | None,
    *,
    terminal: bool = False,
    budget_s: float = math.inf,
) -> str:
    """What is written while these trials end with these records."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200)
    guess = Cost(estimate, None, once_s=30.0)
    with Display(console, {trial.cell.cell_id: guess for trial in trials}) as display:
        display.expect(trials, more=budget_s < math.inf, budget_left_s=budget_s)
        for number, (trial, record) in enumerate(zip(trials, records, strict=False)):
            display.started(trial, number, len(trials))
            display.finished(trial, parsed_records([record])[0])
    return text.getvalue()


TRIALS = [Trial(CELL, repeat) for repeat in range(4)]


def test_plain_lines() -> None:
    lines = run(
        TRIALS,
        [make_record(CELL, wall_s=4.0), make_failure(CELL, 1, "oom", "rank 0: [red]full[/red]")],
        2.0,
    )
    first, second = (line.split(": ", 1) for line in lines.splitlines())
    assert (
        first[0] == f"[1/4] {CELL.label} repeat 0" and second[0] == f"[2/4] {CELL.label} repeat 1"
    )
    assert first[1] == "0.5100 s/step (4.0 s, about 12 s to go)"
    # Twice 2 s were expected and 6.5 s taken, so twice 2 s more will take 6.5 s.
    assert second[1].startswith("oom: rank 0: [red]full[/red] ")
    assert second[1].endswith(" (2.5 s, about 6 s to go)")


def test_no_more_time_is_left_than_the_budget_and_the_block_under_way() -> None:
    other = make_cell(backend="ddp-eager")
    blocks = [Trial(cell, repeat) for repeat in range(100) for cell in (CELL, other)]
    records = [make_record(trial.cell, trial.repeat, wall_s=60.0) for trial in blocks[:2]]
    lines = run(blocks, records, 60.0, budget_s=180.5).splitlines()
    assert "at most about 3 min 00 s to go" in lines[0] and "by the budget" in lines[0]
    lines = run(blocks, records, 60.0, budget_s=1e-3).splitlines()
    # The other half of the first block is run whatever the budget, and nothing after it.
    assert "at most about 1 min 00 s to go" in lines[0]
    assert "at most about 0 s to go" in lines[1]
    assert (
        run(blocks, records, 60.0, budget_s=1e6)
        .splitlines()[0]
        .endswith("at least 199 min 00 s to go)")
    )


def test_the_step_time_is_that_of_the_tables() -> None:
    slow_first = make_record(CELL, time={"num_warmup": 4, "step_seconds": [9.0, 8.0, 1.0, 1.25]})
    (line,) = run(TRIALS[:1], [slow_first], 2.0).splitlines()
    trials = make_tables([slow_first], make_manifest([CELL])).trials
    assert trials["step_time_s"].tolist() == [4.625] and ": 4.6250 s/step (" in line, (
        "every timed step counts"
    )
    shared = dataclasses.replace(CELL, shared_gpu=True)
    (line,) = run([Trial(shared, 0)], [make_record(shared)], 2.0).splitlines()
    assert ": ok (" in line, "nothing is timed where ranks share a GPU"


def busy_record(cell: Cell, repeat: int) -> dict[str, Any]:
    host = {"num_cpus": 4, "foreign_cores": 1.6, "stolen_cores": 0.0}
    return make_record(cell, repeat, time={"host": host})


def test_a_busy_machine_is_told_after_the_first_trial_that_shows_it_and_once() -> None:
    text = io.StringIO()
    manifest = manifest_of(make_manifest([CELL]))
    records = parsed_records([make_record(CELL, 0), *(busy_record(CELL, n) for n in (1, 2))])
    with Display(Console(file=text, width=200), {}, manifest) as display:
        display.expect(TRIALS, more=False)
        for number, record in enumerate(records):
            display.started(TRIALS[number], number, len(TRIALS))
            display.finished(TRIALS[number], record)
    lines = text.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines][1:3] == [
        "[2/4] ddp-deferred N=4 W=2 fp32 repeat 1",
        "WARNING",
    ]
    assert len(lines) == 4 and "others took 40 % of its CPUs (limit 10 %)" in lines[2]


def test_the_time_to_go_gets_shorter_within_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("bench.report.progress.time.monotonic", lambda: now[0])
    with Display(Console(file=io.StringIO()), {CELL.cell_id: Cost(10.0, None)}) as display:
        display.expect(TRIALS[:2], more=False)
        assert display.time_left_now() == ""
        display.started(TRIALS[0], 0, 2)
        seen = [display.time_left_now()]
        for now[0] in (104.0, 110.0, 150.0):
            seen.append(display.time_left_now())
    # A trial that takes too long does not eat the time of the next.
    assert seen == [f"about {seconds} s to go" for seconds in (20, 16, 10, 10)]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_line_that_changes_is_whole_in_a_narrow_terminal(width: int) -> None:
    """What it waits for, and a trial with a long name and hours to go."""
    cell = make_cell(backend="lightning-deepspeed-zero2-corrected")
    trials = [Trial(cell, repeat) for repeat in range(99)]
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=width)
    what = "processes that import torch, accelerate, deepspeed, lightning and torchtitan"
    with Display(console, {cell.cell_id: Cost(99.0, None)}) as display:
        display.expect(trials, more=True)
        display.waits(what)
        display._progress.refresh()
        display.started(trials[0], 10, 99)
        display._progress.refresh()
    words = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", " ", text.getvalue()).split())
    assert what in words and "…" not in words
    assert f"{cell.label} repeat 0" in words and "10/99" in words and "s to go" in words


def test_what_a_start_waits_for_is_told_once() -> None:
    text = io.StringIO()
    with Display(Console(file=text, width=200), {}) as display:
        for _ in range(2):
            display.waits("they import torch")
    assert text.getvalue() == "waiting: they import torch\n"


def test_machines_read_each_event_as_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [make_cell(global_batch_size=size) for size in (16, 32)]
    trials = [Trial(cell, 0) for cell in cells]
    guesses = {cell.cell_id: Cost(2.0, None) for cell in cells}
    failed = make_failure(cells[1], 0, "oom", "rank 0: full")
    good_record, bad_record = parsed_records([make_record(cells[0], wall_s=4.0), failed])
    with JsonLines(guesses, manifest_of(make_manifest(cells))) as display:
        display.say("run x")
        display.expect(trials, more=False)
        display.started(trials[0], 0, 2)
        display.finished(trials[0], good_record)
        display.started(trials[1], 1, 2)
        display.finished(trials[1], bad_record)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == [
        "message",
        "started",
        "finished",
        "started",
        "finished",
    ]
    assert events[0]["text"] == "run x"
    assert [event["label"] for event in events[1::2]] == [
        f"ddp-deferred N=4 W=2 fp32 B = {size}" for size in (16, 32)
    ]
    _, began, good, _, bad = events
    assert (began["done"], began["total"], began["seconds_to_go"], began["bound"]) == (
        0,
        2,
        4.0,
        "about",
    )
    assert (good["status"], good["step_time_s"], good["done"], good["seconds_to_go"]) == (
        "ok",
        0.51,
        1,
        4.0,
    )
    assert (bad["status"], bad["reason"], bad["step_time_s"]) == ("oom", "rank 0: full", None)
