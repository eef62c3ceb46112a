"""Peak memory against step time, the largest N with a name at each point; and trials around the means of their cells.

Trials stand in the order in which they ran, with the blocks in which all were slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bench.formatting import plural, size, some, unit_of
from bench.judge.samples import block_effects
from bench.judge.tables import number_in, rows_of
from bench.judge.verdicts import Verdict, scope_words
from bench.plan.cell import REFERENCES, Status, Sync
from bench.report import style
from bench.report.canvas import DIAGONAL, Drawing, PointName, end_of_axis, freeze, name_points, new_figure, set_scale
from bench.report.descriptions import tied_backends
from bench.report.figure_data import CONTEXT, FACTS, MEMORY, TIMES, FigureData, Panel, sync_pairs
from bench.report.style import GREY, INTERVAL, REFERENCE_COLOUR, Key, safe

MOST_SMALL, MOST_NAMED = 4, 2
"""Further panels; and so many have names, each in a row."""
LARGE_HEIGHT, NAMED_HEIGHT, SMALL_HEIGHT = 3.8, 2.8, 1.5
"""Inches of the first row of panels, of each other one with names, and of the one with all others without."""
SHAPES = {Sync.DEFERRED: "triangles: deferred sync", Sync.EAGER: "squares: eager sync"}
SHAPES |= {Sync.DEFERRED_ALL_REDUCE: "triangles that point down: deferred all-reduce"}
ROOM = 0.16
"""Share of the axes around the points that is left for names."""
LEAST = 1.1
"""The axes reach at least so many times farther than their middle, to either side."""
SHOWN = "shown_bytes"
"""Column: the peak, or the edge of the axis."""


def draw_memory_vs_time(data: FigureData) -> list[Drawing]:
    """The cells of the largest N, most backends and most ranks, and smaller panels; nothing if no times compare."""
    known = data.timed[data.timed["peak_memory_bytes"].notna() & data.timed["step_time_s"].notna()]
    if known.empty or data.analysis.hides_times:
        return []
    peaks = known["peak_memory_bytes"].astype(float)
    edge = end_of_axis(peaks)
    every = known[[*FACTS, *TIMES, *MEMORY]].assign(**{SHOWN: peaks.clip(upper=edge)})
    source = ["peak_memory_source"] if every["peak_memory_source"].nunique() > 1 else []
    split_by = ["accumulate", *CONTEXT, *source]
    panels, left_out = data.panels(every, split_by, 1 + MOST_SMALL)
    main = max(panels, key=lambda panel: (panel.extent[1], len(panel.rows), panel.extent[0]))
    if "accumulate" not in data.varying(split_by):
        main.title = ", ".join(filter(None, [f"N = {main.extent[1]}", main.title]))
    others = [panel for panel in panels if panel is not main]
    words = data.figure_words(_title(data, main), timed=True)
    shapes = (words for sync, words in SHAPES.items() if (every["sync"] == sync).any())
    beyond = " An arrow at a name: the peak is beyond the axis." * bool((peaks > edge).any())
    legend = (
        f"{'; '.join(['Lower left is better', *shapes])}. Lines are 95 % intervals; arrows lead from eager to deferred "
        f"where times differ by verdict.{beyond}"
    )
    words.notes[:0] = [*left_out, legend, *data.without_time()]

    shape = (len(others), 1) if len(others) <= MOST_NAMED else (1, len(others))
    heights = [LARGE_HEIGHT, *([NAMED_HEIGHT * shape[0] if shape[1] == 1 else SMALL_HEIGHT] if others else [])]
    figure = new_figure(words, [], sum(heights))
    rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    large = figure.add_subplot(rows[0])
    named = [(large, main)]
    unit, name = unit_of(max(panel.rows[SHOWN].max() for panel in panels))
    measured_by = ", ".join(main.rows["peak_memory_source"].dropna().unique())
    set_scales(large, main.rows, unit)
    _draw_points(data, large, main.rows, unit, marker=6.5)
    large.set_title(safe(main.title), weight="bold")
    large.set(xlabel="step time (s)", ylabel=f"peak memory per rank ({name},\n{safe(measured_by)})")
    if others:
        small = rows[1].subgridspec(*shape).subplots(sharex=True, sharey=True, squeeze=False).ravel()
        set_scales(small[0], pd.concat([panel.rows for panel in others]), unit)
        for axes, panel in zip(small, others, strict=True):
            _draw_points(data, axes, panel.rows, unit, marker=4.0)
            axes.set(title=safe(panel.title), xlabel="step time (s)", ylabel=name)
            axes.label_outer()
        named += zip(small, others, strict=True) if shape[1] == 1 else []
    freeze(figure)
    for axes, panel in named:
        if missing := name_points(axes, [_point_name(data, point) for point in _points(panel.rows, unit)], DIAGONAL):
            axes.set_xlabel(f"step time (s); no room to name {plural(len(missing), 'point')}: see the CSV")
    return [Drawing("memory_vs_time", figure, every.drop(columns=SHOWN), words)]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnCell:
    """A cell as it is drawn: its step time in seconds, and its peak in the unit of the axis."""

    cell_id: str
    backend: str
    outcome: str
    is_wrong: bool
    at: tuple[float, float]
    interval: tuple[float, float] | None
    beyond: str
    """The peak in words if it is beyond the axis."""


def _points(cells: pd.DataFrame, unit: float) -> list[DrawnCell]:
    found = []
    for row in rows_of(cells):
        seconds, peak, shown = (number_in(row, name) for name in ("step_time_s", "peak_memory_bytes", SHOWN))
        low, high = number_in(row, "step_time_low_s"), number_in(row, "step_time_high_s")
        if seconds is None or peak is None or shown is None:
            continue  # they were left out before
        point = DrawnCell(
            cell_id=str(row["cell_id"]),
            backend=str(row["backend"]),
            outcome=str(row["outcome"]),
            is_wrong=row["status"] != Status.OK,
            at=(seconds, shown / unit),
            interval=None if low is None or high is None else (low, high),
            beyond=size(peak) if shown < peak else "",
        )
        found.append(point)
    return found


def _point_name(data: FigureData, point: DrawnCell) -> PointName:
    beyond = f": \N{UPWARDS ARROW} {point.beyond}" if point.beyond else ""
    return data.point_name(point.backend, point.outcome, point.at, beyond)


def _title(data: FigureData, panel: Panel) -> str:
    good = panel.rows[panel.rows["status"] == Status.OK]
    if good.empty:
        return f"No backend is correct at {panel.title}"
    least = float(good["peak_memory_bytes"].min())
    names = tied_backends(good, "peak_memory_bytes", least)
    lean = f"{some(names)} {'needs' if len(names) == 1 else 'need'} the least memory ({size(least)})"
    return f"At {panel.title}, {_fastest(data, good)}; {lean}"


def _fastest(data: FigureData, cells: pd.DataFrame) -> str:
    """The backend with the shortest step time, and how many are not slower by their verdict."""
    ids = cells.sort_values("step_time_s", kind="stable")["cell_id"].tolist()
    best = data.analysis.rows[ids[0]]
    scope = scope_words(len(data.analysis.pool.runs))
    others, seconds = len(data.analysis.not_slower(ids, ids[0])), f"{best.step_time_s:.3g} s"
    if not others:
        return f"{best.backend} is fastest ({seconds}){scope}"
    also = f"{plural(others, 'other')} {'is' if others == 1 else 'are'} not shown to be slower"
    return f"{best.backend} has the shortest step time ({seconds}); {also}{scope}"


def _draw_points(data: FigureData, axes: Axes, cells: pd.DataFrame, unit: float, marker: float) -> None:
    """Points with intervals, rings for what is wrong, and arrows from eager to deferred sync if their times differ."""
    points = _points(cells.sort_values("sync", ascending=False, kind="stable"), unit)  # deferred before eager
    for point in points:
        look, (x, y) = data.looks[point.backend], point.at
        if point.interval is not None:
            axes.plot(point.interval, [y, y], color=look.colour, linewidth=INTERVAL, zorder=2)
        style.mark(axes, [x], [y], look, wrong=point.is_wrong, size=marker)
    by_id = {point.cell_id: point for point in points}
    for eager, deferred in _decided_sync_pairs(data, cells):
        colour = data.looks[by_id[eager].backend].colour
        tail, head = by_id[eager].at, by_id[deferred].at
        axes.plot(*zip(tail, head, strict=True), color=colour, zorder=1.9)
        axes.annotate("", head, tail, arrowprops={"arrowstyle": "-|>", "color": colour, "shrinkA": 4, "shrinkB": 4})


def _decided_sync_pairs(data: FigureData, cells: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Ids of eager and deferred cells whose times differ by their verdict."""
    ways = (Sync.DEFERRED, Sync.DEFERRED_ALL_REDUCE)
    for eager, deferred in (found for how in ways for found in sync_pairs(cells, how)):
        pair = data.analysis.compared(deferred, eager)
        if pair and pair.verdict in (Verdict.FASTER, Verdict.SLOWER):
            yield eager, deferred


def set_scales(axes: Axes, cells: pd.DataFrame, unit: float) -> None:
    """Scales of both axes, with room for names; a small difference is not made to look like a large one."""
    times = pd.concat([cells[name] for name in TIMES]).dropna().astype(float)
    limits = []
    for which, values in (("x", times), ("y", cells[SHOWN] / unit)):
        set_scale(axes, which, values)
        low, high = float(values.min()), float(values.max())
        middle = (low * high) ** 0.5
        limits.append((min(low, middle / LEAST), max(high, middle * LEAST)))
    axes.margins(ROOM)
    axes.update_datalim(list(zip(*limits, strict=True)))


INSIDE, BEYOND = 0.98, 1.4
"""Share of the trials that are drawn at their true place, and how much farther than these the axis reaches."""
LEAST_PERCENT = 0.5
"""Per cent that the axis reaches to either side, at least."""
DEVIATION = "deviation_percent"
"""Column: how far a trial's step time is from the geometric mean of its cell."""
COLUMNS = ["run_id", "cell_id", "repeat", "backend", "accumulate", *CONTEXT, "place", "step_time_s", DEVIATION]


def deviations(trials: pd.DataFrame) -> pd.DataFrame:
    """The good trials of cells with at least two, in the order in which they ran, with DEVIATION."""
    good = trials[(trials["status"] == Status.OK) & trials["step_time_s"].notna() & ~trials["backend"].isin(REFERENCES)]
    logs = good["step_time_s"].astype(float).map(np.log)
    found = good.assign(**{DEVIATION: 100 * np.expm1(logs - logs.groupby(good["cell_id"]).transform("mean"))})
    found = found[found.groupby("cell_id")["repeat"].transform("size") > 1]
    order = ["slot"] if found["slot"].notna().all() else ["repeat"]
    found = found.sort_values(order, kind="stable")
    return found.assign(place=np.arange(1, len(found) + 1))


def draw_noise(data: FigureData) -> list[Drawing]:
    """A point per trial; nothing if no cell has two good ones."""
    timed = [world.times_communication for world in data.trials["world"]]
    trials = deviations(data.trials[timed])
    if trials.empty:
        return []
    away = trials[DEVIATION].abs()
    reach = max(LEAST_PERCENT, float(away.quantile(INSIDE))) * BEYOND
    beyond = int((away > reach).sum())
    typical = f"Half of the trials are within {away.median():.2g} % of the mean of their cell"
    blocks = block_effects(data.trials)
    if blocks is not None:
        typical += f"; blocks {'differ' if blocks[1].found else 'do not differ'} significantly"
    words = data.figure_words(typical, timed=True)
    first = ["A slope means drift, two clouds mean two modes. Means are geometric."]
    if beyond:
        what = "triangle is a trial" if beyond == 1 else f"triangles are {beyond} trials"
        first.append(f"The {what} beyond the axis ({'up to ' * (beyond > 1)}{away.max():.3g} %).")
    words.notes[:0] = first
    keys: list[Key] = []
    if blocks is not None:
        keys.append((Line2D([], [], color=REFERENCE_COLOUR, linewidth=1.4), "mean of a block over all cells"))
    figure = new_figure(words, keys, 2.6)
    axes = figure.subplots()
    _draw_trials(axes, trials, reach)
    for block, effect in () if blocks is None else blocks[0].items():
        where = trials.loc[trials["repeat"] == block, "place"]
        if len(where):
            axes.hlines(100 * np.expm1(effect), where.min(), where.max(), color=REFERENCE_COLOUR, linewidth=1.4)
    axes.axhline(0, color=GREY, linewidth=0.5, zorder=1.2)
    axes.set(xlabel="good trials, in the order in which they ran", ylabel="from the cell's mean (%)")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return [Drawing("noise", figure, trials[COLUMNS], words)]


def _draw_trials(axes: Axes, trials: pd.DataFrame, reach: float) -> None:
    """Draw a point per trial; those beyond the axis's reach are triangles at its edge."""
    values, places = trials[DEVIATION].to_numpy(dtype=float), trials["place"].to_numpy(dtype=float)
    for marker, chosen in (("o", abs(values) <= reach), ("^", values > reach), ("v", values < -reach)):
        size = 2.4 if marker == "o" else 4.5
        clipped = np.clip(values[chosen], -reach, reach)
        axes.plot(places[chosen], clipped, marker, markersize=size, color=GREY)
    axes.set_ylim(-1.06 * reach, 1.06 * reach)
