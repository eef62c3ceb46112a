"""Stacked bars, a row per backend and a panel per N and W: memory by category, payload by collective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bench.plan.categories import HELD, PEAK, Category
from bench.plan.cell import Status
from bench.report import sheet, style
from bench.report.figure_data import FigureData, with_cells, without_reference
from bench.report.lines import against_n
from bench.report.panels import CONTEXT, CSV_COLUMNS, GIB_ABOVE, Drawing, Panel, paged, panel_grid
from bench.report.style import GREY, SMALL, TINY, safe

ROW, MANY_ROWS, TITLE_AND_AXIS = 0.2, 0.15, 0.34
"""Inches of a bar, of one among more than eight, and of the words above and below a panel."""
MARGIN_WORDS = 0.62
"""Inches for the words at the right of a bar."""
PANELS_HEIGHT = 6.0
"""Inches that the panels of one page may take."""


def one_per_cell(trials: pd.DataFrame) -> pd.DataFrame:
    """One trial of each cell, a good one if there is one: memory is measured once per cell."""
    good_first = trials.assign(_bad=trials["status"] != Status.OK)
    first = good_first.sort_values(["_bad", "repeat"], kind="stable").drop_duplicates("cell_id")
    return trials.loc[first.index].sort_values(["_rank", "accumulate"], kind="stable")


def stacked(
    run: FigureData,
    stem: str,
    trials: pd.DataFrame,
    total: str,
    parts: Mapping[str, Mapping[str, Any]],
    title: str,
    note: str,
    label: str,
    unit: float,
    also: Sequence[str],
) -> list[Drawing]:
    """The figures of a total and the columns that add up to it, by how each is painted; one trial of each cell.

    ``unit`` is how much of the columns is 1 on the axis, and ``also`` are columns of the data beside the total.
    """
    trials = trials[[*CSV_COLUMNS, total, *also]]
    panels = run.panels(trials, [*CONTEXT, "accumulate"], [total])
    if not panels:
        return []
    shown = run.shown(panels)
    beside = max(style.text_width(style.fit(name, style.NAME_WIDTH), SMALL) for name in shown) + 0.15
    fit = max(1, int((style.WIDTH - beside) / (1.2 + MARGIN_WORDS)))
    most = min(fit, 3 if len(panels) == 3 else max(2, math.ceil(math.sqrt(len(panels)))), 3)
    row = MANY_ROWS if len(shown) > 8 else ROW
    per_page = most * max(1, int(PANELS_HEIGHT / (row * len(shown) + TITLE_AND_AXIS)))
    largest = float(trials[total].max()) / unit
    drawings = []
    for page in paged(stem, panels, per_page):
        chunk = page.panels
        lines = math.ceil(len(chunk) / most)
        columns = math.ceil(len(chunk) / lines)
        width = (style.WIDTH - 2 * style.MARGIN - beside) / columns
        words = run.words(title)
        words.notes[:0] = [*page.left_out, note]
        height = lines * (row * len(shown) + TITLE_AND_AXIS) + 0.3
        keys: list[style.Key] = [(Patch(**paint), part.replace("_", " ")) for part, paint in parts.items()]
        figure = sheet.sheet(words, [keys], height, height)
        grid = panel_grid(figure, chunk, columns, beside + 0.2 * columns, sharex=True, sharey=True)
        for i, (axes, panel) in enumerate(zip(grid, chunk, strict=True)):
            _bars(axes, panel, shown, total, parts, unit)
            axes.set_xlim(0, largest * width / (width - MARGIN_WORDS) or 1)
            axes.set_xlabel(label if i + columns >= len(chunk) else "")
        drawings.append(Drawing(page.stem, figure, trials, words))
    return drawings


def _bars(
    axes: Axes, panel: Panel, shown: list[str], total: str, parts: Mapping[str, Mapping[str, Any]], unit: float
) -> None:
    """The bars of one panel, in the rows of all backends."""
    axes.set_yticks(range(len(shown)), [safe(style.fit(backend, style.NAME_WIDTH)) for backend in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    known = panel.trials[panel.trials[total].notna()]
    rows = [shown.index(backend) for backend in known["backend"]]
    ends = np.zeros(len(known))
    for part, paint in parts.items():
        widths = known[part].to_numpy(dtype=float) / unit
        axes.barh(rows, widths, 0.72, ends, **paint)
        ends = ends + widths
    reached = dict(zip(rows, ends, strict=True))
    for backend, status in zip(panel.trials["backend"], panel.trials["status"].astype(str), strict=True):
        at = shown.index(backend)
        left, words = reached.get(at, 0.0), "" if status == Status.OK else status
        words = f"{left:.3g} {words}".strip() if at in reached else words or "not measured"
        axes.annotate(safe(words), (left, at), (3, 0), textcoords="offset points", va="center", size=TINY, color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(4))


CATEGORY_COLOURS = {
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


def draw_memory_categories(run: FigureData, memory: pd.DataFrame) -> list[Drawing]:
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
    colour = CATEGORY_COLOURS[category]
    edge = tuple(0.55 * part for part in to_rgb(colour)) if category in HATCHED else "white"
    return {"facecolor": colour, "edgecolor": edge, "linewidth": 0.3, "hatch": "/////" * (category in HATCHED)}


def draw_held_gradients(run: FigureData, memory: pd.DataFrame) -> list[Drawing]:
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


TRAFFIC_COLOURS = {
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
    rows = collectives.assign(op=collectives["op"].where(collectives["op"].isin(list(TRAFFIC_COLOURS)), OTHER))
    each = rows.groupby(["cell_id", "repeat", "op"], observed=True)[TOTAL].sum().reset_index()
    wide = each.pivot_table(index="cell_id", columns="op", values=TOTAL, aggfunc="max", observed=True)
    wide = wide.reindex(columns=[*TRAFFIC_COLOURS, OTHER]).astype("Float64").fillna(0.0)
    return wide.assign(**{TOTAL: wide.sum(axis=1)})


def draw_traffic(run: FigureData, collectives: pd.DataFrame) -> list[Drawing]:
    """A stacked bar per backend, a panel per N and W; nothing where no operation was counted."""
    parts = by_operation(collectives)
    if parts.empty or not float(parts[TOTAL].max()):
        return []
    trials = without_reference(one_per_cell(run.trials)).merge(parts, on="cell_id", how="left")
    names = [*TRAFFIC_COLOURS, OTHER]
    paints: dict[str, dict[str, Any]] = {
        name: {"facecolor": TRAFFIC_COLOURS.get(name, OTHER_COLOUR), "edgecolor": "white", "linewidth": 0.3}
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
