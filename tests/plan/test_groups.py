"""Cells of groups in a run: those of one trial keep nothing open, and are shown as they are."""

from __future__ import annotations

from pathlib import Path

from bench.judge.analysis import Analysis
from bench.judge.statistics import MIN_TRIALS
from bench.plan.cell import REFERENCE
from bench.plan.schedule import Ended
from tests.pages import simulate


def test_a_cell_of_one_trial_is_not_waited_for(tmp_path: Path) -> None:
    """One trial never has an interval: waiting for one would last until max_repeats."""
    run = simulate(
        tmp_path / "run", {"b0": 1.0, "b1": 1.3, "b2": 1.1}, once=("b2", REFERENCE), repeats=MIN_TRIALS, max_repeats=400
    )
    trials = run.tables.trials
    counts = {name: int((trials["backend"] == name).sum()) for name in ("b0", "b1", "b2", REFERENCE)}
    assert counts["b2"] == counts[REFERENCE] == 1
    assert counts["b1"] >= MIN_TRIALS
    assert run.manifest["ended_by"] == Ended.PRECISION
    assert counts["b1"] < 40, "it ended when the others were certain"
    rows = {row.b.backend: row for row in Analysis(run=run).verdicts if not row.b.twin}
    assert rows["b1"].time is not None and rows["b1"].time.low is not None
    assert rows["b2"].time is not None and rows["b2"].time.low is None, "shown, without an interval"
