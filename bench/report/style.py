"""How the plots look: one colour per framework, one marker per sync, and text measured before it is drawn."""

from __future__ import annotations

import colorsys
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.typing import LineStyleType

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
class Appearance:
    """How one backend is drawn, in every figure."""

    colour: str
    marker: str
    line: LineStyleType


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


def looks(trials: pd.DataFrame) -> dict[str, Appearance]:
    """The look of each backend, ordered by framework, sharding, sync and name.

    Backends of equal framework, sync and sharding differ by dots in the line.
    """
    known = list(FRAMEWORK_COLOURS)
    rows = trials[["framework", "sharding", "sync", "backend"]].astype(object).fillna("").drop_duplicates("backend")
    keys = sorted(
        (tuple(str(v) for v in row) for row in rows.itertuples(index=False)),
        key=lambda k: (known.index(k[0]) if k[0] in known else len(known), k),
    )
    colour = colours(key[0] for key in keys)
    used_lines: dict[tuple[str, str], int] = {}
    found: dict[str, Appearance] = {}
    for framework, sharding, sync, backend in keys:
        alike = used_lines.setdefault((framework, f"{sharding} {sync}"), 0)
        used_lines[framework, f"{sharding} {sync}"] += 1
        marker = SYNC_MARKERS.get(sync, OTHER_MARKER)
        found[backend] = Appearance(colour[framework], marker, _line(sharding, alike))
    return found


def _line(sharding: str, alike: int) -> LineStyleType:
    dashes = SHARDING_DASHES.get(sharding, ())
    if not alike:
        return (0, dashes) if dashes else "-"
    return (0, (dashes or (SOLID_LENGTH, DOT_GAP)) + (DOT, DOT_GAP) * alike)


def marks(look: Appearance, *, wrong: bool = False, hollow: bool = False, size: float = 5.5) -> dict[str, Any]:
    """Keyword arguments of ``plot`` for a marker: for a wrong result an open ring that no other marker covers."""
    base: dict[str, Any] = {"color": look.colour, "linestyle": "none", "markersize": size, "marker": look.marker}
    if wrong or hollow:
        base |= {"markerfacecolor": "none", "markeredgewidth": 1.3}
    return base | ({"marker": "o", "markersize": 1.8 * size} if wrong else {})


def mark(axes: Axes, x: object, y: object, look: Appearance, **more: Any) -> None:
    """Draw markers at points; ``more`` are arguments of ``marks`` and of ``plot``."""
    own = {name: more.pop(name) for name in ("wrong", "hollow", "size") if name in more}
    axes.plot(x, y, **marks(look, **own), **more)  # type: ignore[arg-type]  # the stubs know no arrays of pandas


def backend_key(backend: str, look: Appearance, *, line: bool, label: str = "") -> Key:
    """The legend's entry of a backend."""
    style = marks(look) | {"linestyle": look.line if line else "none"}
    return Line2D([], [], **style), label or backend


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


def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Width of a line of text in inches."""
    return _ruler().width(clean(text), size, weight)


def wrap(text: str, width: float, size: float, weight: str = "normal") -> list[str]:
    """The lines of the text, none wider than so many inches; a word that is wider is cut."""
    return _ruler().wrap(text, width, size, weight)


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
