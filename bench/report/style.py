"""How the plots look: one colour per framework, one marker per sync, and sheets on which no words collide."""

from __future__ import annotations

import colorsys
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.typing import LineStyleType

Fill = Literal["full", "left", "bottom", "right", "top"]

WIDTH, MAX_HEIGHT = 7.5, 9.0
"""Of a figure in inches: fits on A4 with margins."""
DPI = 150
TITLE, SUBTITLE, SMALL, TINY = 10.5, 7.4, 7.0, 6.5
"""Font sizes in points; the base is 8."""
MARGIN, GAP = 0.12, 0.07
"""Inches around the figure, and between its blocks."""
INTERVAL = 0.8
"""Points of a line that is an interval."""
KEY_WIDTH, NAME_WIDTH = 0.62, 2.8
"""Inches of a legend's entry beside its label, and of a name beside the rows of a figure; longer ones are cut."""
REFERENCE_COLOUR = "#000000"
GREY = "#555555"

FRAMEWORK_COLOURS = {
    "torch": REFERENCE_COLOUR,
    "torch DDP": "#0072B2",
    "FSDP2": "#D55E00",
    "DeepSpeed": "#009E73",
    "Lightning DDP": "#56B4E9",
    "Lightning FSDP2": "#E69F00",
    "Lightning DeepSpeed": "#882255",
    "Fabric FSDP2": "#CC79A7",
}
"""Okabe and Ito's palette, its yellow (too pale on paper) replaced by the wine of Paul Tol's muted one."""
FURTHER_COLOURS = ("#332288", "#999933", "#AA4499", "#44AA99", "#661100", "#6699CC", "#888888", "#AA4466")
"""Of Paul Tol's muted and safe palettes, for frameworks of users."""
SYNC_MARKERS = {"none": "o", "eager": "s", "deferred": "^"}
OTHER_MARKER = "D"
SHARDING_DASHES: dict[str, tuple[float, ...]] = {
    "none": (),
    "params": (8.0, 1.6),
    "grads": (3.6, 1.4),
    "optimizer": (1.0, 1.2),
}
SHARDING_FILLS: dict[str, Fill] = {"none": "full", "params": "full", "grads": "left", "optimizer": "bottom"}
FILLS: tuple[Fill, ...] = ("full", "left", "bottom", "right", "top")
TERMINAL_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SOLID_LENGTH, DOT, DOT_GAP = 14.0, 1.4, 1.4
"""Dashes of a solid line that needs to be told apart from another, and the dots that tell lines apart."""

RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.1,
    "svg.fonttype": "path",
    "svg.hashsalt": "bench",
}
"""On top of matplotlib's defaults. Glyphs are paths in SVG, so that no viewer's fonts can make words collide; the
words themselves are kept in its comments and metadata."""
BASE: tuple[str, dict[str, Any]] = ("default", RC)


@dataclass(frozen=True, slots=True)
class Look:
    """How one backend is drawn, in every figure."""

    colour: str
    marker: str
    line: LineStyleType
    fill: Fill


@dataclass
class Words:
    """All words around the panels of one figure."""

    title: str
    subtitle: str
    footer: str
    notes: list[str] = field(default_factory=list)

    def plain(self) -> str:
        """All but the title in one text, for readers who cannot see the picture."""
        return "\n".join([self.subtitle, *self.notes, self.footer])


Key = tuple[Artist | tuple[Artist, ...], str]
"""A legend's entry: what is drawn and its label."""


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def clean(text: object) -> str:
    """One line that the font can draw and XML can hold, whatever was in the text."""
    joined = " ".join(unicodedata.normalize("NFC", TERMINAL_COLOURS.sub("", str(text))).split())
    return "".join(c if ord(c) in _glyphs() else "?" for c in joined if c.isprintable())


def safe(text: object) -> str:
    """``clean``, with ``$`` escaped so that it is not read as mathematics."""
    return clean(text).replace("$", r"\$")


def colours(frameworks: Iterable[str]) -> dict[str, str]:
    """One colour per framework: fixed for the known ones, distinct and in order of name for others."""
    unknown = sorted(set(frameworks) - set(FRAMEWORK_COLOURS))
    golden = 0.618034
    further = list(FURTHER_COLOURS)
    for i in range(len(further), len(unknown)):
        red, green, blue = colorsys.hls_to_rgb(i * golden % 1, 0.35 + 0.15 * (i % 2), 0.6)
        further.append(f"#{round(red * 255):02X}{round(green * 255):02X}{round(blue * 255):02X}")
    return FRAMEWORK_COLOURS | dict(zip(unknown, further, strict=False))


def looks(trials: pd.DataFrame) -> dict[str, Look]:
    """The look of each backend, ordered by framework, sharding, sync and name.

    Backends of equal framework, sync and sharding differ by dots in the line and by the side of the marker filled.
    """
    known = list(FRAMEWORK_COLOURS)
    rows = trials[["framework", "sharding", "sync", "backend"]].astype(object).fillna("").drop_duplicates("backend")
    keys = sorted(
        (tuple(str(v) for v in row) for row in rows.itertuples(index=False)),
        key=lambda k: (known.index(k[0]) if k[0] in known else len(known), k),
    )
    colour = colours(key[0] for key in keys)
    used_lines: dict[tuple[str, str], int] = {}
    used_fills: dict[tuple[str, str], list[Fill]] = {}
    found: dict[str, Look] = {}
    for framework, sharding, sync, backend in keys:
        alike = used_lines.setdefault((framework, f"{sharding} {sync}"), 0)
        used_lines[framework, f"{sharding} {sync}"] += 1
        fills = used_fills.setdefault((framework, sync), [])
        wanted = SHARDING_FILLS.get(sharding, "full")
        free = [fill for fill in FILLS if fill not in fills]
        fills.append(wanted if wanted in free or not free else free[-1])
        marker = SYNC_MARKERS.get(sync, OTHER_MARKER)
        found[backend] = Look(colour[framework], marker, _line(sharding, alike), fills[-1])
    return found


def _line(sharding: str, alike: int) -> LineStyleType:
    dashes = SHARDING_DASHES.get(sharding, ())
    if not alike:
        return (0, dashes) if dashes else "-"
    return (0, (dashes or (SOLID_LENGTH, DOT_GAP)) + (DOT, DOT_GAP) * alike)


def marks(look: Look, valid: bool, size: float = 5.5) -> list[dict[str, Any]]:
    """Keyword arguments of ``plot`` for a marker: one layer, or hollow and a cross if its trial was not valid."""
    base: dict[str, Any] = {"color": look.colour, "linestyle": "none", "markersize": size, "markeredgewidth": 0.8}
    if valid:
        return [base | {"marker": look.marker, "fillstyle": look.fill, "markerfacecoloralt": "white"}]
    hollow = base | {"marker": look.marker, "markerfacecolor": "white"}
    return [hollow, base | {"marker": "x", "markersize": size * 1.35, "markeredgewidth": 0.9}]


def mark(axes: Axes, x: object, y: object, look: Look, *, valid: bool = True, size: float = 5.5, **more: Any) -> None:
    """Draw markers at points."""
    for layer in marks(look, valid, size):
        axes.plot(x, y, **layer, **more)  # type: ignore[arg-type]  # the stubs know no arrays of pandas


def backend_key(backend: str, look: Look, *, line: bool, label: str = "") -> Key:
    """The legend's entry of a backend."""
    style = marks(look, valid=True)[0] | {"linestyle": look.line if line else "none"}
    return Line2D([], [], **style), label or backend


def sync_keys(trials: pd.DataFrame, *, invalid: bool) -> list[Key]:
    """Entries that say what the markers mean: sync, and the cross of an invalid trial."""
    keys: list[Key] = []
    for sync, marker in SYNC_MARKERS.items():
        if (trials["sync"] == sync).any():
            keys.append((Line2D([], [], color=GREY, linestyle="none", marker=marker, markersize=5), f"sync: {sync}"))
    if invalid:
        look = Look(GREY, "s", "-", "full")
        keys.append((tuple(Line2D([], [], **layer) for layer in marks(look, valid=False)), "invalid: see the notes"))
    return keys


@lru_cache(maxsize=1 << 15)
def _width(text: str, size: float, weight: str, dpi: float) -> float:
    """Kept: the figures of a run have most of their words in common."""
    widths = []
    for finer in (1.0, DPI / dpi):
        font = FontProperties(family=RC["font.family"], size=size * finer, weight=weight)
        pixels = _renderer(dpi).get_text_width_height_descent(text, font, ismath=False)[0]
        widths.append(float(pixels / (dpi * finer)))
    return max(widths)


@cache
def _renderer(dpi: float) -> Any:
    return FigureCanvasAgg(Figure(figsize=(1, 1), dpi=dpi)).get_renderer()


class Ruler:
    """Measures text in inches, as the figure will draw it."""

    def __init__(self, canvas: FigureCanvasAgg) -> None:
        self.canvas: Any = canvas

    def width(self, text: str, size: float, weight: str = "normal") -> float:
        """The largest of those at the resolutions of the figure and of its file: glyphs are hinted at each."""
        return _width(text, size, weight, float(self.canvas.figure.dpi))

    def wrap(self, text: str, width: float, size: float, weight: str = "normal", indent: str = "") -> list[str]:
        """The lines of the text, none wider than the width; a word that is wider is cut."""
        lines = [""]
        for whole in clean(text).split():
            word = whole
            joined = f"{lines[-1]} {word}" if lines[-1].strip() else lines[-1] + word
            if self.width(joined, size, weight) <= width:
                lines[-1] = joined
                continue
            if lines[-1].strip():
                lines.append(indent)
            while self.width(lines[-1] + word, size, weight) > width and len(word) > 1:
                fits = max(i for i in range(1, len(word)) if i == 1 or self.width(indent + word[:i], size) <= width)
                lines[-1] += word[:fits]
                lines.append(indent)
                word = word[fits:]
            lines[-1] += word
        return lines


@cache
def _ruler() -> Ruler:
    return Ruler(FigureCanvasAgg(Figure(figsize=(1, 1))))


def text_width(text: str, size: float) -> float:
    """Width of a line of text in inches."""
    return _ruler().width(clean(text), size)


def fit(text: str, width: float, size: float = SMALL) -> str:
    """The text, cut in the middle if it is wider than so many inches."""
    whole = clean(text)
    left = len(whole)
    shown = whole
    while left > 2 and _ruler().width(shown, size) > width:
        left -= 1
        half = left // 2
        shown = f"{whole[: left - half]}…{whole[-half:]}"
    return shown


def sheet(words: Words, legends: Sequence[Sequence[Key]], panels: float, least: float) -> Figure:
    """A figure with its words and legends in place and a free middle for the panels, of the height given in inches.

    Where the notes need the room the panels shrink to ``least``; then notes are cut, and the last line says how many.
    """
    figure = Figure(figsize=(WIDTH, MAX_HEIGHT))
    canvas = FigureCanvasAgg(figure)
    ruler = Ruler(canvas)
    full = WIDTH - 2 * MARGIN
    title = _text(figure, ruler.wrap(words.title, full, TITLE, "bold"), TITLE, weight="bold")
    subtitle = _text(figure, ruler.wrap(words.subtitle, full, SUBTITLE), SUBTITLE, color=GREY)
    footer = _text(figure, ruler.wrap(words.footer, full, TINY), TINY, color=GREY)
    drawn = [_legend(figure, ruler, keys) for keys in legends if keys]
    heights = [_height(item) for item in (title, subtitle, footer, *drawn)]
    taken = sum(heights) + 2 * MARGIN + GAP * (len(heights) + 2)
    lines = [ruler.wrap(note, full, TINY, indent="   ") for note in words.notes]
    notes = _text(figure, _cut(lines, MAX_HEIGHT - taken - least), TINY)
    taken += _height(notes)
    height = taken + max(least, min(panels, MAX_HEIGHT - taken))
    figure.set_size_inches(WIDTH, height)

    top = height - MARGIN
    for item in (title, subtitle):
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


def save(figure: Figure, stem: Path, words: Words) -> list[Path]:
    """Write PNG and SVG, the same bytes every time; returns the paths.

    The figure is laid out once, at the resolution of the PNG: each file by itself would lay it out twice.
    """
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    figure.set_dpi(DPI)
    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)
        figure.set_layout_engine(None)
    figure.savefig(png, dpi=DPI, metadata={"Software": None})
    about = {"Date": None, "Title": clean(words.title), "Description": clean(words.plain())}
    figure.savefig(svg, metadata=about)
    return [png, svg]
