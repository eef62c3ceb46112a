"""Sheets: a figure with its words and legends in place, on which no words collide, and how it is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend_handler import HandlerTuple
from matplotlib.text import Text

from bench.report.style import (
    DPI,
    GAP,
    GREY,
    KEY_WIDTH,
    MARGIN,
    MAX_HEIGHT,
    SMALL,
    SUBTITLE,
    TINY,
    TITLE,
    WIDTH,
    Key,
    Ruler,
    clean,
    fit,
)

BANNER_INK, BANNER_PAPER = "#9B1C1C", "#FDE8E8"


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


def sheet(words: FigureWords, legends: Sequence[Sequence[Key]], panels: float, least: float) -> Figure:
    """A figure with its words and legends in place and a free middle for the panels, of the height given in inches.

    Where the notes need the room the panels shrink to ``least``; then notes are cut, and the last line says how many.
    """
    figure = Figure(figsize=(WIDTH, MAX_HEIGHT))
    canvas = FigureCanvasAgg(figure)
    ruler = Ruler(canvas)
    full = WIDTH - 2 * MARGIN
    title = _text(figure, ruler.wrap(words.title, full, TITLE, "bold"), TITLE, weight="bold")
    subtitle = _text(figure, ruler.wrap(words.subtitle, full, SUBTITLE), SUBTITLE, color=GREY)
    boxed = {"facecolor": BANNER_PAPER, "edgecolor": "none", "boxstyle": "square,pad=0.25"}
    banner = _text(figure, ruler.wrap(words.banner, full - 0.1, SUBTITLE, "bold"), SUBTITLE, weight="bold",
                   color=BANNER_INK, **({"bbox": boxed} if words.banner else {}))  # fmt: skip
    footer = _text(figure, ruler.wrap(words.footer, full, TINY), TINY, color=GREY)
    drawn = [_legend(figure, ruler, keys) for keys in legends if keys]
    heights = [_height(item) for item in (title, subtitle, banner, footer, *drawn)]
    taken = sum(heights) + 2 * MARGIN + GAP * (len(heights) + 2)
    lines = [ruler.wrap(note, full, TINY, indent="   ") for note in words.notes]
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
    rect = (MARGIN / WIDTH, bottom / height, full / WIDTH, (top - bottom) / height)
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


def _legend(figure: Figure, ruler: Ruler, keys: Sequence[Key]) -> Any:
    labels = [fit(label, WIDTH - 2 * MARGIN - KEY_WIDTH) for _, label in keys]
    handles: list[Any] = [handle for handle, _ in keys]
    column = max(ruler.width(label, SMALL) for label in labels) + KEY_WIDTH
    return figure.legend(
        handles,
        # A leading underscore would hide the entry.
        [(" " if label.startswith("_") else "") + label.replace("$", r"\$") for label in labels],
        loc="upper left",
        ncols=max(1, min(len(keys), int((WIDTH - 2 * MARGIN) / column))),
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=3.6,
        columnspacing=1.4,
        labelspacing=0.35,
        handler_map={tuple: HandlerTuple(ndivide=1)},
    )


def save(figure: Figure, stem: Path, words: FigureWords) -> list[Path]:
    """Write PNG and SVG, the same bytes every time; returns the paths.

    The figure is laid out once, at the resolution of the PNG: each file by itself would lay it out twice.
    """
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    figure.set_dpi(DPI)
    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)
        figure.set_layout_engine(None)
        for axes in figure.axes:  # The solver's last bits differ from one time to the next.
            axes.set_position(tuple(round(edge, 6) for edge in axes.get_position().bounds))
    figure.savefig(png, dpi=DPI, metadata={"Software": None})
    about = {"Date": None, "Title": clean(words.title), "Description": clean(words.plain())}
    figure.savefig(svg, metadata=about)
    return [png, svg]
