"""How the plots look: one colour per framework, one marker per sync, and text measured before it is drawn."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator
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

from bench.backends.base import built_in

WIDTH, MAX_HEIGHT = 7.5, 9.0
"""Of a figure in inches: fits on A4 with margins."""
DPI = 150
SMALL, TINY = 7.0, 6.5
"""Font sizes in points; the base is 8."""
MARGIN = 0.12
"""Inches around the figure."""
INTERVAL = 0.8
"""Points of a line that is an interval."""
NAME_WIDTH = 2.8
"""Inches of a name beside the rows of a figure; longer ones are cut."""
REFERENCE_COLOUR = "#000000"
GREY, FLOOR_COLOUR = "#555555", "#f3dfb4"

FRAMEWORK_COLOURS = {backend.framework: backend.colour for backend in built_in().values() if backend.colour}
"""Okabe and Ito's palette without its yellow, which is too pale on paper, and Paul Tol's muted and safe palettes."""
SYNC_MARKERS = {"none": "o", "eager": "s", "deferred-all-reduce": "v", "deferred": "^"}
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
    """One colour per framework: fixed for the known ones, for others those that are left, last first."""
    chosen = sorted(set(frameworks))
    unknown = [name for name in chosen if name not in FRAMEWORK_COLOURS]
    taken = {FRAMEWORK_COLOURS[name] for name in chosen if name in FRAMEWORK_COLOURS}
    free = [colour for colour in reversed(FRAMEWORK_COLOURS.values()) if colour not in taken]
    return FRAMEWORK_COLOURS | dict(zip(unknown, itertools.cycle(free or [GREY]), strict=False))


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


def mark(
    axes: Axes,
    x: Any,
    y: Any,
    look: Appearance,
    *,
    wrong: bool = False,
    hollow: bool = False,
    size: float = 5.5,
    **more: Any,
) -> None:
    """Draw markers at points; ``more`` are arguments of ``plot``. A wrong result is a ring that no marker covers."""
    base: dict[str, Any] = {"color": look.colour, "linestyle": "none", "markersize": size, "marker": look.marker}
    if wrong or hollow:
        base |= {"markerfacecolor": "none", "markeredgewidth": 1.3}
    axes.plot(x, y, **base | ({"marker": "o", "markersize": 1.8 * size} if wrong else {}) | more)


def line_key(backend: str, look: Appearance) -> Key:
    """The legend's entry of a backend that is drawn as a line with markers."""
    return Line2D([], [], color=look.colour, linestyle=look.line, marker=look.marker, markersize=5.5), backend


@lru_cache(maxsize=1 << 15)
def _width(text: str, size: float, weight: str) -> float:
    font = FontProperties(family=RC["font.family"], size=size, weight=weight)
    return float(_renderer().get_text_width_height_descent(text, font, ismath=False)[0] / DPI)


@cache
def _renderer() -> Any:
    return FigureCanvasAgg(Figure(figsize=(1, 1), dpi=DPI)).get_renderer()


def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Width of a line of text in inches."""
    return _width(clean(text), size, weight)


def wrap(text: str, width: float, size: float, weight: str = "normal", indent: str = "") -> list[str]:
    """The lines of the text, none wider than so many inches; all but the first begin with ``indent``.

    A word that is wider than a line is cut.
    """
    space = _width("n n", size, weight) - _width("nn", size, weight)
    lines, used = [""], 0.0
    for word in _words(text, width - space * len(indent), size, weight):
        wide = _width(word, size, weight)
        if used and used + space + wide > width:
            lines.append(indent + word)
            used = space * len(indent) + wide
        else:
            lines[-1] += f" {word}" if used else word
            used += space + wide if used else wide
    return lines


def _words(text: str, width: float, size: float, weight: str) -> Iterator[str]:
    """The words of the text; one that is wider than so many inches comes in parts that are not."""
    for whole in clean(text).split():
        word = whole
        while word:
            length = len(word)
            while length > 1 and _width(word[:length], size, weight) > width:
                length -= 1
            yield word[:length]
            word = word[length:]


def fit(text: str, width: float, size: float = SMALL) -> str:
    """The text, cut in the middle if it is wider than so many inches."""
    whole = shown = clean(text)
    left = len(whole)
    while left > 2 and _width(shown, size, "normal") > width:
        left -= 1
        half = left // 2
        shown = f"{whole[: left - half]}…{whole[-half:]}"
    return shown
