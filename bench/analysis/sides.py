"""From the tables of a run to the sides of comparisons."""

from __future__ import annotations

from typing import Any

import pandas as pd

from bench.analysis.gates import WORK
from bench.analysis.statistics import Sample
from bench.analysis.verdicts import Side
from bench.cell import Status
from bench.tables import Tables


def side(tables: Tables, cell_id: str, label: str = "") -> Side:
    """The side of a comparison that a cell is, from tables that the gates have judged.

    A repeat is a block: the runner runs each cell once per repeat, in random order. Trials that did not end ``ok`` are
    counted and not left out in silence; those that are invalid forbid the comparison, with their reason.
    """
    trials = tables.trials[tables.trials["cell_id"] == cell_id].sort_values("repeat")
    if trials.empty:
        raise ValueError(f"the run has no cell {cell_id}")
    steps = tables.steps[tables.steps["cell_id"] == cell_id].sort_values(["repeat", "step"])
    seconds = dict(iter(steps.groupby("repeat")))
    good: dict[int, list[float]] = {}
    gates: dict[str, list[str]] = {}
    for row in trials.to_dict("records"):
        if row["status"] == Status.INVALID:
            gates.setdefault(str(row["reason"]), []).append(str(row["repeat"]))
        elif row["status"] == Status.OK:
            wrong = _wrong_steps(row, seconds.get(row["repeat"]))
            if wrong:
                gates.setdefault(wrong, []).append(str(row["repeat"]))
            else:
                good[int(row["repeat"])] = seconds[row["repeat"]]["seconds"].astype(float).tolist()
    first = trials.iloc[0]
    return Side(
        label=label or f"{first['backend']} N={first['accumulate']} W={first['world_size']} {first['precision']}",
        sample=Sample(tuple(map(tuple, good.values())), tuple(good)),
        num_failed=len(trials) - len(good) - sum(map(len, gates.values())),
        precision=str(first["precision"]),
        accumulation_dtype=str(first["accumulation_dtype"]),
        work=", ".join(f"{name} {first[name]}" for name in WORK),
        failed_gates=tuple(f"repeat {', '.join(repeats)}: {text}" for text, repeats in gates.items()),
    )


def _wrong_steps(row: Any, steps: pd.DataFrame | None) -> str:
    """What is wrong with the steps of a good trial: one per optimizer step, from the first timed one to the last."""
    if steps is None or steps.empty:
        return "no step was timed"
    numbers = steps["step"].astype(int).tolist()
    due = list(range(numbers[0], int(row["optimizer_steps_expected"])))
    return "" if numbers == due else f"{len(numbers)} steps were timed, {len(due)} were due: a micro-batch is no step"
