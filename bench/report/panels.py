"""What the figures of a run have in common: panels, titles, notes, cells and axes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from bench.plan.columns import WAYS, differing
from bench.report import style
from bench.report.sheet import FigureWords
from bench.report.style import safe

T = TypeVar("T")
CONTEXT = [*WAYS, "world_size", "world", "precision"]
"""Cells that differ in one of these are never in one panel."""
NOT_COMMUNICATION = "no bytes move between ranks: host overhead and memory policy, not communication"
ONE_GPU, ONE_PROCESS = f"one GPU, {NOT_COMMUNICATION}", f"one process, {NOT_COMMUNICATION}"
MOST_PAGES = 2
"""Figures of one kind: what a run of hundreds of cells has beyond these is in the tables and the CSV."""
TITLE_SIZE = 8.0
"""Of a panel's title in points."""
LOG_ABOVE = 5.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


@dataclass
class Drawing:
    """One figure before it is saved."""

    stem: str
    figure: Figure
    data: pd.DataFrame
    words: FigureWords


@dataclass
class Panel:
    """What shares one pair of axes."""

    title: str
    rows: pd.DataFrame


def of_one_process(trials: pd.DataFrame) -> str:
    """What has to be said of all figures of a run whose ranks are one, but for worlds without all ranks; or nothing."""
    real = trials[[world.has_all_ranks for world in trials["world"]]]
    if real.empty or not (real["world_size"] == 1).all():
        return ""
    return ONE_GPU if (real["device"] == "cuda").all() else ONE_PROCESS


def varying_columns(trials: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    """Those of these columns in which the trials differ."""
    rows = trials[list({*columns, "optimizer", "learning_rate"})].drop_duplicates()
    return differing(rows.itertuples(index=False), columns)


@dataclass
class Page:
    """The panels of one figure of several."""

    stem: str
    panels: list[Panel]
    left_out: list[str]
    """A sentence on the panels that no page has; none if there is nothing to be said."""


def paged(stem: str, items: list[Panel], size: int) -> Iterator[Page]:
    """Parts of at most this size, MOST_PAGES at most: of more panels those of the most ranks and the largest N.

    Where these would not hold half of the panels, there is one part alone.
    """
    most = MOST_PAGES if len(items) <= 2 * MOST_PAGES * size else 1
    shown = list(largest(items, most * size, _extent))
    every, drawn = (sum(panel.rows["cell_id"].nunique() for panel in some) for some in (items, shown))
    left_out = left_out_words(every, drawn, "cells")
    count = math.ceil(len(shown) / size)
    each = math.ceil(len(shown) / max(count, 1))
    for page in range(count):
        part = shown[page * each : (page + 1) * each]
        yield Page(stem if count == 1 else f"{stem}-{page + 1}", part, left_out)


def _extent(panel: Panel) -> tuple[int, int]:
    return int(panel.rows["world_size"].max()), int(panel.rows["accumulate"].max())


def largest(items: Sequence[T], most: int, extent: Callable[[T], tuple[int, int]]) -> Sequence[T]:
    """So many of the items, in their order: those of the most ranks and the largest N, which ``extent`` gives."""
    if len(items) <= most:
        return items
    chosen = sorted(range(len(items)), key=lambda place: extent(items[place]), reverse=True)[:most]
    return [items[place] for place in sorted(chosen)]


def left_out_words(every: int, shown: int, what: str) -> list[str]:
    """What a figure says of those for which it has no room; nothing if it has all."""
    if shown == every:
        return []
    return [
        f"{every - shown} of {every} {what} are left out of this picture, those with the fewest ranks and the smallest "
        "N; all are in the CSV beside it and in the report's tables."
    ]


def grid_shape(panels: list[Panel]) -> tuple[int, int]:
    """Columns and rows of a grid of panels, at most four columns for twelve."""
    columns = len(panels) if len(panels) <= 3 else math.ceil(math.sqrt(len(panels)))
    return columns, math.ceil(len(panels) / columns)


def panel_grid(figure: Figure, panels: Sequence[Panel], columns: int, beside: float = 0.9, **share: Any) -> list[Axes]:
    """One pair of axes per panel, row by row, none empty; the lowest of each column has the x axis's words.

    ``beside`` are the inches that the words at the left of all panels need.
    """
    rows = math.ceil(len(panels) / columns)
    axes = figure.subplots(rows, columns, squeeze=False, **share).ravel()
    for spare in axes[len(panels) :]:
        spare.remove()
    for i, panel in enumerate(panels):
        axes[i].set_title(title_lines(panel.title, (style.WIDTH - beside) / columns))
        if i + columns >= len(panels):
            axes[i].tick_params(labelbottom=True)
    return list(axes[: len(panels)])


def title_lines(title: str, room: float) -> str:
    """A panel's title, ready to be drawn, in as many lines as that many inches ask for."""
    width = style.text_width(title, TITLE_SIZE)
    lines = [title] if width <= room else textwrap.wrap(title, max(1, int(len(title) * room / width)))
    return "\n".join(safe(line) for line in lines)


def set_scale(axes: Axes, which: str, values: pd.Series) -> None:
    """Linear, or logarithmic with plain numbers where values differ much."""
    axis = getattr(axes, f"{which}axis")
    if len(values) and values.min() > 0 and values.max() / values.min() > LOG_ABOVE:
        getattr(axes, f"set_{which}scale")("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(5))
