"""Peak memory against step time, with arrows from eager to deferred sync."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from bench.report import style
from bench.report.against_n import memory_label, with_memory
from bench.report.panels import (
    CONTEXT,
    CSV_COLUMNS,
    Drawing,
    Run,
    grid_shape,
    paged,
    panel_grid,
    set_scale,
    title_lines,
    with_medians,
)
from bench.report.style import TINY


def draw_memory_vs_time(run: Run) -> list[Drawing]:
    """Memory against step time, with an arrow from each eager backend to its deferred twin."""
    values = ["step_time_s", "peak_memory_bytes"]
    trials, unit, name = with_memory(run, "step_time_s")
    by = [*CONTEXT, "peak_memory_source", "accumulate"]
    drawings = []
    for stem, panels in paged("memory_vs_time", run.panels(trials, by, values), 12):
        columns, lines = grid_shape(panels)
        shown = run.shown(panels, reference=True)
        keys = [style.backend_key(b, run.looks[b], line=False, label=f"{i}  {b}") for i, b in enumerate(shown, start=1)]
        words = run.words("Peak memory against step time, arrows from eager to deferred sync")
        height = 3.6 if lines == 1 else 2.1 * lines + 0.5
        figure = style.sheet(words, [keys, run.signs(trials)], height, 1.5 * lines + 0.4)
        numbered: list[tuple[Axes, list[tuple[float, float, int]], list[Any]]] = []
        grid = panel_grid(figure, panels, columns, sharex=True, sharey=True)
        for i, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
            both = pd.concat([panel.reference, panel.trials])
            cells = with_medians(both, values[0])
            cells = cells[cells[f"{values[1]}_cell_median"].notna()]
            x, y = (cells[f"{value}_cell_median"].astype(float) for value in values)
            y = y / unit
            twins = list(_twins(cells))
            for eager, deferred in twins:
                colour = run.looks[cells["backend"][eager]].colour
                arrow = {"arrowstyle": "-|>", "color": colour, "shrinkA": 3, "shrinkB": 3}
                axes.annotate("", (x[deferred], y[deferred]), (x[eager], y[eager]), arrowprops=arrow)
            for cell in cells.index:
                style.mark(axes, x[cell], y[cell], run.looks[cells["backend"][cell]], valid=cells["valid"][cell])
            points = [(x[c], y[c], shown.index(cells["backend"][c]) + 1) for c in cells.index]
            numbered.append((axes, points, [((x[a], y[a]), (x[b], y[b])) for a, b in twins]))
            lost = both["cell_id"].nunique() - len(cells)
            title = panel.title + f" ({lost} without numbers)" * bool(lost)
            axes.set_title(title_lines(title, (style.WIDTH - 0.9) / columns))
            set_scale(axes, "x", trials["step_time_s"].dropna())
            set_scale(axes, "y", trials["peak_memory_bytes"].dropna() / unit)
            axes.margins(0.12)
            axes.set_ylabel(memory_label(trials, name) if i % columns == 0 else "")
            axes.set_xlabel("s per optimizer step" if i + columns >= len(panels) else "")
        figure.draw_without_rendering()
        for axes, points, arrows in numbered:
            _number(axes, points, arrows)
        medians = [f"{value}_cell_median" for value in values]
        data = trials[[*CSV_COLUMNS, "peak_memory_source", *values, *medians]]
        drawings.append(Drawing(stem, figure, data, words))
    return drawings


def _twins(cells: pd.DataFrame) -> Iterator[tuple[Any, Any]]:
    """Index of the eager and of the deferred cell of each framework and sharding; by name if there are several."""
    for _, alike in cells.groupby(["framework", "sharding"]):
        eager, deferred = (alike[alike["sync"] == sync] for sync in ("eager", "deferred"))
        for index, backend in eager["backend"].items():
            named = deferred[deferred["backend"] == str(backend).replace("eager", "deferred")]
            twins = named if len(named) else deferred if len(eager) == len(deferred) == 1 else named
            yield from ((index, twin) for twin in twins.index)


def _square(centre: Any, size: float) -> Bbox:
    return Bbox.from_bounds(centre[0] - size / 2, centre[1] - size / 2, size, size)


def _number(axes: Axes, points: list[tuple[float, float, int]], arrows: list[Any]) -> None:
    """The number of each point beside it, where no marker, no arrow and no other number is."""
    point = axes.figure.dpi / 72
    pixels = axes.transData.transform([(x, y) for x, y, _ in points])
    taken = [_square(pixel, 6 * point) for pixel in pixels]
    for tail, head in (axes.transData.transform(arrow) for arrow in arrows):
        taken += [_square(tail + (head - tail) * i / 20, 2 * point) for i in range(21)]
    frame = axes.get_window_extent()
    for (x, y, number), (left, base) in zip(points, pixels, strict=True):
        width, height = 4.3 * len(str(number)) * point, 7 * point
        for radius in range(7, 60, 3):
            spots = [(radius * math.cos(a * math.pi / 8), radius * math.sin(a * math.pi / 8)) for a in range(16)]
            corners = [(left + dx * point - width / 2, base + dy * point - height / 2) for dx, dy in spots]
            boxes = [Bbox.from_bounds(x0, y0, width, height) for x0, y0 in corners]
            free = [
                i for i, box in enumerate(boxes)
                if frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 and box.y1 < frame.y1
                and not any(box.overlaps(other) for other in taken)
            ]  # fmt: skip
            if free:
                taken.append(boxes[free[0]])
                leader = {"arrowstyle": "-", "linewidth": 0.3, "shrinkA": 0, "shrinkB": 1} if radius >= 10 else None
                axes.annotate(str(number), (x, y), spots[free[0]], textcoords="offset points", size=TINY, ha="center",
                              va="center_baseline", arrowprops=leader)  # fmt: skip
                break
