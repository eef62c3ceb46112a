"""What ranks send each other: payload of the collectives between two updates, by operation."""

from __future__ import annotations

from typing import Any

import pandas as pd

from bench.report.bars import one_per_cell, stacked
from bench.report.panels import Drawing, Run, without_reference

COLOURS = {
    "all_reduce": "#0072B2",
    "reduce_scatter": "#009E73",
    "all_gather": "#E69F00",
    "broadcast": "#CC79A7",
}
"""Okabe and Ito's hues."""
OTHER, OTHER_COLOUR = "other", "#888888"
TOTAL = "payload_bytes"
MIB = 2.0**20


def by_operation(collectives: pd.DataFrame) -> pd.DataFrame:
    """Payload bytes of a rank in one optimizer step: a row per cell_id, a column per operation, and their sum.

    ``collectives`` is the table of that name. Of several repeats the largest counts.
    """
    rows = collectives.assign(op=collectives["op"].where(collectives["op"].isin(list(COLOURS)), OTHER))
    each = rows.groupby(["cell_id", "repeat", "op"], observed=True)[TOTAL].sum().reset_index()
    wide = each.pivot_table(index="cell_id", columns="op", values=TOTAL, aggfunc="max", observed=True)
    wide = wide.reindex(columns=[*COLOURS, OTHER]).astype("Float64").fillna(0.0)
    return wide.assign(**{TOTAL: wide.sum(axis=1)})


def draw_traffic(run: Run, collectives: pd.DataFrame) -> list[Drawing]:
    """A stacked bar per backend, a panel per N and W; nothing where no operation was counted."""
    parts = by_operation(collectives)
    if parts.empty or not float(parts[TOTAL].max()):
        return []
    trials = without_reference(one_per_cell(run.trials)).merge(parts, on="cell_id", how="left")
    names = [*COLOURS, OTHER]
    paints: dict[str, dict[str, Any]] = {
        name: {"facecolor": COLOURS.get(name, OTHER_COLOUR), "edgecolor": "white", "linewidth": 0.3}
        for name in names
        if (trials[name] > 0).any()
    }
    return stacked(
        run,
        "communication",
        trials,
        TOTAL,
        paints,
        "Payload of the collectives of one optimizer step",
        "Bytes that a rank hands to collectives between two updates, after warm-up, by operation: an algorithm of the "
        "network sends more or less than these; right of a bar: their sum, or how the cell failed.",
        "MiB per optimizer step",
        MIB,
        also=names,
    )
