"""Stacked bars, a row per backend, a panel per N and W: memory by category, bytes by operation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bench.formatting import alike, plural, size, some, unit_of
from bench.plan.categories import PEAK, Category
from bench.plan.cell import Status
from bench.report.canvas import Drawing, end_of_axis, name_rows, new_figure
from bench.report.descriptions import one_or_many, tied_backends, without_sync
from bench.report.figure_data import (
    CONTEXT,
    FACTS,
    MEMORY,
    FigureData,
    Panel,
    floats,
    outcome_label,
    sync_pairs,
)
from bench.report.style import GREY, TINY, Key, safe

ROW, TITLE_AND_AXIS = 0.16, 0.34
"""Inches of a bar, and of the words above and below a panel."""
NAMED = 0.005
"""Share of the axis that a part of some bar must have to be in the legend: less cannot be seen."""
SAME = 0.01
"""Relative difference below which two measurements of a peak are one."""
PANELS_HEIGHT = 3.5
"""Inches that all panels may take: half a page."""
MOST_COLUMNS = 3
"""Panels beside each other."""
BETWEEN_PANELS = 0.05
"""Of their width, between the last number of an axis and the first one of the next."""
LIVE, PEAK_BYTES = "live_bytes", "peak_memory_bytes"
"""Columns: the bytes of all categories at the peak, and the peak that is cited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedBars:
    """What the bars of a figure are made of, and the words for it."""

    stem: str
    total: str
    """Column of a bar's length in bytes."""
    colours: Mapping[str, str]
    """Of the parts, by their columns, from left to right."""
    beside: Sequence[str] = ()
    """Further columns of the figure's data."""
    note: str
    """What a bar is, up to the words on its end."""
    axis: str
    """What the axis shows."""
    join: str = " "
    """Between the words of a part in the legend."""


def stacked(data: FigureData, cells: pd.DataFrame, bars: StackedBars, title: str) -> list[Drawing]:
    """A panel per N and W, with a bar per backend, split into the parts that can be seen.

    Nothing if no cell has a total.
    """
    total = bars.total
    cells = cells[[*FACTS, total, *bars.colours, *bars.beside]]
    split_by = [*CONTEXT, "accumulate"]
    known = cells.groupby(split_by, dropna=False)[total].transform("count") > 0
    cells = cells[known]
    if cells.empty:
        return []
    shown = data.backends_in(cells)
    height = ROW * len(shown) + TITLE_AND_AXIS
    most_lines = max(1, int(PANELS_HEIGHT / height))
    panels, left_out = data.panels(cells, split_by, MOST_COLUMNS * most_lines)
    panels = without_repeats(panels, ["backend", "outcome", total, *bars.colours])
    lines, columns = _shape(len(panels))
    end = end_of_axis(cells[total])
    styles = _visible_parts(cells, bars.colours, end)
    named: list[str] = []
    keys: list[Key] = []
    for part, style in styles.items():
        if (cells[part] > NAMED * end).any():
            named.append(part)
            keys.append((Patch(**style), part.replace("_", bars.join)))
    note = _note(bars, cells, end)
    if len(named) < len(styles):
        note += f" Parts without a key are below {100 * NAMED:g} % of the axis."
    words = data.figure_words(title)
    words.notes[:0] = [*left_out, note]
    figure = new_figure(words, keys, lines * height + 0.3)
    grid = figure.subplots(
        lines,
        columns,
        squeeze=False,
        sharex=True,
        sharey=True,
        gridspec_kw={"wspace": BETWEEN_PANELS},
    ).ravel()
    unit, unit_name = unit_of(end)
    for place, panel in enumerate(panels):
        axes = grid[place]
        axes.set_title(safe(panel.title))
        _draw_bars(axes, panel, shown, total, styles, unit, end)
        has_none_below = place + columns >= len(panels)
        if has_none_below:
            axes.set_xlabel(f"{bars.axis} ({unit_name})")
            axes.tick_params(labelbottom=True)
    for axes in grid[len(panels) :]:
        axes.remove()
    limit = end / unit
    if limit == 0:  # every bar is empty
        limit = 1.0
    grid[0].set_xlim(0, limit)
    return [Drawing(bars.stem, figure, cells, words)]


def _shape(panels: int) -> tuple[int, int]:
    """Lines and columns of so many panels."""
    most = MOST_COLUMNS
    if panels == 4:
        most = 2
    lines = math.ceil(panels / most)
    return lines, math.ceil(panels / lines)


def _visible_parts(
    cells: pd.DataFrame,
    colours: Mapping[str, str],
    end: float,
) -> dict[str, BarStyle]:
    """The styles of the parts that some bar shows."""
    styles = {}
    for part, colour in colours.items():
        if (cells[part] > end / 1e3).any():
            styles[part] = _bar_style(part, colour)
    return styles


def _note(bars: StackedBars, cells: pd.DataFrame, end: float) -> str:
    """What a bar is, and what stands at its end."""
    note = bars.note
    if (cells["outcome"] != Status.OK).any():
        note += ", and how the cell failed"
    note += "."
    if (cells[bars.total] > end).any():
        note += " An arrow: the bar goes on beyond the axis."
    return note


def without_repeats(panels: Sequence[Panel], columns: list[str]) -> list[Panel]:
    """The panels; those with the same values in these columns are one, with all their titles."""
    alike: dict[str, list[Panel]] = {}
    for panel in panels:
        values = panel.rows[columns].sort_values("backend").to_csv(index=False)
        alike.setdefault(values, []).append(panel)
    found = []
    for same in alike.values():
        titles = [panel.title for panel in same]
        found.append(Panel("; ".join(titles), same[0].rows))
    return found


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
    axes: Axes,
    panel: Panel,
    shown: list[str],
    total: str,
    styles: Mapping[str, BarStyle],
    unit: float,
    end: float,
) -> None:
    name_rows(axes, shown)
    places = pd.DataFrame({"backend": shown, "place": range(len(shown))})
    cells = places.merge(panel.rows, how="left")
    cells["outcome"] = cells["outcome"].fillna("not run")
    known = cells[cells[total].notna()]
    ends = np.zeros(len(known))
    for part, style in styles.items():
        widths = floats(known[part]) / unit
        axes.barh(known["place"], widths, 0.72, ends, **style)
        ends += widths
    values = floats(cells[total]) / unit
    for place, outcome, value in zip(cells["place"], cells["outcome"], values, strict=True):
        text = _text_at_end(value, end / unit, outcome)
        at = 0.0
        if not np.isnan(value):
            at = min(value, end / unit)
        axes.annotate(
            safe(text),
            (at, place),
            (3, 0),
            textcoords="offset points",
            va="center",
            size=TINY,
            color=GREY,
        )
    if total == LIVE:
        other = known[(known[PEAK_BYTES] - known[LIVE]).abs() > SAME * known[LIVE]]
        marks = floats(other[PEAK_BYTES]) / unit
        axes.plot(marks, other["place"], "k|", markersize=9, markeredgewidth=1.4)
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _text_at_end(value: float, limit: float, outcome: str) -> str:
    """The length of a bar in the unit of the axis, whether it goes on, and how its cell failed."""
    if np.isnan(value):
        return outcome_label(outcome, good="not measured")
    number = f"{value:#.3g}".rstrip(".")
    if value >= 999.5:
        number = f"{value:,.0f}"
    elif 0 < value < 1e-4:
        number = f"{value:.1g}"
    if value > limit:
        number = f"\N{RIGHTWARDS ARROW} {number}"
    return f"{number} {outcome_label(outcome)}".strip()


def _most_extreme(data: FigureData, cells: pd.DataFrame, value: str) -> pd.DataFrame:
    """Good cells of the panel with the most ranks, then the largest N, then most good trials.

    They are sorted by the value, which all have.
    """
    good = cells[(cells["status"] == Status.OK) & cells[value].notna()]
    panels = good.groupby(data.splitting(CONTEXT), dropna=False)
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
"""Okabe and Ito's hues; unsharded parameters and gradients are paler than sharded, and hatched."""
MEMORY_BARS = StackedBars(
    stem="memory_categories",
    total=LIVE,
    colours=CATEGORY_COLOURS,
    beside=MEMORY,
    note=(
        "What is live at the peak of a window after warm-up, on the rank with the largest peak; "
        "each storage is in one category. Right of a bar: the peak"
    ),
    axis="peak memory per rank",
)


def by_category(memory: pd.DataFrame) -> pd.DataFrame:
    """Bytes at the peak: a row per cell_id, a column per category; only cells that have all.

    ``memory`` is the table of that name, whose categories are ``peak_activations`` and the like,
    with or without ``tracked_`` before it. The largest of several repeats counts.
    """
    rows = memory.assign(category=memory["category"].str.removeprefix("tracked_"))
    wide = rows.pivot_table(
        index="cell_id",
        columns="category",
        values="bytes",
        aggfunc="max",
        observed=True,
    )
    names = {f"{PEAK}_{category}": str(category) for category in Category}
    parts = wide.reindex(columns=list(names)).rename(columns=names)
    return parts.dropna().astype("Int64")


def draw_memory_categories(data: FigureData) -> list[Drawing]:
    """A stacked bar per backend, a panel per N and W: what lives at the peak, on the fullest rank.

    A peak that was not split is one bar. A black mark is the allocator's peak, if that differs. As
    in the table, a cell that is wrong has no peak.
    """
    cells = data.contestants.join(by_category(data.tables.memory))
    names = [str(category) for category in Category]
    cells[LIVE] = cells[names].sum(axis=1, min_count=1)
    cells[UNSPLIT] = cells[PEAK_BYTES].where(cells[LIVE].isna())
    cells[LIVE] = cells[LIVE].fillna(cells[PEAK_BYTES]).where(cells[PEAK_BYTES].notna())
    if cells[LIVE].isna().all():
        return []
    parts = [*names, UNSPLIT]
    cells[parts] = cells[parts].astype("Float64").fillna(0.0)
    return stacked(data, cells, MEMORY_BARS, _memory_title(data, cells))


def _memory_title(data: FigureData, cells: pd.DataFrame) -> str:
    """Who needs the least and the most memory at the most ranks and the largest N, and for what.

    Cells beyond the axis are named apart: how many times the others' peak theirs is says nothing
    of a larger model.
    """
    good = _most_extreme(data, cells, LIVE)
    if good.empty:
        return "Peak memory (no cell is correct)"
    is_within = good[LIVE] <= end_of_axis(cells[LIVE])
    if not is_within.any():
        is_within[:] = True
    beyond = good[~is_within]["backend"].tolist()
    good = good[is_within]
    least, most = good.iloc[0], good.iloc[-1]
    setting = data.setting_of(least)
    if alike(float(most[LIVE]), float(least[LIVE])):
        each = least["backend"]
        if len(good) > 1:
            each = f"each of {plural(len(good), 'backend')}"
        return f"{setting}, {each} needs {size(float(least[LIVE]))} per rank{_beyond(beyond)}"
    compared = _comparison(good, LIVE, "need", "memory")
    return f"{setting}, {compared}{_common_cause(good)}{_beyond(beyond)}"


def _common_cause(good: pd.DataFrame) -> str:
    """What the cells that tie for the most have more of than those that tie for the least.

    Empty if that is not the same for all of them.
    """
    causes: set[str] = set()
    for _, least in _tied(good, 0).iterrows():
        for _, most in _tied(good, -1).iterrows():
            away = {}
            if not least[UNSPLIT]:
                for name in map(str, Category):
                    away[name] = float(most[name]) - float(least[name])
            causes.add(_cause(away))
    if len(causes) > 1:
        return ""
    return causes.pop()


def _tied(good: pd.DataFrame, place: int) -> pd.DataFrame:
    """The cells that need as much memory as the one in this place."""
    names = tied_backends(good, LIVE, float(good[LIVE].iloc[place]))
    return good[good["backend"].isin(names)]


def _beyond(names: Sequence[str]) -> str:
    """The backends whose bars go on beyond the axis."""
    if not names:
        return ""
    return f"; {some(names)} {one_or_many(len(names), 'is', 'are')} beyond the axis"


def _cause(away: Mapping[str, float]) -> str:
    """The category with more than half of what is more, or the two with most and their bytes."""
    total = 0.0
    more = []
    for name, number in away.items():
        if number > 0:
            total += number
            more.append((number, _spoken(name)))
    if not more:
        return ""
    more.sort(reverse=True)
    most, name_of_most = more[0]
    if 2 * most > total:
        return f", mostly for {name_of_most}"
    texts = [f"{size(number)} more for {name}" for number, name in more[:2]]
    return f": {' and '.join(texts)}"


def _spoken(category: str) -> str:
    """A category within a sentence: ``sharded parameters``."""
    words = category.split("_")
    if "sharded" in category:
        words.reverse()
    return " ".join(words)


def _comparison(good: pd.DataFrame, value: str, verb: str, what: str) -> str:
    """How many times the least of cells in order the most is, and of which backends.

    Those that tie are all named.
    """
    least, most = float(good[value].iloc[0]), float(good[value].iloc[-1])
    highest, lowest = tied_backends(good, value, most), tied_backends(good, value, least)
    if len(highest) == 1:
        verb += "s"
    if least == 0:
        return f"{some(highest)} {verb} the most {what}"
    times = f"{most / least:.1f}"
    if times == "1.0":
        times = f"{most / least:.3f}"
    return f"{some(highest)} {verb} {times}x the {what} of {some(lowest)}"


OTHER = "other"
TRAFFIC_COLOURS = {
    "all_reduce": "#0072B2",
    "reduce_scatter": "#009E73",
    "all_gather": "#E69F00",
    "broadcast": "#CC79A7",
    OTHER: "#888888",
}
"""Okabe and Ito's hues."""
TOTAL = "payload_bytes"
TRAFFIC_BARS = StackedBars(
    stem="communication",
    total=TOTAL,
    colours=TRAFFIC_COLOURS,
    note=(
        "Payload of the collectives counted between two updates. What a link carries depends on "
        "the algorithm: in a ring, an all-reduce sends twice as much as an all-gather or a "
        "reduce-scatter of the same payload. Right of a bar: the sum"
    ),
    axis="payload per rank and step",
    join="-",
)
MIB = 2.0**20


def by_operation(collectives: pd.DataFrame) -> pd.DataFrame:
    """Payload bytes of a rank in one optimizer step: a row per cell_id, a column per operation.

    One more column, TOTAL, has their sum. ``collectives`` is the table of that name; the largest of
    several repeats counts.
    """
    known = collectives["op"].isin(list(TRAFFIC_COLOURS))
    rows = collectives.assign(op=collectives["op"].where(known, OTHER))
    each = rows.groupby(["cell_id", "repeat", "op"], observed=True)[TOTAL].sum().reset_index()
    wide = each.pivot_table(
        index="cell_id",
        columns="op",
        values=TOTAL,
        aggfunc="max",
        observed=True,
    )
    wide = wide.reindex(columns=list(TRAFFIC_COLOURS)).astype("Float64").fillna(0.0)
    return wide.assign(**{TOTAL: wide.sum(axis=1)})


def draw_traffic(data: FigureData) -> list[Drawing]:
    """A stacked bar per backend, a panel per N and W; nothing if no operation was counted."""
    handed = by_operation(data.tables.collectives)
    if handed.empty or not float(handed[TOTAL].max()):
        return []
    cells = data.contestants.join(handed)
    cells = cells[cells["world_size"] > 1]
    return stacked(data, cells, TRAFFIC_BARS, _traffic_title(data, cells))


def _traffic_title(data: FigureData, cells: pd.DataFrame) -> str:
    """What deferring the sync saves at the most ranks and the largest N, over all pairs.

    Without such a pair, who hands the least and the most to collectives. Bytes have no noise.
    """
    good = _most_extreme(data, cells, TOTAL)
    if good.empty:
        return "Payload of collectives (no cell is correct)"
    setting = data.setting_of(good.iloc[0])
    handed = dict(zip(good["cell_id"], floats(good[TOTAL]).tolist(), strict=True))
    pairs = []
    shares: dict[str, float] = {}
    for eager, deferred in sync_pairs(good):
        if handed[eager] <= 0:
            continue
        pairs.append((eager, deferred))
        if handed[deferred] < handed[eager]:
            shares[eager] = 100 * handed[deferred] / handed[eager]
    if shares:
        whose, where = "a rank", f" in {len(shares)} of {len(pairs)} pairs"
        if len(pairs) == 1:
            whose, where = without_sync(data.analysis.rows[pairs[0][0]].backend), ""
        ends = f"{min(shares.values()):.0f}", f"{max(shares.values()):.0f}"
        remain = ends[0]
        if len(set(ends)) > 1:
            remain = f"between {' and '.join(ends)}"
        saved = f"cuts what {whose} hands to collectives to {remain} %"
        return f"{setting}, deferring the sync {saved}{where}"
    least, most = good.iloc[0], good.iloc[-1]
    if least[TOTAL] == most[TOTAL]:
        return f"{setting}, a rank hands {size(float(least[TOTAL]))} per step to collectives"
    return f"{setting}, {_comparison(good, TOTAL, 'hand', 'bytes')} to collectives"
