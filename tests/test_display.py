"""The display: plain lines where there is no terminal, counts, failures in words, and the time to go."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from bench.report.display import Display
from bench.schedule import Trial
from tests.factories import make_cell, make_failure, make_record

CELL = make_cell()


def run(trials: list[Trial], records: list[dict[str, Any]], estimate: float | None, *, terminal: bool = False) -> str:
    """What is written while these trials end with these records."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200)
    with Display(console, {CELL.cell_id: estimate}) as display:
        display.expect(trials, more=False)
        for number, (trial, record) in enumerate(zip(trials, records, strict=False)):
            display.started(trial, number, len(trials))
            display.finished(trial, record)
    return text.getvalue()


TRIALS = [Trial(CELL, repeat) for repeat in range(4)]


def test_plain_lines() -> None:
    lines = run(TRIALS, [make_record(CELL, wall_s=4.0), make_failure(CELL, 1, "oom", "rank 0: [red]full[/red]")], 2.0)
    assert lines.splitlines() == [
        "[1/4] ddp-deferred N=4 W=2 fp32 repeat 0: 0.51 s/step (4.0 s, about 12 s to go)",
        # Twice 2 s were expected and 6.5 s taken, so twice 2 s more will take 6.5 s.
        "[2/4] ddp-deferred N=4 W=2 fp32 repeat 1: oom: rank 0: [red]full[/red] (2.5 s, about 6 s to go)",
    ]


def test_time_to_go_without_estimates_is_the_mean_of_what_was_seen() -> None:
    lines = run(TRIALS, [make_record(CELL, wall_s=40.0), make_record(CELL, wall_s=60.0)], None).splitlines()
    assert lines[0].endswith("(40.0 s, about 2 min 00 s to go)")
    assert lines[1].endswith("(60.0 s, about 1 min 40 s to go)")


def test_nothing_is_left_at_the_end() -> None:
    lines = run(TRIALS[:1], [make_record(CELL)], 2.0).splitlines()
    assert lines[-1].startswith("[1/1]") and lines[-1].endswith("about 0 s to go)")


def test_a_terminal_gets_the_lines_too() -> None:
    text = run(TRIALS, [make_record(CELL)], 2.0, terminal=True)
    assert "[1/4] ddp-deferred N=4 W=2 fp32 repeat 0: 0.51 s/step" in text
    assert "\x1b[" in text


def test_messages_are_not_markup_and_not_wrapped() -> None:
    text = io.StringIO()
    with Display(Console(file=text, width=20), {}) as display:
        display.say("[bold]a path[/bold] " + "x" * 60)
    assert text.getvalue() == "[bold]a path[/bold] " + "x" * 60 + "\n"
