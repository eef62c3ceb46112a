"""Peak memory against step time: the largest N with a name at each point, others as small multiples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.judge.statistics import Array
from bench.judge.tables import rows_of
from bench.plan.cell import Status
from bench.report import sheet, style
from bench.report.figure_data import (
    CONTEXT,
    FACTS,
    MEMORY,
    TIMES,
    FigureData,
    Panel,
    apart,
    failure,
    fastest,
    leanest,
    lost,
    twins,
)
from bench.report.sheet import Drawing, set_scale, title_lines
from bench.report.style import INTERVAL, TINY, safe
from bench.words import size, unit_of

MOST_SMALL = 4
"""Small multiples."""
LARGE_HEIGHTS, SMALL_HEIGHT = (3.4, 5.0), 1.5
"""Inches of the two rows of panels; the second of the first row where names have no room in the first."""
ROOM = 0.16
"""Share of the axes around the points that is left for names."""
LEAST = 1.1
"""The axes reach at least so many times farther than their middle, to either side."""


def draw_memory_vs_time(run: FigureData) -> list[Drawing]:
    """The cells of the largest N, most backends and most ranks, and smaller panels; nothing of cells without a time."""
    known = run.timed[run.timed["peak_memory_bytes"].notna() & run.timed["step_time_s"].notna()]
    every = known[[*FACTS, *TIMES, *MEMORY]]
    if every.empty:
        return []
    source = ["peak_memory_source"] if every["peak_memory_source"].nunique() > 1 else []
    panels, left_out = run.panels(every, ["accumulate", *CONTEXT, *source], 1 + MOST_SMALL)
    main = max(panels, key=lambda panel: (panel.extent[1], len(panel.rows), panel.extent[0]))
    if not main.title.startswith("N = "):
        main.title = ", ".join(filter(None, [f"N = {main.extent[1]}", main.title]))
    words = run.words(_title(run, main), timed=True)
    said = "Below and to the left is better."
    if not run.obstacle:
        said += " Lines are 95 % intervals of the time; arrows lead from eager to deferred sync where times differ."
    words.notes[:0] = [*left_out, said, *lost(run.timed, "step_time_s")]
    others = [panel for panel in panels if panel is not main]
    low, high = LARGE_HEIGHTS
    figure, unnamed = _draw(run, main, others, words, low)
    if unnamed:
        figure, unnamed = _draw(run, main, others, words, high)
    if unnamed:
        words.notes.append(f"No room to name {', '.join(unnamed)}.")
        figure, _ = _draw(run, main, others, words, high)
    return [Drawing("memory_vs_time", figure, every, words)]


def _title(run: FigureData, panel: Panel) -> str:
    good = panel.rows[panel.rows["status"] == Status.OK]
    if good.empty:
        return f"No backend is correct at {panel.title}"
    return ", ".join([f"At {panel.title}", *([] if run.obstacle else [fastest(good)]), leanest(good)])


def _draw(
    run: FigureData, main: Panel, others: list[Panel], words: sheet.FigureWords, height: float
) -> tuple[Figure, list[str]]:
    """The figure, and the backends whose names found no room in it, with their times and sizes."""
    heights = [height, SMALL_HEIGHT] if others else [height]
    figure = sheet.sheet(words, [], sum(heights), sum(heights))
    rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    large = figure.add_subplot(rows[0])
    unit, name = unit_of(max(panel.rows["peak_memory_bytes"].max() for panel in (main, *others)))
    source = ", ".join(main.rows["peak_memory_source"].dropna().unique())
    _points(run, large, main.rows, unit, marker=6.5)
    _reach(large, main.rows, unit)
    large.set_title(title_lines(main.title, style.WIDTH), weight="bold")
    large.set_xlabel("step time (s)")
    large.set_ylabel(f"peak memory of a rank ({name},\n{safe(source)})")
    if others:
        small = rows[1].subgridspec(1, len(others)).subplots(sharex=True, sharey=True, squeeze=False)[0]
        for axes, panel in zip(small, others, strict=True):
            _points(run, axes, panel.rows, unit, marker=4.0)
            axes.set_title(title_lines(panel.title, style.WIDTH / len(others) - 0.4))
            axes.set_xlabel("step time (s)")
        _reach(small[0], pd.concat([panel.rows for panel in others]), unit)
        small[0].set_ylabel(name)
    sheet.freeze(figure)
    unnamed = _names(run, large, main.rows, unit)
    return figure, [
        f"{row['backend']} ({row['step_time_s']:.3g} s, {size(row['peak_memory_bytes'])})" for row in unnamed
    ]


def _points(run: FigureData, axes: Axes, cells: pd.DataFrame, unit: float, marker: float) -> None:
    """Points with intervals, rings for what is wrong, and arrows from eager to deferred sync if their times differ."""
    for cell in rows_of(cells):
        look, (x, y) = run.look(cell["backend"]), _place(cell, unit)
        if not pd.isna(cell["step_time_low_s"]):
            ends = [cell["step_time_low_s"], cell["step_time_high_s"]]
            axes.plot(ends, [y, y], color=look.colour, linewidth=INTERVAL, zorder=2)
        style.mark(axes, [x], [y], look, wrong=cell["status"] != Status.OK, hollow=bool(run.obstacle), size=marker)
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


NUM_ORDERS = 4
"""In so many orders names are placed as long as not all have room."""
HEIGHT, MARKER = 9.0, 8.0
"""Points of a line of words, and of the side of a square around a marker."""
LEADER_FROM = 10
"""Points of distance from which a thin line leads from the words to their marker."""
TURNS = sorted(range(24), key=lambda turn: min(turn, 24 - turn))
"""Directions from a marker, those to the right first."""
SPOTS = np.array(
    [
        (radius * math.cos(math.pi * turn / 12), radius * math.sin(math.pi * turn / 12))
        for radius in range(7, 160, 3)
        for turn in TURNS
    ]
)
"""Where words may stand beside a marker, in points, the nearest first."""
LEADS = np.hypot(*SPOTS.T) >= LEADER_FROM
ANCHORS = np.select([SPOTS[:, 0] > 0.3 * np.hypot(*SPOTS.T), SPOTS[:, 0] < -0.3 * np.hypot(*SPOTS.T)], [0.0, 1.0], 0.5)
"""Where in the words their anchor is: 0 at their left end, 1 at their right end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Name:
    """The words at one point. Arrays have a row per spot of SPOTS."""

    words: str
    centre: Array
    boxes: Array
    is_free: NDArray[np.bool_]
    """Whether the words are within the axes, and on no marker, arrow or interval."""
    is_near: NDArray[np.bool_]
    """Whether they are not nearer to another point: those would be read as that one's without a line to their own."""
    others: Array
    """The markers that such a line must not cross."""


def _names(run: FigureData, axes: Axes, cells: pd.DataFrame, unit: float) -> list[dict[str, Any]]:
    """Write the name of each backend beside its point, with what is wrong with it, where no line and no other name is.

    Returns the rows of cells whose names found no room. Axes must be laid out, with their final limits. What is wrong
    chooses first, then the most crowded points. Where names find no room, all are placed again, and those choose first.
    """
    point = axes.figure.dpi / 72
    rows = rows_of(cells)
    centres = axes.transData.transform([_place(cell, unit) for cell in rows]) / point
    ends = [(_place(eager, unit), _place(deferred, unit)) for eager, deferred in _arrows(run, cells)]
    timed = [cell for cell in rows if not pd.isna(cell["step_time_low_s"])]
    ends += [tuple((cell[name], _place(cell, unit)[1]) for name in TIMES[1:]) for cell in timed]  # type: ignore[misc]
    lines = [_along(*(axes.transData.transform(line) / point)) for line in ends]
    taken = np.vstack([_squares(centres, MARKER), *lines])
    distances = np.linalg.norm(centres[:, None] - centres[None], axis=2)
    frame = np.array(axes.get_window_extent().extents) / point
    names = []
    for i, row in enumerate(rows):
        text = style.fit(
            " ".join([row["backend"], *([f"({word})"] if (word := failure(row["outcome"])) else [])]), style.NAME_WIDTH
        )
        boxes = _boxes(centres[i], style.text_width(text, TINY) * 72 + 1)
        inside = (boxes[:, :2] > frame[:2]).all(axis=1) & (boxes[:, 2:] < frame[2:]).all(axis=1)
        away = _distances(boxes, centres)
        names.append(
            _Name(
                words=text,
                centre=centres[i],
                boxes=boxes,
                is_free=np.asarray(inside & ~_overlap(boxes, taken).any(axis=1)),
                is_near=away[:, i] <= away.min(axis=1) + 0.5,
                others=_squares(centres[distances[i] > MARKER], MARKER),
            )
        )
    room = np.sort(distances, axis=1)[:, :3].sum(axis=1)
    order = sorted(range(len(rows)), key=lambda i: (not failure(rows[i]["outcome"]), room[i]))
    best: dict[int, int] = {}
    for _ in range(NUM_ORDERS):
        found = _spots(names, order)
        best = max(best, found, key=len)
        if len(best) == len(names):
            break
        order.sort(key=found.__contains__)
    for i, spot in best.items():
        _write(axes, names[i].words, _place(rows[i], unit), spot, run.look(rows[i]["backend"]).colour)
    return [row for i, row in enumerate(rows) if i not in best]


def _spots(names: Sequence[_Name], order: Sequence[int]) -> dict[int, int]:
    """The spot of each name that finds room, chosen in this order."""
    words = leaders = np.empty((0, 4))
    found = {}
    for name, i in ((names[i], i) for i in order):
        free = name.is_free & ~_overlap(name.boxes, np.vstack([words, leaders])).any(axis=1)
        crossed = np.vstack([words, leaders, name.others])
        for spot in [*np.flatnonzero(free & name.is_near), *np.flatnonzero(free & ~name.is_near & LEADS)]:
            leader = _along(name.centre, name.centre + SPOTS[spot], MARKER)[: None if LEADS[spot] else 0]
            if not _overlap(leader, crossed).any():
                words, leaders = np.vstack([words, name.boxes[spot]]), np.vstack([leaders, leader])
                found[i] = int(spot)
                break
    return found


def _write(axes: Axes, text: str, place: tuple[float, float], spot: int, colour: str) -> None:
    """Black words, since not every colour can be read, and a line in the colour of the marker."""
    anchor = float(ANCHORS[spot])
    line = {"arrowstyle": "-", "linewidth": 0.3, "color": colour, "shrinkA": 0, "shrinkB": 1, "relpos": (anchor, 0.5)}
    side = {0.0: "left", 0.5: "center", 1.0: "right"}[anchor]
    axes.annotate(
        safe(text),
        place,
        tuple(SPOTS[spot]),
        textcoords="offset points",
        size=TINY,
        ha=side,
        va="center_baseline",
        arrowprops=line if LEADS[spot] else None,
    )


# A box is left, bottom, right and top, in points; several are rows of an array.


def _boxes(centre: Array, width: float) -> Array:
    """The boxes of words of that width at each of SPOTS."""
    corners = SPOTS + centre - np.column_stack([ANCHORS * width, np.full(len(SPOTS), HEIGHT / 2)])
    return np.hstack([corners, corners + np.array([width, HEIGHT])])


def _squares(centres: Array, side: float) -> Array:
    return np.hstack([centres - side / 2, centres + side / 2])


def _along(tail: Array, head: Array, begin: float = 0.0) -> Array:
    """Small squares along a line, from so many points after its tail."""
    length = float(np.linalg.norm(head - tail))
    return _squares(tail + (np.arange(begin, length + 1, 2.5) / max(length, 1))[:, None] * (head - tail), 1.5)


def _overlap(boxes: Array, others: Array) -> NDArray[np.bool_]:
    """Whether each box has something in common with each of the others: a row per box, a column per other."""
    return np.asarray(
        ((boxes[:, None, :2] < others[None, :, 2:]) & (boxes[:, None, 2:] > others[None, :, :2])).all(axis=2)
    )


def _distances(boxes: Array, points: Array) -> Array:
    """The distance of each box from each point: a row per box, a column per point."""
    return np.asarray(
        np.linalg.norm(np.maximum(np.maximum(boxes[:, None, :2] - points, points - boxes[:, None, 2:]), 0.0), axis=2)
    )
