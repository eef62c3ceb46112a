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

from bench.judge.expected import cell_of
from bench.judge.formulas import wire_bytes
from bench.judge.tables import rows_of
from bench.plan.categories import PEAK, Category
from bench.plan.cell import Cell
from bench.report import sheet, style
from bench.report.figure_data import (
    CONTEXT,
    FACTS,
    MEMORY,
    FigureData,
    Panel,
    failure,
    floats,
    most_extreme,
    tied,
    twins,
)
from bench.report.sheet import Drawing, panel_grid
from bench.report.style import GREY, SMALL, TINY, safe
from bench.words import alike, plural, size, some, unit_of

ROW, MANY_ROWS, TITLE_AND_AXIS = 0.2, 0.15, 0.34
"""Inches of a bar, of one among more than eight, and of the words above and below a panel."""
MARGIN_WORDS = 0.62
"""Inches for the words at the right of a bar."""
SAME = 0.01
"""Relative difference below which two measurements of a peak are one."""
PANELS_HEIGHT = 3.5
"""Inches that all panels may take: half a page."""


def stacked(
    run: FigureData,
    stem: str,
    cells: pd.DataFrame,
    total: str,
    parts: Mapping[str, Mapping[str, Any]],
    title: str,
    note: str,
    label: str,
    unit: float,
    also: Sequence[str],
) -> list[Drawing]:
    """The figure of a total and the columns that add up to it, by how each is painted; none if no total is known.

    ``unit`` is what is 1 on the axis, in the unit of the columns; ``also`` are further columns of the data.
    """
    cells = cells[[*FACTS, total, *also]]
    known = cells.groupby([*CONTEXT, "accumulate"], dropna=False)[total].transform("count") > 0
    cells = cells[known]
    if cells.empty:
        return []
    shown = run.shown(cells)
    beside = max(style.text_width(style.fit(name, style.NAME_WIDTH), SMALL) for name in shown) + 0.15
    widest = min(3, max(1, int((style.WIDTH - beside) / (1.2 + MARGIN_WORDS))))
    row = MANY_ROWS if len(shown) > 8 else ROW
    line = row * len(shown) + TITLE_AND_AXIS
    panels, left_out = run.panels(cells, [*CONTEXT, "accumulate"], widest * max(1, int(PANELS_HEIGHT / line)))
    lines = math.ceil(len(panels) / (min(widest, 2) if len(panels) == 4 else widest))
    columns = math.ceil(len(panels) / lines)
    words = run.words(title)
    words.notes[:0] = [*left_out, note]
    keys: list[style.Key] = [(Patch(**paint), part.replace("_", " ")) for part, paint in parts.items()]
    figure = sheet.sheet(words, [keys], lines * line + 0.3, lines * line + 0.3)
    titles = [panel.title for panel in panels]
    grid = panel_grid(figure, titles, columns, beside + 0.2 * columns, sharex=True, sharey=True)
    for i, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        _bars(axes, panel, shown, total, parts, unit)
        axes.set_xlabel(label if i + columns >= len(panels) else "")
    width = (style.WIDTH - 2 * style.MARGIN - beside) / columns
    grid[0].set_xlim(0, float(cells[total].max()) / unit * width / (width - MARGIN_WORDS) or 1)
    return [Drawing(stem, figure, cells, words)]


def _bars(
    axes: Axes, panel: Panel, shown: list[str], total: str, parts: Mapping[str, Mapping[str, Any]], unit: float
) -> None:
    """The bars of one panel, in the rows of all backends."""
    axes.set_yticks(range(len(shown)), [safe(style.fit(backend, style.NAME_WIDTH)) for backend in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    known = panel.rows[panel.rows[total].notna()]
    rows = [shown.index(backend) for backend in known["backend"]]
    ends = np.zeros(len(known))
    for part, paint in parts.items():
        widths = known[part].to_numpy(dtype=float) / unit
        axes.barh(rows, widths, 0.72, ends, **paint)
        ends = ends + widths
    reached = dict(zip(rows, ends, strict=True))
    for backend, outcome in zip(panel.rows["backend"], panel.rows["outcome"], strict=True):
        word, at = failure(outcome), shown.index(backend)
        left = reached.get(at, 0.0)
        sum_of = f"{left:,.0f}" if left >= 1000 else f"{left:.3g}"
        words = f"{sum_of} {word}".strip() if at in reached else word or "not measured"
        axes.annotate(safe(words), (left, at), (3, 0), textcoords="offset points", va="center", size=TINY, color=GREY)
    if total == "live_bytes":
        other = known[(known["peak_memory_bytes"] - known[total]).abs() > SAME * known[total]]
        places = [shown.index(backend) for backend in other["backend"]]
        axes.plot(floats(other["peak_memory_bytes"]) / unit, places, "k|", markersize=9, markeredgewidth=1.4)
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
"""Okabe and Ito's hues; unsharded parameters and gradients are paler than sharded ones, and hatched."""
UNSPLIT = "not_split"
"""Column: the peak of a cell whose categories were not measured."""
HATCHED = (Category.PARAMETERS_UNSHARDED, Category.GRADIENTS_UNSHARDED)


def by_cell(memory: pd.DataFrame, total: str) -> pd.DataFrame:
    """Bytes at a moment (``PEAK``): a row per cell_id, a column per category; only cells that have all of them.

    ``memory`` is the table of that name, whose categories are ``peak_activations`` and the like, with or without
    ``tracked_`` before it. The largest of several repeats counts.
    """
    rows = memory.assign(category=memory["category"].str.removeprefix("tracked_"))
    wide = rows.pivot_table(index="cell_id", columns="category", values="bytes", aggfunc="max", observed=True)
    names = {f"{total}_{category}": str(category) for category in Category}
    return wide.reindex(columns=list(names)).rename(columns=names).dropna().astype("Int64")


def draw_memory_categories(run: FigureData) -> list[Drawing]:
    """A stacked bar per backend, a panel per N and W: what lives at the peak, on the rank that has most.

    A peak that was not split is one bar. A black mark is the allocator's peak, if that differs.
    """
    parts = by_cell(run.tables.memory, PEAK)
    cells = run.others.join(parts)
    names = [str(category) for category in Category]
    cells["live_bytes"] = cells[names].sum(axis=1, min_count=1)
    cells[UNSPLIT] = cells["peak_memory_bytes"].where(cells["live_bytes"].isna())
    cells["live_bytes"] = cells["live_bytes"].fillna(cells["peak_memory_bytes"])
    if cells["live_bytes"].isna().all():
        return []
    cells[[*names, UNSPLIT]] = cells[[*names, UNSPLIT]].astype("Float64").fillna(0.0)
    unit, unit_name = unit_of(float(cells["live_bytes"].max()))
    paints = {str(category): _paint(category) for category in Category if (cells[str(category)] > 0).any()}
    if (cells[UNSPLIT] > 0).any():
        paints[UNSPLIT] = {"facecolor": "#DDDDDD", "edgecolor": GREY, "linewidth": 0.3}
    return stacked(
        run,
        "memory_categories",
        cells,
        "live_bytes",
        paints,
        _memory_title(run, cells),
        "What is live at the peak of a window after warm-up, on the rank with the largest peak; each storage is in one "
        "category. Right of a bar: the peak, and how the cell failed.",
        f"{unit_name} at the peak of a rank",
        unit,
        also=[*names, UNSPLIT, *MEMORY],
    )


def _memory_title(run: FigureData, cells: pd.DataFrame) -> str:
    """Who needs the least and the most memory at the most ranks and the largest N, and where the difference lies."""
    good = most_extreme(cells, "live_bytes")
    if good.empty:
        return "Peak memory (no cell is correct)"
    least, most = good.iloc[0], good.iloc[-1]
    where = run.where(least)
    if alike(float(most["live_bytes"]), float(least["live_bytes"])):
        alone = least["backend"] if len(good) == 1 else f"each of {plural(len(good), 'backend')}"
        return f"{where}, {alone} needs {size(float(least['live_bytes']))} per rank"
    means = _times(good, "live_bytes", "need", "memory")
    away = pd.Series({str(name): float(most[str(name)]) - float(least[str(name)]) for name in Category})
    mostly = str(away.idxmax()).split("_")
    mostly = mostly[::-1] if "sharded" in mostly[-1] else mostly
    return f"{where}, {means}" + (f", mostly for {' '.join(mostly)}" if away.max() > 0 else "")


def _times(good: pd.DataFrame, value: str, verb: str, what: str) -> str:
    """How many times the least of cells in order the most is, and of which backends; those that tie are all named."""
    least, most = float(good[value].iloc[0]), float(good[value].iloc[-1])
    those = tied(good, value, most)
    verb += "s" * (len(those) == 1)
    return f"{some(those)} {verb} {most / least:.2g}x the {what} of {some(tied(good, value, least))}"


def _paint(category: Category) -> dict[str, Any]:
    colour = CATEGORY_COLOURS[category]
    edge = tuple(0.55 * part for part in to_rgb(colour)) if category in HATCHED else "white"
    return {"facecolor": colour, "edgecolor": edge, "linewidth": 0.3, "hatch": "/////" * (category in HATCHED)}


TRAFFIC_COLOURS = {
    "all_reduce": "#0072B2",
    "reduce_scatter": "#009E73",
    "all_gather": "#E69F00",
    "broadcast": "#CC79A7",
}
"""Okabe and Ito's hues."""
OTHER, OTHER_COLOUR = "other", "#888888"
TOTAL, SENT = "payload_bytes", "sent_bytes"
MIB = 2.0**20


def by_operation(collectives: pd.DataFrame, cells: Mapping[str, Cell] | None = None) -> pd.DataFrame:
    """Payload bytes of a rank in one optimizer step: a row per cell_id, a column per operation, and their sum.

    ``collectives`` is the table of that name; the largest of several repeats counts. With ``cells``, by
    id, the bytes that a ring algorithm sends for that payload (``judge.formulas.wire_bytes``).
    """
    rows = collectives.assign(op=collectives["op"].where(collectives["op"].isin(list(TRAFFIC_COLOURS)), OTHER))
    if cells is not None:
        each_row = zip(*(collectives[name] for name in ("cell_id", "op", "group", TOTAL)), strict=True)
        rows[TOTAL] = [wire_bytes(op, int(size), cells[of].group_size(group)) for of, op, group, size in each_row]
    each = rows.groupby(["cell_id", "repeat", "op"], observed=True)[TOTAL].sum().reset_index()
    wide = each.pivot_table(index="cell_id", columns="op", values=TOTAL, aggfunc="max", observed=True)
    wide = wide.reindex(columns=[*TRAFFIC_COLOURS, OTHER]).astype("Float64").fillna(0.0)
    return wide.assign(**{TOTAL: wide.sum(axis=1)})


def draw_traffic(run: FigureData) -> list[Drawing]:
    """A stacked bar per backend, a panel per N and W; nothing if no operation was counted."""
    trials = rows_of(run.tables.trials.drop_duplicates("cell_id"))
    known = {row["cell_id"]: cell_of(row) for row in trials}
    parts = by_operation(run.tables.collectives, known).rename(columns={TOTAL: SENT})
    if parts.empty or not float(parts[SENT].max()):
        return []
    cells = run.others.join(parts)
    names = [*TRAFFIC_COLOURS, OTHER]
    paints: dict[str, dict[str, Any]] = {
        name: {"facecolor": TRAFFIC_COLOURS.get(name, OTHER_COLOUR), "edgecolor": "white", "linewidth": 0.3}
        for name in names
        if (cells[name] > 0).any()
    }
    unit, unit_name = unit_of(float(cells[SENT].max()))
    return stacked(
        run,
        "communication",
        cells[cells["world_size"] > 1],
        SENT,
        paints,
        _traffic_title(run, cells),
        "Bytes that a ring algorithm sends for the collectives counted between two updates, computed from their "
        "payload (gloo uses other algorithms). Right of a bar: their sum, and how the cell failed.",
        f"{unit_name} sent per rank and step",
        unit,
        also=names,
    )


def _traffic_title(run: FigureData, cells: pd.DataFrame) -> str:
    """What deferring the sync saves at the most ranks and the largest N, or who sends the least and the most."""
    good = most_extreme(cells[cells["world_size"] > 1], SENT)
    if good.empty:
        return "Bytes that a rank sends (no cell is correct)"
    where = run.where(good.iloc[0])
    saved = {eager["backend"]: (eager[SENT], deferred[SENT]) for eager, deferred in twins(good) if deferred[SENT]}
    best = max(saved, key=lambda name: saved[name][0] / saved[name][1], default=None)
    if best is not None and saved[best][0] > saved[best][1]:
        before, after = saved[best]
        family = str(best).replace("-eager", "")
        return f"{where}, deferring the sync cuts what {family} sends from {size(before)} to {size(after)} per rank"
    least, most = good.iloc[0], good.iloc[-1]
    if least[SENT] == most[SENT]:
        return f"{where}, a rank sends {size(least[SENT])} per step"
    return f"{where}, {_times(good, SENT, 'send', 'bytes')}"
