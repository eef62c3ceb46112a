"""Memory by category: what the peak is made of, and the gradients held between micro-batches against N."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.colors import to_rgb

from bench.probes.categories import HELD, PEAK, Category
from bench.report.against_n import against_n
from bench.report.bars import one_per_cell, stacked
from bench.report.numbers import with_cells
from bench.report.panels import (
    CONTEXT,
    GIB_ABOVE,
    Drawing,
    Run,
    without_reference,
)

COLOURS = {
    Category.PARAMETERS_SHARDED: "#0072B2",
    Category.PARAMETERS_UNSHARDED: "#8CC6E8",
    Category.GRADIENTS_SHARDED: "#B34700",
    Category.GRADIENTS_UNSHARDED: "#F2A65A",
    Category.OPTIMIZER_STATE: "#009E73",
    Category.COMMUNICATION: "#CC79A7",
    Category.ACTIVATIONS: "#F0E442",
    Category.TEMPORARIES: "#BBBBBB",
    Category.OTHER: "#555555",
}
"""Okabe and Ito's hues; of parameters and gradients what is whole is the paler one, and hatched."""
HATCHED = (Category.PARAMETERS_UNSHARDED, Category.GRADIENTS_UNSHARDED)
HELD_GRADIENTS = "held_gradients_bytes"


def by_cell(memory: pd.DataFrame, total: str) -> pd.DataFrame:
    """Bytes at a moment (PEAK or HELD): a row per cell_id, a column per category; only cells that have all of them.

    ``memory`` is the table of that name, whose categories are ``peak_activations`` and the like, with or without
    ``tracked_`` before it. Of several repeats the largest counts.
    """
    rows = memory.assign(category=memory["category"].str.removeprefix("tracked_"))
    wide = rows.pivot_table(index="cell_id", columns="category", values="bytes", aggfunc="max", observed=True)
    names = {f"{total}_{category}": str(category) for category in Category}
    return wide.reindex(columns=list(names)).rename(columns=names).dropna().astype("Int64")


def _unit(most: float) -> tuple[float, str]:
    return (2.0**30, "GiB") if most >= GIB_ABOVE else (2.0**20, "MiB")


def draw_memory_categories(run: Run, memory: pd.DataFrame) -> list[Drawing]:
    """A stacked bar per backend, a panel per N and W: what lives at the peak, on the rank that has most."""
    parts = by_cell(memory, PEAK)
    trials = without_reference(one_per_cell(run.trials)).merge(parts, on="cell_id", how="left")
    names = [str(category) for category in Category]
    trials["peak_bytes"] = trials[names].sum(axis=1, min_count=1)
    if trials["peak_bytes"].isna().all():
        return []
    unit, unit_name = _unit(float(trials["peak_bytes"].max()))
    return stacked(
        run,
        "memory_categories",
        trials,
        "peak_bytes",
        {str(category): _paint(category) for category in Category if (trials[str(category)] > 0).any()},
        "What the peak memory of a rank is made of",
        "Live storages at the moment of the peak of one settled window, each in one category, on the rank with the "
        "largest peak; right of a bar: the peak, or how the cell failed.",
        f"{unit_name} at the peak",
        unit,
        also=names,
    )


def _paint(category: Category) -> dict[str, Any]:
    colour = COLOURS[category]
    edge = tuple(0.55 * part for part in to_rgb(colour)) if category in HATCHED else "white"
    return {"facecolor": colour, "edgecolor": edge, "linewidth": 0.3, "hatch": "/////" * (category in HATCHED)}


def draw_held_gradients(run: Run, memory: pd.DataFrame) -> list[Drawing]:
    """Bytes of gradients, sharded and whole, that a rank holds from one micro-batch to the next, against N."""
    parts = by_cell(memory, HELD)
    held = parts[[Category.GRADIENTS_SHARDED, Category.GRADIENTS_UNSHARDED]].sum(axis=1).rename(HELD_GRADIENTS)
    trials = run.trials.merge(held, on="cell_id", how="left")
    # With N = 1 there is nothing between micro-batches.
    trials = one_per_cell(trials[(trials["accumulate"] > 1) & (trials["backend"].isin(run.others["backend"]))])
    if trials[HELD_GRADIENTS].isna().all():
        return []
    trials = with_cells(run, trials, HELD_GRADIENTS)
    unit, name = _unit(float(trials[HELD_GRADIENTS].max()))
    title = "Gradients held between micro-batches against N"
    label = f"gradients held on a rank ({name})"
    return against_n(run, "held_gradients", trials, HELD_GRADIENTS, title, label, CONTEXT, unit)
