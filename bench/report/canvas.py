"""A figure with the words around its panels: how it is laid out, how points are named, and how it is saved."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
import textalloc
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.legend_handler import HandlerTuple
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from bench.report.style import BASE, DPI, GREY, MARGIN, MAX_HEIGHT, TINY, WIDTH, Key, clean, cut, safe, wrap

TITLE, SUBTITLE = 10.5, 7.4
"""Font sizes in points."""
GAP = 0.07
"""Inches between the blocks of words."""
FULL = WIDTH - 2 * MARGIN
"""Inches of a line of words."""
NOTE_LINES = 12
"""Of all notes; further ones are cut."""
LOG_ABOVE = 5.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""
FAR, EDGE = 5, 1.1
"""A value is beyond the axis if it is so many times the next smaller one, from which the axis goes on so far."""


@dataclass
class FigureWords:
    """All words around the panels of one figure."""

    title: str
    subtitle: str
    footer: str
    notes: list[str] = field(default_factory=list)

    def plain(self) -> str:
        """All but the title in one text, for readers who cannot see the picture."""
        return "\n".join(filter(None, [self.subtitle, *self.notes, self.footer]))


@dataclass
class Drawing:
    """One figure before it is saved."""

    stem: str
    figure: Figure
    data: pd.DataFrame
    words: FigureWords


def new_figure(words: FigureWords, keys: Sequence[Key], panels: float) -> Figure:
    """A figure with its words and legend in place and a free middle for the panels, of the height given in inches.

    The panels shrink where the words need the room.
    """
    figure = Figure(figsize=(WIDTH, MAX_HEIGHT), dpi=DPI)
    FigureCanvasAgg(figure)
    notes = [line for note in words.notes for line in wrap(note, FULL, TINY, indent="   ")]
    if len(notes) > NOTE_LINES:
        notes[NOTE_LINES - 1 :] = ["... and more: see the report of the run"]
    above = [
        _text(figure, wrap(words.title, FULL, TITLE, "bold"), TITLE, weight="bold"),
        _text(figure, wrap(words.subtitle, FULL, SUBTITLE), SUBTITLE, color=GREY),
    ]
    below: list[Text | Legend] = [
        *([_legend(figure, keys)] if keys else []),
        _text(figure, notes, TINY),
        _text(figure, wrap(words.footer, FULL, TINY), TINY, color=GREY),
    ]
    taken = sum(map(_height, [*above, *below])) + 2 * MARGIN + GAP * (1 + len(above) + len(below))
    height = min(taken + panels, MAX_HEIGHT)
    figure.set_size_inches(WIDTH, height)

    top = height - MARGIN
    for item in filter(Text.get_text, above):
        item.set_position((MARGIN / WIDTH, top / height))
        top -= _height(item) + GAP
    bottom = MARGIN
    for block in reversed(below):
        bottom += _height(block)
        anchor = (MARGIN / WIDTH, bottom / height)
        if isinstance(block, Legend):
            block.set_bbox_to_anchor(anchor, transform=figure.transFigure)
        else:
            block.set_position(anchor)
        bottom += GAP
    rect = (MARGIN / WIDTH, bottom / height, FULL / WIDTH, (top - bottom) / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect, w_pad=0.03, h_pad=0.03, wspace=0.02, hspace=0.02))
    return figure


def _text(figure: Figure, lines: Sequence[str], size: float, *, weight: str = "normal", color: str = "black") -> Text:
    text = "\n".join(map(safe, lines))
    return figure.text(0, 0, text, size=size, va="top", ha="left", linespacing=1.15, weight=weight, color=color)


def _height(item: Artist) -> float:
    return float(item.get_window_extent().height / DPI)


def _legend(figure: Figure, keys: Sequence[Key]) -> Legend:
    """The legend in as many columns as there is room for, which matplotlib does not find by itself."""
    handles: list[Any] = [handle for handle, _ in keys]
    ncols = len(keys)
    while True:
        legend: Legend = figure.legend(
            handles,
            # A leading underscore would hide the entry.
            [(" " if label.startswith("_") else "") + safe(label) for _, label in keys],
            loc="upper left",
            ncols=ncols,
            frameon=False,
            borderpad=0,
            borderaxespad=0,
            handlelength=3.6,
            columnspacing=1.4,
            labelspacing=0.35,
            handler_map={tuple: HandlerTuple(ndivide=1)},
        )
        if ncols == 1 or legend.get_window_extent().width <= FULL * DPI:
            return legend
        legend.remove()
        ncols -= 1


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Write a name beside each row of a figure, the first at the top."""
    axes.set_yticks(range(len(names)), [safe(cut(name)) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)


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


def end_of_axis(values: pd.Series) -> float:
    """Where the axis ends if the largest values are far beyond the others: at EDGE times these; else the largest."""
    ordered = sorted(values.dropna().astype(float))
    far = [low for low, high in itertools.pairwise(ordered[len(ordered) // 2 :]) if high > FAR * low]
    return EDGE * far[0] if far else ordered[-1]


@dataclass(frozen=True, slots=True)
class PointName:
    """The name to write beside a point."""

    text: str
    point: tuple[float, float]
    colour: str
    """Of the line from the name to its point."""


DIAGONAL = ("northeast", "southeast", "northwest", "southwest", "north", "south")
"""Above or below a point: a line to a name at its side would run along its interval, through other points."""
NUM_ORDERS = 5
"""In so many orders names are placed as long as not all have room; in the last one names may touch."""
INK = 0.6
"""How bright the name of a point is, relative to its marker: pale names are hard to read."""
MARKER = 3.6
"""Points from the middle of a marker to its edge, and a little more."""
PLACING: dict[str, Any] = {
    "textsize": TINY,
    "va": "bottom",
    "linewidth": 0.4,
    "plot_kwargs": {"zorder": 3},
    "margin": 0.003,
    "min_distance": 0.01,
    "max_distance": 0.3,
    "nbr_candidates": 1500,
    "draw_all": False,
    "avoid_label_lines_overlap": True,
    "avoid_crossing_label_lines": True,
}
"""Options of textalloc; distances are shares of the axes."""


def name_points(axes: Axes, names: Sequence[PointName], towards: Sequence[str]) -> list[PointName]:
    """Write names where no marker, line or other name is; those for which there is no room are returned.

    Longer names choose first, then those that found no room before. Layout, scales and limits must be final.
    """
    lines = [line for line in (np.asarray(line.get_xydata()) for line in axes.lines) if len(line) > 1]
    fixed = PLACING | {
        "direction": list(towards),
        "x_scatter": [name.point[0] for name in names],
        "y_scatter": [name.point[1] for name in names],
        "scatter_sizes": np.full(len(names), MARKER * DPI / 72),
        "x_lines": [line[:, 0] for line in lines] or None,
        "y_lines": [line[:, 1] for line in lines] or None,
    }
    order, missing = sorted(names, key=lambda name: -len(name.text)), list(names)
    for attempt in range(NUM_ORDERS if names else 0):
        x, y = np.array([name.point for name in order]).T
        texts, colours = [safe(name.text) for name in order], [name.colour for name in order]
        inks = [to_hex((INK * r, INK * g, INK * b)) for r, g, b in map(to_rgb, colours)]
        if attempt == NUM_ORDERS - 1:
            fixed["margin"] = 0.0
        *_, written, leaders = textalloc.allocate(axes, x, y, texts, linecolor=colours, textcolor=inks, **fixed)
        missing = [name for name, text in zip(order, written, strict=True) if text is None]
        if not missing or attempt == NUM_ORDERS - 1:
            break
        artists: list[Any] = [*written, *leaders]
        for artist in filter(None, artists):
            artist.remove()
        order.sort(key=lambda name: name not in missing)
    return missing


def freeze(figure: Figure) -> None:
    """Lay the figure out, once and for all; lines of a panel's title and label are as wide as the panel."""
    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)
        for axes in figure.axes:
            width = axes.get_window_extent().width / DPI
            for text in (axes.title, axes.xaxis.label):
                font = float(text.get_fontsize()), str(text.get_fontweight())
                text.set_text("\n".join(wrap(text.get_text(), width, *font)))
        layout.execute(figure)
        figure.set_layout_engine(None)
        for axes in figure.axes:  # the last bits of the solver's results differ from time to time
            axes.set_position(tuple(round(edge, 6) for edge in axes.get_position().bounds))


def save(figure: Figure, stem: Path, words: FigureWords, source: str = "") -> Path:
    """Write a PNG, the same bytes every time, with its words and source as metadata; returns the path."""
    path = stem.with_suffix(".png")
    about = {"Software": None, "Title": clean(words.title), "Description": clean(words.plain()), "Source": source}
    with matplotlib.style.context(list(BASE)):
        freeze(figure)
        figure.savefig(path, dpi=DPI, metadata=about)
    return path
