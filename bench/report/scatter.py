"""Peak memory against step time, the largest N with a name at each point.

And trials around the means of their cells, in the order in which they ran, with the blocks in
which all were slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bench.formatting import plural, size, some, unit_of
from bench.judge.samples import block_effects
from bench.judge.tables import number_in, rows_of
from bench.judge.verdicts import DIFFERENT, scope_words
from bench.plan.cell import REFERENCES, Status, Sync
from bench.report import style
from bench.report.canvas import (
    DIAGONAL,
    Drawing,
    end_of_axis,
    freeze,
    name_points,
    name_rows,
    new_figure,
    set_scale,
)
from bench.report.descriptions import one_or_many, tied_backends
from bench.report.figure_data import (
    CONTEXT,
    FACTS,
    MEMORY,
    TIMES,
    FigureData,
    Panel,
    largest,
    left_out_note,
    rows_of_panels,
    sync_pairs,
)
from bench.report.style import GREY, INTERVAL, REFERENCE_COLOUR, Key, safe

MOST_SMALL, MOST_NAMED = 4, 2
"""Further panels; and so many have names, each in a row."""
LARGE_HEIGHT, NAMED_HEIGHT, SMALL_HEIGHT = 3.8, 2.8, 1.5
"""Inches of the first row of panels, of each other one with names, and of one without names."""
SHAPES = {Sync.DEFERRED: "triangles: deferred sync", Sync.EAGER: "open squares: eager sync"}
SHAPES |= {Sync.DEFERRED_ALL_REDUCE: "triangles that point down: deferred all-reduce"}
ROOM = 0.16
"""Share of the axes around the points that is left for names."""
LEAST = 1.1
"""The axes reach at least so many times farther than their middle, to either side."""
SHOWN = "shown_bytes"
"""Column: the peak, or the edge of the axis."""


def draw_memory_vs_time(data: FigureData) -> list[Drawing]:
    """The cells of the largest N, most backends and most ranks, and smaller panels of the others.

    Nothing if no times compare.
    """
    has_both = data.timed["peak_memory_bytes"].notna() & data.timed["step_time_s"].notna()
    known = data.timed[has_both]
    if known.empty or data.analysis.hides_times:
        return []
    peaks = known["peak_memory_bytes"].astype(float)
    edge = end_of_axis(peaks)
    every = known[[*FACTS, *TIMES, *MEMORY]].assign(**{SHOWN: peaks.clip(upper=edge)})
    split_by = ["accumulate", *CONTEXT]
    if every["peak_memory_source"].nunique() > 1:
        split_by.append("peak_memory_source")
    panels, left_out = data.panels(every, split_by, 1 + MOST_SMALL)
    main = max(panels, key=lambda panel: (panel.extent[1], len(panel.rows), panel.extent[0]))
    if "accumulate" not in data.varying(split_by):
        n = f"N = {main.extent[1]}"
        if main.title:
            n += f", {main.title}"
        main.title = n
    others = [panel for panel in panels if panel is not main]
    words = data.figure_words(_title(data, main), timed=True)
    legend = _legend(every, has_peak_beyond=bool((peaks > edge).any()))
    words.notes[:0] = [*left_out, legend, *data.without_time()]

    drawn = rows_of_panels(panels)
    unit, unit_name = unit_of(drawn[SHOWN].max())
    has_names = len(others) <= MOST_NAMED
    figure = new_figure(words, [], sum(_heights(len(others), has_names=has_names)))
    large, small = _add_panels(figure, len(others), has_names=has_names)
    _draw_points(data, large, main.rows, unit, marker=6.5)
    large.set_title(safe(main.title), weight="bold")
    named = [(large, main)]
    for axes, panel in zip(small, others, strict=True):
        _draw_points(data, axes, panel.rows, unit, marker=4.0)
        axes.set_title(safe(panel.title))
        if has_names:
            named.append((axes, panel))
    _set_scales(large, drawn, unit, unit_name)
    _label_small(small, large, unit_name, are_stacked=has_names)
    measured_by = ", ".join(main.rows["peak_memory_source"].dropna().unique())
    large.set_ylabel(f"{large.get_ylabel()},\n{safe(measured_by)}")
    freeze(figure)
    for axes, panel in named:
        _name_points(data, axes, panel, unit)
    return [Drawing("memory_vs_time", figure, every.drop(columns=SHOWN), words)]


def _legend(cells: pd.DataFrame, *, has_peak_beyond: bool) -> str:
    """What shapes, lines and arrows mean."""
    texts = ["Lower left is better"]
    for sync, shape in SHAPES.items():
        if (cells["sync"] == sync).any():
            texts.append(shape)
    legend = (
        f"{'; '.join(texts)}. Lines are 95 % intervals; arrows lead from eager to deferred where "
        "times differ by verdict."
    )
    if has_peak_beyond:
        legend += " An arrow at a name: the peak is beyond the axis."
    return legend


def _add_panels(figure: Figure, others: int, *, has_names: bool) -> tuple[Axes, list[Axes]]:
    """The large panel, and so many others with the same axes: each in a row if it has names."""
    heights = _heights(others, has_names=has_names)
    rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    large, small = figure.add_subplot(rows[0]), []
    if has_names:
        small = [figure.add_subplot(rows[1 + place]) for place in range(others)]
    elif others:
        grid = rows[1].subgridspec(1, others)
        small = [figure.add_subplot(grid[place]) for place in range(others)]
    for axes in small:
        axes.sharex(large)
        axes.sharey(large)
    return large, small


def _heights(others: int, *, has_names: bool) -> list[float]:
    """Inches of each row of panels."""
    if not others:
        return [LARGE_HEIGHT]
    if has_names:
        return [LARGE_HEIGHT, *[NAMED_HEIGHT] * others]
    return [LARGE_HEIGHT, SMALL_HEIGHT]


def _name_points(data: FigureData, axes: Axes, panel: Panel, unit: float) -> None:
    """Write the names of cells at their points, and say for how many there is no room."""
    names = []
    for point in _points(panel.rows, unit):
        beyond = ""
        if point.beyond:
            beyond = f": \N{UPWARDS ARROW} {point.beyond}"
        names.append(data.point_name(point.backend, point.outcome, point.at, beyond))
    missing = name_points(axes, names, DIAGONAL)
    if missing:
        missed = plural(len(missing), "point")
        told = [axes.get_xlabel(), f"no room to name {missed}: see the CSV"]
        axes.set_xlabel("; ".join(filter(None, told)))


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
        seconds = number_in(row, "step_time_s")
        peak, shown = number_in(row, "peak_memory_bytes"), number_in(row, SHOWN)
        if seconds is None or peak is None or shown is None:
            continue  # they were left out before
        low, high = number_in(row, "step_time_low_s"), number_in(row, "step_time_high_s")
        interval = None
        if low is not None and high is not None:
            interval = (low, high)
        beyond = ""
        if shown < peak:
            beyond = size(peak)
        point = DrawnCell(
            cell_id=str(row["cell_id"]),
            backend=str(row["backend"]),
            outcome=str(row["outcome"]),
            is_wrong=row["status"] != Status.OK,
            at=(seconds, shown / unit),
            interval=interval,
            beyond=beyond,
        )
        found.append(point)
    return found


def _title(data: FigureData, panel: Panel) -> str:
    good = panel.rows[panel.rows["status"] == Status.OK]
    if good.empty:
        return f"No backend is correct at {panel.title}"
    least = float(good["peak_memory_bytes"].min())
    names = tied_backends(good, "peak_memory_bytes", least)
    need = one_or_many(len(names), "needs", "need")
    lean = f"{some(names)} {need} the least memory ({size(least)})"
    return f"At {panel.title}, {_fastest(data, good)}; {lean}"


def _fastest(data: FigureData, cells: pd.DataFrame) -> str:
    """The backend with the shortest step time, and how many are not slower by their verdict."""
    ids = cells.sort_values("step_time_s", kind="stable")["cell_id"].tolist()
    best = data.analysis.rows[ids[0]]
    seconds = f"{best.step_time_s:.3g} s"
    scope = scope_words(len(data.analysis.pool.runs))
    if len(ids) == 1:
        return f"{best.backend} takes {seconds} per step{scope}"
    others = len(data.analysis.not_slower(ids, ids[0]))
    if not others:
        return f"{best.backend} is fastest ({seconds}){scope}"
    also = f"{others} others are not shown to be slower"
    if others == 1:
        also = "1 other is not shown to be slower"
    return f"{best.backend} has the shortest step time ({seconds}); {also}{scope}"


def _draw_points(
    data: FigureData,
    axes: Axes,
    cells: pd.DataFrame,
    unit: float,
    marker: float,
) -> None:
    """Points with intervals, rings for what is wrong.

    Arrows lead from eager to deferred sync if their times differ.
    """
    deferred_first = cells.sort_values("sync", kind="stable")
    points = _points(deferred_first, unit)
    for point in points:
        look, (x, y) = data.looks[point.backend], point.at
        if point.interval is not None:
            ends = point.interval
            axes.plot(ends, [y, y], color=look.colour, linewidth=INTERVAL, zorder=2)
        style.mark(axes, [x], [y], look, wrong=point.is_wrong, size=marker)
    by_id = {point.cell_id: point for point in points}
    for eager, deferred in _decided_sync_pairs(data, cells):
        colour = data.looks[by_id[eager].backend].colour
        tail, head = by_id[eager].at, by_id[deferred].at
        axes.plot(*zip(tail, head, strict=True), color=colour, zorder=1.9)
        arrow = {"arrowstyle": "-|>", "color": colour, "shrinkA": 4, "shrinkB": 4}
        axes.annotate("", head, tail, arrowprops=arrow)


def _decided_sync_pairs(data: FigureData, cells: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Ids of eager and deferred cells whose times differ by their verdict."""
    for how in (Sync.DEFERRED, Sync.DEFERRED_ALL_REDUCE):
        for eager, deferred in sync_pairs(cells, how):
            pair = data.analysis.compared(deferred, eager)
            if pair and pair.verdict in DIFFERENT:
                yield eager, deferred


def _set_scales(axes: Axes, cells: pd.DataFrame, unit: float, unit_name: str) -> None:
    """Scales and ends of both axes, with room for names; a small difference does not look large."""
    times = pd.concat([cells[name] for name in TIMES]).dropna().astype(float)
    for which, values, label in (
        ("x", times, "step time (s)"),
        ("y", cells[SHOWN] / unit, f"peak memory per rank ({unit_name})"),
    ):
        set_scale(axes, which, values, label)
        low, high = float(values.min()), float(values.max())
        middle = (low * high) ** 0.5
        low, high = min(low, middle / LEAST), max(high, middle * LEAST)
        if getattr(axes, f"get_{which}scale")() == "log":
            factor = (high / low) ** ROOM
            ends = (low / factor, high * factor)
        else:
            room = ROOM * (high - low)
            ends = (low - room, high + room)
        getattr(axes, f"set_{which}lim")(*ends)


def _label_small(small: Sequence[Axes], large: Axes, unit_name: str, *, are_stacked: bool) -> None:
    """Label the panels below: stacked ones at the left and the last below, others the other way."""
    for place, axes in enumerate(small):
        has_x = not are_stacked or place == len(small) - 1
        has_y = are_stacked or place == 0
        axes.tick_params(labelbottom=has_x, labelleft=has_y)
        if has_x:
            axes.set_xlabel(large.get_xlabel())
        if has_y:
            axes.set_ylabel(unit_name)


INSIDE, BEYOND = 0.98, 1.4
"""Share of the trials that are drawn at their true place, and how much farther the axis reaches."""
LEAST_PERCENT = 0.5
"""Per cent that the axis reaches to either side, at least."""
DEVIATION = "deviation_percent"
"""Column: how far a trial's step time is from the geometric mean of its cell."""
COLUMNS = ["run_id", "cell_id", "repeat", "backend", "accumulate", *CONTEXT]
COLUMNS += ["place", "step_time_s", DEVIATION]


def deviations(trials: pd.DataFrame) -> pd.DataFrame:
    """The good trials of cells with two or more, in the order in which they ran, with DEVIATION."""
    is_good = (trials["status"] == Status.OK) & trials["step_time_s"].notna()
    good = trials[is_good & ~trials["backend"].isin(REFERENCES)]
    logs = good["step_time_s"].astype(float).map(np.log)
    means = logs.groupby(good["cell_id"]).transform("mean")
    found = good.assign(**{DEVIATION: 100 * np.expm1(logs - means)})
    found = found[found.groupby("cell_id")["repeat"].transform("size") > 1]
    order = "repeat"
    if found["slot"].notna().all():
        order = "slot"
    found = found.sort_values([order], kind="stable")
    return found.assign(place=np.arange(1, len(found) + 1))


ALL_HEIGHT, STRIP = 2.0, 0.13
"""Inches of the panel with all trials, and of the row of one cell below it."""
MOST_STRIPS = 32
"""Cells with a row."""
SWING = 0.42
"""Share of a row that a dot at the end of the axis above is away from its middle."""


def draw_noise(data: FigureData) -> list[Drawing]:
    """A point per trial, and again in the row of its cell; nothing if no cell has two good ones."""
    timed = [world.times_communication for world in data.trials["world"]]
    trials = deviations(data.trials[timed])
    if trials.empty:
        return []
    away = trials[DEVIATION].abs()
    reach = max(LEAST_PERCENT, float(away.quantile(INSIDE))) * BEYOND
    title = f"Half of the trials are within {away.median():.2g} % of the mean of their cell"
    keys: list[Key] = []
    blocks = block_effects(data.trials)
    if blocks is not None:
        differ = "do not differ"
        if blocks[1].found:
            differ = "differ"
        title += f"; blocks {differ} significantly"
        line = Line2D([], [], color=REFERENCE_COLOUR, linewidth=1.4)
        keys.append((line, "mean of a block over all cells"))
    every = _strips(data, trials)
    strips = largest(every, MOST_STRIPS, lambda strip: strip.extent)
    words = data.figure_words(title, timed=True, of_first=True)
    words.notes[:0] = [
        *_noise_legend(away, reach),
        *left_out_note(len(every), len(strips), "rows of cells"),
    ]
    heights = [ALL_HEIGHT, STRIP * len(strips)]
    figure = new_figure(words, keys, sum(heights) + 0.5)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    for strip in every:
        _draw_trials(above, strip.rows, reach, data.looks[strip.rows["backend"].iloc[0]].colour)
    above.set_ylim(-1.06 * reach, 1.06 * reach)
    if blocks is not None:
        for block, effect in blocks[0].items():
            where = trials.loc[trials["repeat"] == block, "place"]
            if len(where):
                height, first, last = 100 * np.expm1(effect), where.min(), where.max()
                above.hlines(height, first, last, color=REFERENCE_COLOUR, linewidth=1.4)
    above.axhline(0, color=GREY, linewidth=0.5, zorder=1.2)
    above.set_ylabel("from the cell's mean (%)")
    name_rows(below, [strip.title for strip in strips])
    for row, strip in enumerate(strips):
        colour = data.looks[strip.rows["backend"].iloc[0]].colour
        slower = strip.rows[DEVIATION].astype(float).clip(-reach, reach) / reach
        below.axhline(row, color=GREY, linewidth=0.3, zorder=1.2)
        below.plot(strip.rows["place"], row - SWING * slower, "o", markersize=2.0, color=colour)
    below.set_xlabel("good trials, in the order in which they ran")
    below.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return [Drawing("noise", figure, trials[COLUMNS], words)]


def _noise_legend(away: pd.Series, reach: float) -> list[str]:
    """How to read the figure, and what is beyond the axis."""
    notes = [
        "A slope means drift, two clouds mean two modes. Means are geometric.",
        "Below, the same trials by cell: a dot above the line of its row was slower than the mean.",
    ]
    beyond = int((away > reach).sum())
    if beyond == 1:
        notes.append(f"The triangle is a trial beyond the axis ({away.max():.3g} %).")
    elif beyond:
        text = f"The triangles are {beyond} trials beyond the axis (up to {away.max():.3g} %)."
        notes.append(text)
    return notes


def _strips(data: FigureData, trials: pd.DataFrame) -> list[Panel]:
    """The trials of each cell, named by its backend and by what distinguishes its setting."""
    panels, _ = data.panels(trials, ["accumulate", *CONTEXT], len(trials))
    found = []
    for panel in panels:
        for backend in data.backends_in(panel.rows):
            rows = panel.rows[panel.rows["backend"] == backend]
            found.append(Panel(f"{backend} {panel.title}".strip(), rows))
    return found


def _draw_trials(axes: Axes, trials: pd.DataFrame, reach: float, colour: str) -> None:
    """Draw a point per trial; those beyond the axis's reach are triangles at its edge."""
    values = trials[DEVIATION].to_numpy(dtype=float)
    places = trials["place"].to_numpy(dtype=float)
    for marker, size_of_marker, chosen in (
        ("o", 2.4, abs(values) <= reach),
        ("^", 4.5, values > reach),
        ("v", 4.5, values < -reach),
    ):
        clipped = np.clip(values[chosen], -reach, reach)
        axes.plot(places[chosen], clipped, marker, markersize=size_of_marker, color=colour)
