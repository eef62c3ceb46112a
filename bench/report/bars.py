"""Stacked bars, a row per backend and a panel per N and W: memory by category, payload by collective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bench.formatting import alike, plural, size, some, unit_of
from bench.grouping import grouped
from bench.judge.formulas import wire_bytes
from bench.plan.categories import PEAK, Category
from bench.plan.cell import Cell, Status
from bench.report.canvas import Drawing, end_of_axis, name_rows, new_figure
from bench.report.descriptions import tied_backends, without_sync
from bench.report.figure_data import CONTEXT, FACTS, MEMORY, FigureData, Panel, failure_label, floats, sync_pairs
from bench.report.style import GREY, TINY, Key, safe

ROW, TITLE_AND_AXIS = 0.16, 0.34
"""Inches of a bar, and of the words above and below a panel."""
NAMED = 0.005
"""Share of the axis that a part of some bar must have to be in the legend: less cannot be seen."""
SAME = 0.01
"""Relative difference below which two measurements of a peak are one."""
PANELS_HEIGHT = 3.5
"""Inches that all panels may take: half a page."""
LIVE, PEAK_BYTES = "live_bytes", "peak_memory_bytes"
"""Columns: the bytes of all categories at the peak, and the peak that is cited."""


def stacked(
    data: FigureData,
    stem: str,
    cells: pd.DataFrame,
    total: str,
    colours: Mapping[str, str],
    title: str,
    note: str,
    what: str,
) -> list[Drawing]:
    """A panel per N and W, with a bar per backend: ``total``, split into the columns with a colour that can be seen."""
    cells = cells[[*FACTS, total, *colours, *(MEMORY if total == LIVE else [])]]
    known = cells.groupby([*CONTEXT, "accumulate"], dropna=False)[total].transform("count") > 0
    cells = cells[known]
    if cells.empty:
        return []
    shown = data.backends_in(cells)
    height = ROW * len(shown) + TITLE_AND_AXIS
    panels, left_out = data.panels(cells, [*CONTEXT, "accumulate"], 3 * max(1, int(PANELS_HEIGHT / height)))
    panels = without_repeats(panels, ["backend", "outcome", total, *colours])
    lines = math.ceil(len(panels) / (2 if len(panels) == 4 else 3))
    columns = math.ceil(len(panels) / lines)
    words = data.figure_words(title)
    end = end_of_axis(cells[total])
    failed = ", and how the cell failed" * bool((cells["outcome"] != Status.OK).any())
    beyond = " An arrow: the bar goes on beyond the axis." * bool((cells[total] > end).any())
    styles = {part: _bar_style(part, colour) for part, colour in colours.items() if (cells[part] > end / 1e3).any()}
    join = "-" if total == SENT else " "
    named = [part for part in styles if (cells[part] > NAMED * end).any()]
    keys: list[Key] = [(Patch(**styles[part]), part.replace("_", join)) for part in named]
    thin = f" Parts without a key are below {100 * NAMED:g} % of the axis." * (len(named) < len(styles))
    words.notes[:0] = [*left_out, f"{note}{failed}.{beyond}{thin}"]
    figure = new_figure(words, keys, lines * height + 0.3)
    gaps = {"wspace": 0.05}  # between the last number of an axis and the first one of the next
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True, gridspec_kw=gaps).ravel()
    unit, unit_name = unit_of(end)
    for i, axes in enumerate(grid):
        if i >= len(panels):
            axes.remove()
            continue
        axes.set_title(safe(panels[i].title))
        _draw_bars(axes, panels[i], shown, total, styles, unit, end)
        if i + columns >= len(panels):
            axes.set_xlabel(f"{what} ({unit_name})")
            axes.tick_params(labelbottom=True)
    grid[0].set_xlim(0, end / unit or 1)
    return [Drawing(stem, figure, cells, words)]


def without_repeats(panels: Sequence[Panel], columns: list[str]) -> list[Panel]:
    """The panels, of which those with the same values in these columns are one, with all their titles."""
    alike = grouped((panel.rows[columns].sort_values("backend").to_csv(index=False), panel) for panel in panels)
    return [Panel("; ".join(panel.title for panel in same), same[0].rows) for same in alike.values()]


class BarStyle(TypedDict):
    """Arguments of matplotlib."""

    facecolor: str
    edgecolor: str | tuple[float, float, float]
    linewidth: float
    hatch: str


def _bar_style(part: str, colour: str) -> BarStyle:
    hatched = part.endswith("_unsharded")
    if not hatched:
        return BarStyle(facecolor=colour, edgecolor="white", linewidth=0.3, hatch="")
    red, green, blue = to_rgb(colour)
    edge = (0.55 * red, 0.55 * green, 0.55 * blue)
    return BarStyle(facecolor=colour, edgecolor=edge, linewidth=0.3, hatch="/////")


def _draw_bars(
    axes: Axes, panel: Panel, shown: list[str], total: str, styles: Mapping[str, BarStyle], unit: float, end: float
) -> None:
    name_rows(axes, shown)
    cells = pd.DataFrame({"backend": shown, "place": range(len(shown))}).merge(panel.rows, how="left")
    cells["outcome"] = cells["outcome"].fillna("not run")
    known = cells[cells[total].notna()]
    ends = np.zeros(len(known))
    for part, style in styles.items():
        widths = floats(known[part]) / unit
        axes.barh(known["place"], widths, 0.72, ends, **style)
        ends += widths
    for place, outcome, value in zip(cells["place"], cells["outcome"], floats(cells[total]) / unit, strict=True):
        word = failure_label(outcome)
        arrow = "\N{RIGHTWARDS ARROW} " if value > end / unit else ""
        number = f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")
        words = (word or "not measured") if np.isnan(value) else f"{arrow}{number} {word}".strip()
        at = (0.0 if np.isnan(value) else min(value, end / unit), place)
        axes.annotate(safe(words), at, (3, 0), textcoords="offset points", va="center", size=TINY, color=GREY)
    if total == LIVE:
        other = known[(known[PEAK_BYTES] - known[LIVE]).abs() > SAME * known[LIVE]]
        axes.plot(floats(other[PEAK_BYTES]) / unit, other["place"], "k|", markersize=9, markeredgewidth=1.4)
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _most_extreme(cells: pd.DataFrame, value: str) -> pd.DataFrame:
    """Good cells in the panel with the most ranks, then N, then good trials; sorted by the value, which all have."""
    good = cells[(cells["status"] == Status.OK) & cells[value].notna()]
    panels = good.groupby(CONTEXT, dropna=False)
    good = good.assign(trials=panels["num_ok"].transform("sum"), panel=-panels.ngroup())
    for extent in ("world_size", "accumulate", "trials", "panel"):
        good = good[good[extent] == good[extent].max()]
    return good.sort_values(value, kind="stable")


UNSPLIT = "not_split"
"""Column: the peak of a cell whose categories were not measured."""
CATEGORY_COLOURS = {
    str(Category.PARAMETERS_SHARDED): "#0072B2",
    str(Category.PARAMETERS_UNSHARDED): "#8CC6E8",
    str(Category.GRADIENTS_SHARDED): "#B34700",
    str(Category.GRADIENTS_UNSHARDED): "#F2A65A",
    str(Category.OPTIMIZER_STATE): "#009E73",
    str(Category.COMMUNICATION): "#CC79A7",
    str(Category.ACTIVATIONS): "#F0E442",
    str(Category.TEMPORARIES): "#BBBBBB",
    str(Category.OTHER): "#555555",
    UNSPLIT: "#DDDDDD",
}
"""Okabe and Ito's hues; unsharded parameters and gradients are paler than sharded ones, and hatched."""


def by_category(memory: pd.DataFrame) -> pd.DataFrame:
    """Bytes at the peak: a row per cell_id, a column per category; only cells that have all of them.

    ``memory`` is the table of that name, whose categories are ``peak_activations`` and the like, with or without
    ``tracked_`` before it. The largest of several repeats counts.
    """
    rows = memory.assign(category=memory["category"].str.removeprefix("tracked_"))
    wide = rows.pivot_table(index="cell_id", columns="category", values="bytes", aggfunc="max", observed=True)
    names = {f"{PEAK}_{category}": str(category) for category in Category}
    return wide.reindex(columns=list(names)).rename(columns=names).dropna().astype("Int64")


def draw_memory_categories(data: FigureData) -> list[Drawing]:
    """A stacked bar per backend, a panel per N and W: what lives at the peak, on the rank that has most.

    A peak that was not split is one bar. A black mark is the allocator's peak, if that differs.
    """
    cells = data.contestants.join(by_category(data.tables.memory))
    names = [str(category) for category in Category]
    cells[LIVE] = cells[names].sum(axis=1, min_count=1)
    cells[UNSPLIT] = cells["peak_memory_bytes"].where(cells[LIVE].isna())
    cells[LIVE] = cells[LIVE].fillna(cells["peak_memory_bytes"])
    if cells[LIVE].isna().all():
        return []
    parts = [*names, UNSPLIT]
    cells[parts] = cells[parts].astype("Float64").fillna(0.0)
    note = (
        "What is live at the peak of a window after warm-up, on the rank with the largest peak; each storage is in one "
        "category. Right of a bar: the peak"
    )
    title = _memory_title(data, cells)
    return stacked(data, "memory_categories", cells, LIVE, CATEGORY_COLOURS, title, note, "peak memory per rank")


def _memory_title(data: FigureData, cells: pd.DataFrame) -> str:
    """Who needs the least and the most memory at the most ranks and the largest N, and where the difference lies."""
    good = _most_extreme(cells, LIVE)
    if good.empty:
        return "Peak memory (no cell is correct)"
    least, most = good.iloc[0], good.iloc[-1]
    setting = data.setting_of(least)
    if alike(float(most[LIVE]), float(least[LIVE])):
        alone = least["backend"] if len(good) == 1 else f"each of {plural(len(good), 'backend')}"
        return f"{setting}, {alone} needs {size(float(least[LIVE]))} per rank"
    away = {str(name): float(most[str(name)]) - float(least[str(name)]) for name in Category if not least[UNSPLIT]}
    return f"{setting}, {_comparison(good, LIVE, 'need', 'memory')}{_cause(away)}"


def _cause(away: Mapping[str, float]) -> str:
    """The category with more than half of what is more, or the two with most and their bytes."""
    words = {name: " ".join(name.split("_")[:: -1 if "sharded" in name else 1]) for name in away}
    more = sorted(((number, words[name]) for name, number in away.items() if number > 0), reverse=True)
    if more and 2 * more[0][0] > sum(number for number, _ in more):
        return f", mostly for {more[0][1]}"
    return ": " * bool(more) + " and ".join(f"{size(number)} more for {name}" for number, name in more[:2])


def _comparison(good: pd.DataFrame, value: str, verb: str, what: str) -> str:
    """How many times the least of cells in order the most is, and of which backends; those that tie are all named."""
    least, most = float(good[value].iloc[0]), float(good[value].iloc[-1])
    those = tied_backends(good, value, most)
    verb += "s" * (len(those) == 1)
    return f"{some(those)} {verb} {most / least:.1f}x the {what} of {some(tied_backends(good, value, least))}"


OTHER = "other"
TRAFFIC_COLOURS = {
    "all_reduce": "#0072B2",
    "reduce_scatter": "#009E73",
    "all_gather": "#E69F00",
    "broadcast": "#CC79A7",
    OTHER: "#888888",
}
"""Okabe and Ito's hues."""
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
    wide = wide.reindex(columns=list(TRAFFIC_COLOURS)).astype("Float64").fillna(0.0)
    return wide.assign(**{TOTAL: wide.sum(axis=1)})


def draw_traffic(data: FigureData) -> list[Drawing]:
    """A stacked bar per backend, a panel per N and W; nothing if no operation was counted."""
    parts = by_operation(data.tables.collectives, data.analysis.run.cells).rename(columns={TOTAL: SENT})
    if parts.empty or not float(parts[SENT].max()):
        return []
    cells = data.contestants.join(parts)
    note = (
        "Bytes that a ring algorithm sends for the collectives counted between two updates, computed from their "
        "payload (gloo uses other algorithms). Right of a bar: their sum"
    )
    cells = cells[cells["world_size"] > 1]
    title = _traffic_title(data, cells)
    return stacked(data, "communication", cells, SENT, TRAFFIC_COLOURS, title, note, "sent per rank and step")


def _traffic_title(data: FigureData, cells: pd.DataFrame) -> str:
    """What deferring the sync saves at the most ranks and the largest N, or who sends the least and the most."""
    good = _most_extreme(cells, SENT)
    if good.empty:
        return "Ring traffic of a rank (no cell is correct)"
    setting = data.setting_of(good.iloc[0])
    sent = dict(zip(good["cell_id"], floats(good[SENT]).tolist(), strict=True))
    pairs = [(eager, deferred) for eager, deferred in sync_pairs(good) if 0 < sent[deferred] < sent[eager]]
    if pairs:
        eager, deferred = max(pairs, key=lambda pair: sent[pair[0]] / sent[pair[1]])
        cut = f"from {size(sent[eager])} to {size(sent[deferred])} per rank"
        name = without_sync(data.analysis.rows[eager].backend)
        return f"{setting}, deferring the sync cuts the ring traffic of {name} {cut}"
    least, most = good.iloc[0], good.iloc[-1]
    if least[SENT] == most[SENT]:
        return f"{setting}, the ring traffic of a rank is {size(least[SENT])} per step"
    return f"{setting}, {_comparison(good, SENT, 'cause', 'ring traffic')}"
