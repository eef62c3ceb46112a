"""The numbers that figures draw: of trials, and of the cells that these are of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from bench.analysis.estimate import NAME, tokens_per_step
from bench.cell import Status
from bench.report.panels import CSV_COLUMNS, Run

TIMES = ("step_time_s", "tokens_per_s")
"""Values with an interval."""
SAID_OF_CELLS = dict.fromkeys(TIMES, f"{NAME}, a line for its 95 % interval")
"""Which number a cell has in a figure, in words."""
LARGEST = "the largest of its trials"
"""The same of other values."""


def with_cells(run: Run, trials: pd.DataFrame, *values: str) -> pd.DataFrame:
    """With ``<value>_cell``, the number that is said of a cell, and ``valid``: all that was measured of it is ok.

    Of step times the estimate that is cited, with the ends of its interval, ``_low`` and ``_high``; of tokens per
    second the tokens over these; of bytes the largest. Over the ok trials, or over all if none is.
    """
    trials = trials[[*CSV_COLUMNS, "peak_memory_source", *values]].copy()  # frames of all columns are slow
    for value in values:
        trials[value] = trials[value].where(np.isfinite(trials[value].to_numpy(dtype=float, na_value=np.nan)))
    fine, cells = trials["status"] == Status.OK, trials["cell_id"]
    trials["valid"] = (fine | trials[list(values)].isna().any(axis=1)).groupby(cells).transform("all")
    for value in values:
        if value in TIMES:
            trials = trials.assign(**_times(run, trials, value))
        else:
            good = trials[value].where(fine).groupby(cells).transform("max")
            trials[f"{value}_cell"] = good.fillna(trials[value].groupby(cells).transform("max"))
    return trials


def _times(run: Run, trials: pd.DataFrame, value: str) -> dict[str, pd.Series]:
    """A cell's step time, or its rate, and the ends of its interval."""
    cells, ends = trials["cell_id"], ("cell", "low", "high")
    found = {
        end: cells.map({name: getattr(one, field) for name, one in run.times.items()}).astype("Float64")
        for end, field in zip(ends, ("seconds", "low", "high"), strict=True)
    }
    if value == "tokens_per_s":
        tokens = cells.map(tokens_per_step(run.trials)).astype("Float64")
        found = {end: tokens / found[of] for end, of in zip(ends, ("cell", "high", "low"), strict=True)}
    return {f"{value}_{end}": series for end, series in found.items()}


def cells_with(trials: pd.DataFrame, value: str) -> pd.DataFrame:
    """One row per cell that has a number."""
    return trials[trials[f"{value}_cell"].notna()].drop_duplicates("cell_id").sort_values("accumulate")


def interval_line(cells: pd.DataFrame, value: str, unit: float = 1.0) -> tuple[Any, Any]:
    """One line through the intervals of cells, with gaps between them: index of the cell in ``cells``, and value.

    Both are arrays of three numbers per cell: the two ends, and a gap.
    """
    ends = [cells[f"{value}_{end}"].to_numpy(dtype=float, na_value=np.nan) / unit for end in ("low", "high")]
    return np.repeat(np.arange(len(cells)), 3), np.stack([*ends, np.full(len(cells), np.nan)], axis=1).ravel()
