"""Memory by category: what the peak is made of, and the gradients held between micro-batches against N."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bench.cell import Status
from bench.probes.categories import HELD, PEAK, Category
from bench.report import style
from bench.report.against_n import against_n
from bench.report.panels import (
    CONTEXT,
    CSV_COLUMNS,
    GIB_ABOVE,
    Drawing,
    Panel,
    Run,
    centred_trials,
    paged,
    panel_grid,
    without_reference,
)
from bench.report.style import GREY, SMALL, TINY, Key, safe

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
ROW, MANY_ROWS, TITLE_AND_AXIS = 0.2, 0.15, 0.34
"""Inches of a bar, of one among more than eight, and of the words above and below a panel."""
MARGIN_WORDS = 0.62
"""Inches for the words at the right of a bar."""
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


def _one_per_cell(trials: pd.DataFrame) -> pd.DataFrame:
    """One trial of each cell, a good one if there is one: memory is measured once per cell."""
    good_first = trials.assign(_bad=trials["status"] != Status.OK)
    first = good_first.sort_values(["_bad", "repeat"], kind="stable").drop_duplicates("cell_id")
    return trials.loc[first.index].sort_values(["_rank", "accumulate"], kind="stable")


def draw_memory_categories(run: Run, memory: pd.DataFrame) -> list[Drawing]:
    """A stacked bar per backend, a panel per N and W: what lives at the peak, on the rank that has most."""
    parts = by_cell(memory, PEAK)
    trials = without_reference(_one_per_cell(run.trials)).merge(parts, on="cell_id", how="left")
    names = [str(category) for category in Category]
    trials["peak_bytes"] = trials[names].sum(axis=1, min_count=1)
    panels = run.panels(trials, [*CONTEXT, "accumulate"], ["peak_bytes"])
    if not panels:
        return []
    unit, unit_name = _unit(float(trials["peak_bytes"].max()))
    shown = run.shown(panels)
    beside = max(style.text_width(name, SMALL) for name in shown) + 0.15
    fit = max(1, int((style.WIDTH - beside) / (1.2 + MARGIN_WORDS)))
    most = min(fit, 3 if len(panels) == 3 else max(2, math.ceil(math.sqrt(len(panels)))), 3)
    row = MANY_ROWS if len(shown) > 8 else ROW
    per_page = most * max(1, int(6.0 / (row * len(shown) + TITLE_AND_AXIS)))
    used = [category for category in Category if (trials[str(category)] > 0).any()]
    drawings = []
    for name, chunk in paged("memory_categories", panels, per_page):
        lines = math.ceil(len(chunk) / most)
        columns = math.ceil(len(chunk) / lines)
        width = (style.WIDTH - 2 * style.MARGIN - beside) / columns
        end = float(trials["peak_bytes"].max()) / unit * width / (width - MARGIN_WORDS)
        words = run.words("What the peak memory of a rank is made of")
        words.notes.insert(0, "Live storages at the moment of the peak of one settled window, each in one category, "
                              "on the rank with the largest peak; right of a bar: the peak, or how the cell "
                              "failed.")  # fmt: skip
        height = lines * (row * len(shown) + TITLE_AND_AXIS) + 0.3
        figure = style.sheet(words, [[_key(category) for category in used]], height, height)
        grid = panel_grid(figure, chunk, columns, beside + 0.2 * columns, sharex=True, sharey=True)
        for i, (axes, panel) in enumerate(zip(grid, chunk, strict=True)):
            _bars(axes, panel, shown, used, unit)
            axes.set_xlim(0, end)
            axes.set_xlabel(f"{unit_name} at the peak" if i + columns >= len(chunk) else "")
        drawings.append(Drawing(name, figure, trials[[*CSV_COLUMNS, "peak_bytes", *names]], words))
    return drawings


def _bars(axes: Axes, panel: Panel, shown: list[str], used: list[Category], unit: float) -> None:
    """The bars of one panel, in the rows of all backends."""
    axes.set_yticks(range(len(shown)), [safe(backend) for backend in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    for trial in panel.trials.to_dict("records"):
        at, left = shown.index(trial["backend"]), 0.0
        words = str(trial["status"])
        if not pd.isna(trial["peak_bytes"]):
            for category in used:
                width = float(trial[str(category)]) / unit
                axes.barh(at, width, 0.72, left, **_paint(category))
                left += width
            words = f"{left:.3g}" + (f" {words}" if words != Status.OK else "")
        axes.annotate(safe(words), (left, at), (3, 0), textcoords="offset points", va="center", size=TINY, color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _paint(category: Category) -> dict[str, Any]:
    colour = COLOURS[category]
    edge = tuple(0.55 * part for part in to_rgb(colour)) if category in HATCHED else "white"
    return {"facecolor": colour, "edgecolor": edge, "linewidth": 0.3, "hatch": "/////" * (category in HATCHED)}


def _key(category: Category) -> Key:
    return Patch(**_paint(category)), str(category).replace("_", " ")


def draw_held_gradients(run: Run, memory: pd.DataFrame) -> list[Drawing]:
    """Bytes of gradients, sharded and whole, that a rank holds from one micro-batch to the next, against N."""
    parts = by_cell(memory, HELD)
    held = parts[[Category.GRADIENTS_SHARDED, Category.GRADIENTS_UNSHARDED]].sum(axis=1).rename(HELD_GRADIENTS)
    trials = run.trials.merge(held, on="cell_id", how="left")
    # With N = 1 there is nothing between micro-batches.
    trials = _one_per_cell(trials[(trials["accumulate"] > 1) & (trials["backend"].isin(run.others["backend"]))])
    if trials[HELD_GRADIENTS].isna().all():
        return []
    trials = centred_trials(trials, HELD_GRADIENTS)
    unit, name = _unit(float(trials[HELD_GRADIENTS].max()))
    title = "Gradients held between micro-batches against N"
    label = f"gradients held on a rank ({name})"
    return against_n(run, "held_gradients", trials, HELD_GRADIENTS, title, label, CONTEXT, unit)
