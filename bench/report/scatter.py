"""Peak memory against step time: the largest N with a name at each point, the other N as small multiples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.plan.cell import Status
from bench.report import labels, sheet, style
from bench.report.figure_data import FACTS, MEMORY, TIMES, FigureData, apart, fastest, leanest, lost, twins
from bench.report.panels import CONTEXT, Drawing, Panel, paged, set_scale, title_lines
from bench.report.style import INTERVAL, safe
from bench.words import unit_of

MOST_SMALL = 4
"""Small multiples; the CSV has all N."""
LARGE_HEIGHTS, SMALL_HEIGHT = (3.4, 5.0), 1.5
"""Inches of the two rows of panels; the higher of the first where names have no room in the other."""
ROOM = 0.16
"""Of the axes, around the points: for names."""
LEAST = 1.1
"""The axes reach at least so many times farther than their middle, to either side."""


def draw_memory_vs_time(run: FigureData) -> list[Drawing]:
    """A figure for each precision and number of ranks; nothing of cells that have no time."""
    timed = run.others[[world.times_communication for world in run.others["world"]]]
    known = timed[timed["peak_memory_bytes"].notna() & timed["step_time_s"].notna()]
    every = known[[*FACTS, *TIMES, *MEMORY]]
    drawings = []
    for page in paged("memory_vs_time", run.panels(every, [*CONTEXT, "peak_memory_source"]), 1):
        (panel,) = page.panels
        words = run.words(_title(run, panel.rows), timed=True)
        words.notes[:0] = [*page.left_out, *_notes(run, panel), *lost(timed, "step_time_s")]
        low, high = LARGE_HEIGHTS
        figure, unnamed = _draw(run, panel, words, low)
        if unnamed:
            figure, unnamed = _draw(run, panel, words, high)
        drawings.append(Drawing(page.stem, figure, every, words))
    return drawings


def _title(run: FigureData, cells: pd.DataFrame) -> str:
    n = cells["accumulate"].max()
    good = cells[(cells["accumulate"] == n) & (cells["status"] == Status.OK)]
    if good.empty:
        return f"No backend is correct at N = {n}"
    if run.obstacle:
        return f"At N = {n}, {leanest(good)}"
    return f"At N = {n}, {fastest(good)}, {leanest(good)}"


def _notes(run: FigureData, panel: Panel) -> list[str]:
    said = [f"{panel.title}."] if panel.title else []
    said += ["Below and to the left is better."]
    if not run.obstacle:
        said += ["Lines are 95 % intervals of the time; arrows lead from eager to deferred sync where times differ."]
    return [" ".join(said)]


def _draw(run: FigureData, panel: Panel, words: sheet.FigureWords, large_height: float) -> tuple[Figure, list[str]]:
    """The figure, and the names that found no room in it."""
    cells = panel.rows
    *others, most = sorted({int(n) for n in cells["accumulate"]})
    others = others[-MOST_SMALL:]
    heights = [large_height, SMALL_HEIGHT] if others else [large_height]
    figure = sheet.sheet(words, [], sum(heights), sum(heights))
    rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    large = figure.add_subplot(rows[0])
    unit, name = unit_of(cells["peak_memory_bytes"].max())
    source = ", ".join(cells["peak_memory_source"].dropna().unique())
    own = cells[cells["accumulate"] == most]
    _points(run, large, own, unit, size=6.5)
    _reach(large, own, unit)
    large.set_title(title_lines(f"N = {most}", style.WIDTH), weight="bold")
    large.set_xlabel("step time (s)")
    large.set_ylabel(f"peak memory of a rank ({name},\n{safe(source)})")
    if others:
        small = rows[1].subgridspec(1, len(others)).subplots(sharex=True, sharey=True, squeeze=False)[0]
        for axes, n in zip(small, others, strict=True):
            _points(run, axes, cells[cells["accumulate"] == n], unit, size=4.0)
            _reach(axes, cells[cells["accumulate"].isin(others)], unit)
            axes.set_title(f"N = {n}")
            axes.set_xlabel("step time (s)")
        small[0].set_ylabel(name)
    figure.draw_without_rendering()
    return figure, _names(run, large, own, unit)


def _points(run: FigureData, axes: Axes, cells: pd.DataFrame, unit: float, size: float) -> None:
    """Intervals, arrows from eager to deferred where these are certain, and points: rings for what is wrong."""
    for cell in cells.to_dict("records"):
        look, (x, y) = run.look(cell["backend"]), _place(cell, unit)
        if not pd.isna(cell["step_time_low_s"]):
            ends = [cell["step_time_low_s"], cell["step_time_high_s"]]
            axes.plot(ends, [y, y], color=look.colour, linewidth=INTERVAL, zorder=2)
        style.mark(axes, [x], [y], look, wrong=cell["status"] != Status.OK, hollow=bool(run.obstacle), size=size)
    for eager, deferred in _arrows(run, cells):
        arrow = {"arrowstyle": "-|>", "color": run.look(eager["backend"]).colour, "shrinkA": 4, "shrinkB": 4}
        axes.annotate("", _place(deferred, unit), _place(eager, unit), arrowprops=arrow)


def _place(cell: Any, unit: float) -> tuple[float, float]:
    return float(cell["step_time_s"]), float(cell["peak_memory_bytes"]) / unit


def _arrows(run: FigureData, cells: pd.DataFrame) -> Iterator[tuple[Any, Any]]:
    """Rows of eager and deferred sync whose times certainly differ."""
    return (pair for pair in twins(cells) if apart(*pair) and not run.obstacle)


def _reach(axes: Axes, cells: pd.DataFrame, unit: float) -> None:
    """Scales and limits of both axes, with room for names; a small difference is not made to look like a large one."""
    times = pd.concat([cells[name] for name in TIMES]).dropna().astype(float)
    for which, values in (("x", times), ("y", cells["peak_memory_bytes"].astype(float) / unit)):
        set_scale(axes, which, values)
        low, high = float(values.min()), float(values.max())
        middle = (low * high) ** 0.5
        low, high = min(low, middle / LEAST), max(high, middle * LEAST)
        if getattr(axes, f"get_{which}scale")() == "log":
            room = (high / low) ** ROOM
            low, high = low / room, high * room
        else:
            low, high = low - ROOM * (high - low), high + ROOM * (high - low)
        getattr(axes, f"set_{which}lim")(low, high)


def _names(run: FigureData, axes: Axes, cells: pd.DataFrame, unit: float) -> list[str]:
    """Write the name of each backend beside its point, with what is wrong with it; returns those without room."""
    obstacles, wanted = labels.Obstacles(), []
    rows = cells.to_dict("records")
    for cell in rows:
        x, y = _place(cell, unit)
        word = f"{cell['backend']} ({cell['word']})" if cell["word"] else str(cell["backend"])
        wanted.append(labels.Label(x, y, style.fit(word, style.NAME_WIDTH), run.look(cell["backend"]).colour))
        obstacles.points.append((x, y, 7.0))
        if not pd.isna(cell["step_time_low_s"]):
            obstacles.lines.append(((cell["step_time_low_s"], y), (cell["step_time_high_s"], y)))
    for eager, deferred in _arrows(run, cells):
        obstacles.lines.append((_place(eager, unit), _place(deferred, unit)))
    placed = labels.place(axes, wanted, obstacles)
    labels.write(axes, placed)
    there = {label for label, _ in placed}
    return [label.text for label in wanted if label not in there]
