"""Peak memory against step time, with arrows from eager to deferred sync."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.plan.cell import Status
from bench.report import labels, sheet, style
from bench.report.figure_data import LARGEST, SAID_OF_CELLS, FigureData, cells_with, interval_line
from bench.report.lines import memory_label, with_memory
from bench.report.panels import (
    CONTEXT,
    CSV_COLUMNS,
    Drawing,
    Page,
    Panel,
    grid_shape,
    paged,
    panel_grid,
    set_scale,
    title_lines,
)
from bench.report.style import INTERVAL

MOST_NAMED = 3
"""Panels that are stacked over the whole width, with the backends' names in them; more are a grid, with numbers."""
TIME, MEMORY = "step_time_s", "peak_memory_bytes"
NUMBER_REACH = 60.0
"""Points that a number is away from its point, at most."""
RAW = 2.2
"""Points of a trial's marker."""


@dataclass
class _Axis:
    """What all panels share."""

    run: FigureData
    trials: pd.DataFrame
    unit: float
    label: str
    shown: list[str]
    """Backends, in the order of their numbers."""


def draw_memory_vs_time(run: FigureData) -> list[Drawing]:
    """Memory against step time, with an arrow from each eager backend to its deferred twin."""
    trials, unit, name = with_memory(run, TIME)
    by = [*CONTEXT, "peak_memory_source", "accumulate"]
    said = [f"{value}_{end}" for value in (TIME, MEMORY) for end in ("cell", "low", "high")]
    data = trials[[*CSV_COLUMNS, "peak_memory_source", TIME, MEMORY, *(column for column in said if column in trials)]]
    drawings = []
    for page in paged("memory_vs_time", run.panels(trials, by, [TIME, MEMORY]), 12):
        shared = _Axis(run, trials, unit, memory_label(trials, name), run.shown(page.panels, reference=True))
        words = run.words("Peak memory against step time, arrows from eager to deferred sync")
        note = f"Small points are trials, large ones their cells (time: {SAID_OF_CELLS[TIME]}; memory: {LARGEST})."
        words.notes[:0] = [*page.left_out, note]
        figure = _named(shared, page, words) or _numbered(shared, page, words)
        drawings.append(Drawing(page.stem, figure, data, words))
    return drawings


def _named(shared: _Axis, page: Page, words: sheet.FigureWords) -> Figure | None:
    """Panels above each other, with a name at each point; None if one of the names does not fit."""
    count = len(page.panels)
    if count > MOST_NAMED:
        return None
    height = 3.6 if count == 1 else 2.0 * count + 0.4
    figure = sheet.sheet(words, [shared.run.signs(shared.trials)], height, 1.5 * count + 0.4)
    for axes, points, obstacles in _panels(figure, shared, page.panels, 1):
        names = [labels.Label(x, y, name, shared.run.looks[name].colour) for x, y, name in points]
        placed = labels.place(axes, names, obstacles)
        if len(placed) < len(names):
            return None
        labels.write(axes, placed)
    return figure


def _numbered(shared: _Axis, page: Page, words: sheet.FigureWords) -> Figure:
    """Panels in a grid, with a number at each point and the names in a legend."""
    columns, lines = grid_shape(page.panels)
    looks = shared.run.looks
    keys = [
        style.backend_key(backend, looks[backend], line=False, label=f"{number}  {backend}")
        for number, backend in enumerate(shared.shown, start=1)
    ]
    height = 3.6 if lines == 1 else 2.1 * lines + 0.5
    figure = sheet.sheet(words, [keys, shared.run.signs(shared.trials)], height, 1.5 * lines + 0.4)
    for axes, points, obstacles in _panels(figure, shared, page.panels, columns):
        numbers = [labels.Label(x, y, str(shared.shown.index(name) + 1)) for x, y, name in points]
        labels.write(axes, labels.place(axes, numbers, obstacles, NUMBER_REACH))
    return figure


def _panels(
    figure: Figure, shared: _Axis, panels: list[Panel], columns: int
) -> list[tuple[Axes, list[tuple[float, float, str]], labels.Obstacles]]:
    """Everything but the words beside the points; of each panel its axes, its points, and what is in their way."""
    found = []
    grid = panel_grid(figure, panels, columns, sharex=True, sharey=True)
    for i, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        both = pd.concat([panel.reference, panel.trials])
        cells = cells_with(both, TIME)
        cells = cells[cells[f"{MEMORY}_cell"].notna()]
        found.append((axes, *_points(axes, shared, both, cells)))
        lost = both["cell_id"].nunique() - len(cells)
        title = panel.title + f" ({lost} without numbers)" * bool(lost)
        axes.set_title(title_lines(title, (style.WIDTH - 0.9) / columns))
        set_scale(axes, "x", shared.trials[TIME].dropna())
        set_scale(axes, "y", shared.trials[MEMORY].dropna() / shared.unit)
        axes.margins(0.12)
        axes.set_ylabel(shared.label if i % columns == 0 else "")
        axes.set_xlabel("s per optimizer step" if i + columns >= len(panels) else "")
    figure.draw_without_rendering()
    return found


def _points(
    axes: Axes, shared: _Axis, both: pd.DataFrame, cells: pd.DataFrame
) -> tuple[list[tuple[float, float, str]], labels.Obstacles]:
    """Trials, intervals, arrows and cells of one panel."""
    looks, obstacles = shared.run.looks, labels.Obstacles()
    x, y = cells[f"{TIME}_cell"].astype(float), cells[f"{MEMORY}_cell"].astype(float) / shared.unit
    # On a CPU memory is measured in one trial of a cell: the others are drawn at that height.
    heights = dict(zip(cells["cell_id"], y, strict=True))
    raw: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    columns = (both[name].tolist() for name in ("cell_id", "backend", "status", TIME, MEMORY))
    for cell_id, backend, status, seconds, size in zip(*columns, strict=True):
        if cell_id in heights and not pd.isna(seconds):
            height = heights[cell_id] if pd.isna(size) else size / shared.unit
            raw.setdefault((backend, status == Status.OK), []).append((seconds, height))
    for (backend, valid), points in raw.items():
        times, sizes = zip(*points, strict=True)
        style.mark(axes, times, sizes, looks[backend], valid=valid, size=RAW, alpha=0.6)
        obstacles.points += [(*point, 1.5 * RAW) for point in points]
    _, ends = interval_line(cells, TIME)
    for backend, height, low, high in zip(cells["backend"], y, ends[::3], ends[1::3], strict=True):
        if math.isfinite(low):
            axes.plot([low, high], [height, height], color=looks[backend].colour, linewidth=INTERVAL)
            obstacles.lines.append(((low, height), (high, height)))
    for eager, deferred in _twins(cells):
        colour = looks[cells["backend"][eager]].colour
        arrow = {"arrowstyle": "-|>", "color": colour, "shrinkA": 3, "shrinkB": 3}
        axes.annotate("", (x[deferred], y[deferred]), (x[eager], y[eager]), arrowprops=arrow)
        obstacles.lines.append(((x[eager], y[eager]), (x[deferred], y[deferred])))
    named = list(zip(x, y, cells["backend"].astype(str), strict=True))
    for (across, up, backend), valid in zip(named, cells["valid"], strict=True):
        style.mark(axes, across, up, looks[backend], valid=bool(valid))
        obstacles.points.append((across, up, 6.0))
    return named, obstacles


def _twins(cells: pd.DataFrame) -> Iterator[tuple[Any, Any]]:
    """Index of the eager and of the deferred cell of each framework and sharding; by name if there are several."""
    for _, alike in cells.groupby(["framework", "sharding"]):
        eager, deferred = (alike[alike["sync"] == sync] for sync in ("eager", "deferred"))
        for index, backend in eager["backend"].items():
            named = deferred[deferred["backend"] == str(backend).replace("eager", "deferred")]
            twins = named if len(named) else deferred if len(eager) == len(deferred) == 1 else named
            yield from ((index, twin) for twin in twins.index)
