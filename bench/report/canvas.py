"""A figure with the words around its panels: its layout, the names of points, how it is saved."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from bench.files import replacing
from bench.report.style import (
    BASE,
    DPI,
    GREY,
    MARGIN,
    MAX_HEIGHT,
    TINY,
    WIDTH,
    Key,
    clean,
    cut,
    safe,
    wrap,
)

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
"""A value is beyond the axis if it is so many times the next smaller one; the axis ends at EDGE
times that one."""


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
    """A figure with its words and legend in place, and a free middle for the panels.

    ``panels`` is the height of these in inches. They shrink where the words need the room.
    """
    figure = Figure(figsize=(WIDTH, MAX_HEIGHT), dpi=DPI)
    FigureCanvasAgg(figure)
    notes: list[str] = []
    for note in words.notes:
        notes += wrap(note, FULL, TINY, indent="   ")
    if len(notes) > NOTE_LINES:
        notes[NOTE_LINES - 1 :] = ["... and more: see the report of the run"]
    above = [
        _text(figure, wrap(words.title, FULL, TITLE, "bold"), TITLE, weight="bold"),
        _text(figure, wrap(words.subtitle, FULL, SUBTITLE), SUBTITLE, color=GREY),
    ]
    below: list[Text | Legend] = []
    if keys:
        below.append(_legend(figure, keys))
    below.append(_text(figure, notes, TINY))
    below.append(_text(figure, wrap(words.footer, FULL, TINY), TINY, color=GREY))
    gaps = GAP * (1 + len(above) + len(below))
    taken = sum(map(_height, [*above, *below])) + 2 * MARGIN + gaps
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
    layout = ConstrainedLayoutEngine(rect=rect, w_pad=0.03, h_pad=0.03, wspace=0.02, hspace=0.02)
    figure.set_layout_engine(layout)
    return figure


def _text(
    figure: Figure,
    lines: Sequence[str],
    size: float,
    *,
    weight: str = "normal",
    color: str = "black",
) -> Text:
    return figure.text(
        0,
        0,
        "\n".join(map(safe, lines)),
        size=size,
        va="top",
        ha="left",
        linespacing=1.15,
        weight=weight,
        color=color,
    )


def _height(item: Artist) -> float:
    return float(item.get_window_extent().height / DPI)


def _legend(figure: Figure, keys: Sequence[Key]) -> Legend:
    """The legend in as many columns as there is room for, which matplotlib does not find itself."""
    handles, labels = [], []
    for handle, label in keys:
        handles.append(handle)
        text = safe(label)
        if label.startswith("_"):  # which would hide the entry
            text = f" {text}"
        labels.append(text)
    ncols = len(keys)
    while True:
        legend = Legend(
            figure,
            handles,
            labels,
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
            figure.legends.append(legend)
            return legend
        ncols -= 1


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Write a name beside each row of a figure, the first at the top."""
    axes.set_yticks(range(len(names)), [safe(cut(name)) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)


LOG = "log scale"
"""Behind the label of a logarithmic axis."""


def set_scale(axes: Axes, which: str, values: pd.Series, label: str) -> None:
    """Linear, or logarithmic with plain numbers where values differ much; the label says so."""
    axis = getattr(axes, f"{which}axis")
    axis.set_label_text(label)
    if len(values) and values.min() > 0 and values.max() / values.min() > LOG_ABOVE:
        getattr(axes, f"set_{which}scale")("log")
        axis.set_label_text(f"{label}, {LOG}")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(5))


def end_of_axis(values: pd.Series) -> float:
    """Where an axis ends: at the largest value, or before values that are far beyond the others.

    Then it ends at EDGE times the others.
    """
    ordered = sorted(values.dropna().astype(float))
    upper_half = ordered[len(ordered) // 2 :]
    for low, high in itertools.pairwise(upper_half):
        if 0 < FAR * low < high:
            return EDGE * low
    return ordered[-1]


@dataclass(frozen=True, slots=True)
class PointName:
    """The name to write beside a point."""

    text: str
    point: tuple[float, float]
    colour: str
    """Of the line from the name to its point."""

    @property
    def ink(self) -> str:
        """The colour of the name: its line's, but darker, since pale names are hard to read."""
        red, green, blue = to_rgb(self.colour)
        return to_hex((INK * red, INK * green, INK * blue))


DIAGONAL = ("northeast", "southeast", "northwest", "southwest", "north", "south")
"""Above or below a point: a line to a name at its side would run along its interval."""
NUM_ORDERS = 5
"""In so many orders names are placed while not all have room; in the last one names may touch."""
INK = 0.6
"""How bright the name of a point is, relative to its marker."""
MARKER = 3.6
"""Points from the middle of a marker to its edge, and a little more."""
LEADER = 0.4
"""Width of the line from a name to its point."""
APART = 0.003
"""Share of the axes that a name keeps from markers, lines and other names."""


def name_points(axes: Axes, names: Sequence[PointName], towards: Sequence[str]) -> list[PointName]:
    """Write names where no marker, line or other name is; those without room are returned.

    Longer names choose first, then those that found no room before. Layout, scales and limits must
    be final.
    """
    if not names:
        return []
    order = sorted(names, key=lambda name: -len(name.text))
    apart = APART
    attempt = 0
    while True:
        attempt += 1
        is_last = attempt == NUM_ORDERS
        if is_last:
            apart = 0.0
        written, leaders = _write_names(axes, order, towards, apart)
        missing = [name for name, text in zip(order, written, strict=True) if text is None]
        if not missing or is_last:
            return missing
        for artist in (*written, *leaders):
            if isinstance(artist, Artist):
                artist.remove()
        order.sort(key=lambda name: name not in missing)


def _write_names(
    axes: Axes, names: Sequence[PointName], towards: Sequence[str], apart: float
) -> tuple[list[object], list[object]]:
    """The texts of the names and the lines to their points; None for those without room.

    textalloc writes them one after another; distances are shares of the axes.
    """
    texts, colours, inks = [], [], []
    for name in names:
        texts.append(safe(name.text))
        colours.append(name.colour)
        inks.append(name.ink)
    x, y = np.array([name.point for name in names]).T
    lines = [points for points in map(_points_of, axes.lines) if len(points) > 1]
    *_, written, leaders = textalloc.allocate(
        axes,
        x,
        y,
        texts,
        x_scatter=x,
        y_scatter=y,
        scatter_sizes=list(np.full(len(names), MARKER * DPI / 72)),
        x_lines=[points[:, 0] for points in lines],
        y_lines=[points[:, 1] for points in lines],
        direction=list(towards),
        margin=apart,
        min_distance=0.01,
        max_distance=0.3,
        nbr_candidates=1500,
        draw_all=False,
        avoid_label_lines_overlap=True,
        avoid_crossing_label_lines=True,
        textsize=TINY,
        textcolor=inks,
        va="bottom",
        linecolor=colours,
        linewidth=LEADER,
        plot_kwargs={"zorder": 3},
    )
    return written, leaders


def _points_of(line: Line2D) -> NDArray[np.float64]:
    return np.asarray(line.get_xydata())


def freeze(figure: Figure) -> None:
    """Lay the figure out, for good; lines of a panel's title and label are as wide as the panel."""
    layout = figure.get_layout_engine()
    if layout is None:
        return
    layout.execute(figure)
    for axes in figure.axes:
        width = axes.get_window_extent().width / DPI
        for text in (axes.title, axes.xaxis.label):
            font = float(text.get_fontsize()), str(text.get_fontweight())
            text.set_text("\n".join(wrap(text.get_text(), width, *font)))
    layout.execute(figure)
    figure.set_layout_engine(None)
    for axes in figure.axes:  # the last bits of the solver's results differ from time to time
        edges = tuple(round(edge, 6) for edge in axes.get_position().bounds)
        axes.set_position(edges)


def save(figure: Figure, stem: Path, words: FigureWords, source: str = "") -> Path:
    """Write ``stem``.png, the same bytes every time, with its words and source as metadata.

    Returns the path.
    """
    path = stem.with_name(f"{stem.name}.png")
    about = {
        "Software": None,
        "Title": clean(words.title),
        "Description": clean(words.plain()),
        "Source": source,
    }
    with matplotlib.style.context(list(BASE)):
        freeze(figure)
        with replacing(path) as draft:
            figure.savefig(draft, format="png", dpi=DPI, metadata=about)
    return path
