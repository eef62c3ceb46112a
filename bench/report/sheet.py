"""A figure with its words and legends in place, so that no words collide; its panels, and how it is saved."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend_handler import HandlerTuple
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from bench.report.style import (
    DPI,
    GREY,
    MARGIN,
    MAX_HEIGHT,
    SMALL,
    TINY,
    WIDTH,
    Key,
    clean,
    fit,
    safe,
    text_width,
    wrap,
)

TITLE, SUBTITLE, PANEL_TITLE = 10.5, 7.4, 8.0
"""Font sizes in points."""
GAP, KEY_WIDTH = 0.07, 0.62
"""Inches between the blocks of words, and of a legend's entry beside its label."""
FULL = WIDTH - 2 * MARGIN
"""Inches of a line of words."""
BANNER_INK, BANNER_PAPER = "#9B1C1C", "#FDE8E8"
LOG_ABOVE = 5.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""


@dataclass
class FigureWords:
    """All words around the panels of one figure."""

    title: str
    subtitle: str
    footer: str
    notes: list[str] = field(default_factory=list)
    banner: str = ""
    """Why the figure must not be read as a comparison; empty if it may be."""

    def plain(self) -> str:
        """All but the title in one text, for readers who cannot see the picture."""
        return "\n".join(filter(None, [self.banner, self.subtitle, *self.notes, self.footer]))


@dataclass
class Drawing:
    """One figure before it is saved."""

    stem: str
    figure: Figure
    data: pd.DataFrame
    words: FigureWords


def sheet(words: FigureWords, legends: Sequence[Sequence[Key]], panels: float, least: float) -> Figure:
    """A figure with its words and legends in place and a free middle for the panels, of the height given in inches.

    Where the notes need the room the panels shrink to ``least``; then notes are cut, and the last line says how many.
    """
    figure = Figure(figsize=(WIDTH, MAX_HEIGHT), dpi=DPI)
    FigureCanvasAgg(figure)
    title = _text(figure, wrap(words.title, FULL, TITLE, "bold"), TITLE, weight="bold")
    subtitle = _text(figure, wrap(words.subtitle, FULL, SUBTITLE), SUBTITLE, color=GREY)
    boxed = {"facecolor": BANNER_PAPER, "edgecolor": "none", "boxstyle": "square,pad=0.25"}
    banner = _text(figure, wrap(words.banner, FULL - 0.1, SUBTITLE, "bold"), SUBTITLE, weight="bold",
                   color=BANNER_INK, **({"bbox": boxed} if words.banner else {}))  # fmt: skip
    footer = _text(figure, wrap(words.footer, FULL, TINY), TINY, color=GREY)
    drawn = [_legend(figure, keys) for keys in legends if keys]
    heights = [_height(item) for item in (title, subtitle, banner, footer, *drawn)]
    taken = sum(heights) + 2 * MARGIN + GAP * (len(heights) + 2)
    lines = [wrap(note, FULL, TINY, indent="   ") for note in words.notes]
    notes = _text(figure, _cut(lines, MAX_HEIGHT - taken - least), TINY)
    taken += _height(notes)
    height = taken + max(least, min(panels, MAX_HEIGHT - taken))
    figure.set_size_inches(WIDTH, height)

    top = height - MARGIN
    for item in filter(Text.get_text, (title, subtitle, banner)):
        item.set_position((MARGIN / WIDTH, top / height))
        top -= _height(item) + GAP
    bottom = MARGIN
    for below in (footer, notes, *reversed(drawn)):
        bottom += _height(below)
        anchor = (MARGIN / WIDTH, bottom / height)
        if isinstance(below, Text):
            below.set_position(anchor)
        else:
            below.set_bbox_to_anchor(anchor, transform=figure.transFigure)
        bottom += GAP
    rect = (MARGIN / WIDTH, bottom / height, FULL / WIDTH, (top - bottom) / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect, w_pad=0.03, h_pad=0.03, wspace=0.02, hspace=0.02))
    return figure


def _text(figure: Figure, lines: Sequence[str], size: float, **more: Any) -> Text:
    text = "\n".join(line.replace("$", r"\$") for line in lines)
    return figure.text(0, 0, text, size=size, va="top", ha="left", linespacing=1.15, **more)


def _height(item: Any) -> float:
    """In inches; nothing for an empty text."""
    if isinstance(item, Text) and not item.get_text():
        return 0.0
    return float(item.get_window_extent().height / item.get_figure().dpi)


def _cut(notes: list[list[str]], height: float) -> list[str]:
    """The lines of as many notes as fit into the height."""
    room = max(2, int(height / (TINY * 1.36 / 72)))
    if sum(map(len, notes)) <= room:
        return [line for note in notes for line in note]
    kept: list[str] = []
    for i, note in enumerate(notes):
        if len(kept) + len(note) > room - 1:
            return [*kept, f"... and {len(notes) - i} more notes: see the CSV beside this figure"]
        kept += note
    return kept


def _legend(figure: Figure, keys: Sequence[Key]) -> Any:
    labels = [fit(label, FULL - KEY_WIDTH) for _, label in keys]
    handles: list[Any] = [handle for handle, _ in keys]
    column = max(text_width(label, SMALL) for label in labels) + KEY_WIDTH
    return figure.legend(
        handles,
        # A leading underscore would hide the entry.
        [(" " if label.startswith("_") else "") + label.replace("$", r"\$") for label in labels],
        loc="upper left",
        ncols=max(1, min(len(keys), int(FULL / column))),
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=3.6,
        columnspacing=1.4,
        labelspacing=0.35,
        handler_map={tuple: HandlerTuple(ndivide=1)},
    )


def panel_grid(figure: Figure, titles: Sequence[str], columns: int, beside: float = 0.9, **share: Any) -> list[Axes]:
    """One pair of axes per title, row by row; the lowest of each column has the tick labels of the x axis.

    ``beside`` are the inches that the words at the left of all panels need.
    """
    axes = figure.subplots(math.ceil(len(titles) / columns), columns, squeeze=False, **share).ravel()
    for spare in axes[len(titles) :]:
        spare.remove()
    for i, title in enumerate(titles):
        axes[i].set_title(title_lines(title, (WIDTH - beside) / columns))
        if i + columns >= len(titles):
            axes[i].tick_params(labelbottom=True)
    return list(axes[: len(titles)])


def title_lines(title: str, room: float) -> str:
    """A panel's title, ready to be drawn, in as many lines as that many inches ask for."""
    width = text_width(title, PANEL_TITLE)
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


def freeze(figure: Figure) -> None:
    """Lay the figure out, once and for all: drawing it would lay it out again, once for each file."""
    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)
        figure.set_layout_engine(None)
        for axes in figure.axes:  # the last bits of the solver's results differ from time to time
            axes.set_position(tuple(round(edge, 6) for edge in axes.get_position().bounds))


def save(figure: Figure, stem: Path, words: FigureWords) -> list[Path]:
    """Write PNG and SVG, the same bytes every time; returns the paths."""
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    figure.set_dpi(DPI)
    freeze(figure)
    figure.savefig(png, dpi=DPI, metadata={"Software": None})
    about = {"Date": None, "Title": clean(words.title), "Description": clean(words.plain())}
    figure.savefig(svg, metadata=about)
    return [png, svg]
