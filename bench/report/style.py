"""How the plots look: colours of frameworks, markers of sync, fonts, and how wide a text is."""

from __future__ import annotations

import itertools
import textwrap
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.typing import LineStyleType
from numpy.typing import ArrayLike

from bench.backends.base import built_in
from bench.formatting import plain

WIDTH, MAX_HEIGHT = 7.5, 9.0
"""Of a figure in inches: fits on A4 with margins."""
DPI = 200
SMALL, TINY = 7.0, 6.5
"""Font sizes in points; the base is 8."""
MARGIN = 0.12
"""Inches around the figure."""
INTERVAL = 0.8
"""Points of a line that is an interval."""
NAME_LENGTH = 46
"""Characters of a name in a figure; longer ones are cut."""
REFERENCE_COLOUR = "#000000"
GREY, CONTROL_COLOUR = "#555555", "#f3dfb4"

FRAMEWORK_COLOURS = {backend.framework: backend.colour for backend in built_in().values() if backend.colour}
"""Okabe and Ito's palette without its yellow, which is too pale on paper, and Paul Tol's muted and safe palettes."""
SYNC_MARKERS = {"none": "o", "eager": "s", "deferred-all-reduce": "v", "deferred": "^"}
OTHER_MARKER = "D"
SHARDING_DASHES: dict[str, tuple[float, ...]] = {"params": (8.0, 1.6), "grads": (3.6, 1.4), "optimizer": (1.0, 1.2)}
SOLID_LENGTH, DOT, DOT_GAP = 14.0, 1.4, 1.4
"""Dashes of a solid line that resembles another, and the dots that distinguish lines."""

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
}
"""On top of matplotlib's defaults."""
BASE: tuple[str, dict[str, Any]] = ("default", RC)


@dataclass(frozen=True, slots=True)
class Appearance:
    """How one backend is drawn, in every figure."""

    colour: str
    marker: str
    line: LineStyleType
    """With dashes by sharding."""

    @property
    def sync_line(self) -> LineStyleType:
        """Dashed for eager sync, in dashes and dots for a deferred all-reduce, solid otherwise."""
        if self.marker == SYNC_MARKERS["deferred-all-reduce"]:
            return "-."
        return "--" if self.marker == SYNC_MARKERS["eager"] else "-"


Key = tuple[Artist | tuple[Artist, ...], str]
"""A legend's entry: what is drawn and its label."""


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def clean(text: object) -> str:
    """One line that the font can draw, whatever was in the text."""
    return "".join(c if ord(c) in _glyphs() else "?" for c in unicodedata.normalize("NFC", plain(text)))


def cut(text: object) -> str:
    """``clean``, cut in the middle if it is longer than a name may be."""
    name = clean(text)
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH // 2]}…{name[-NAME_LENGTH // 2 :]}"


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
    facts = trials[["framework", "sharding", "sync", "backend"]].astype(object).fillna("").drop_duplicates("backend")
    colour = colours(facts["framework"])
    facts["place"] = facts["framework"].map(list(colour).index)
    facts = facts.sort_values(["place", "sharding", "sync", "backend"])
    alike = facts.groupby(["framework", "sharding", "sync"]).cumcount()
    rows = zip(*(facts[name].astype(str) for name in ("backend", "framework", "sharding", "sync")), alike, strict=True)
    return {
        backend: Appearance(colour[framework], SYNC_MARKERS.get(sync, OTHER_MARKER), _line(sharding, count))
        for backend, framework, sharding, sync, count in rows
    }


def _line(sharding: str, alike: int) -> LineStyleType:
    dashes = SHARDING_DASHES.get(sharding, ())
    return (0, (dashes or (SOLID_LENGTH, DOT_GAP)) + (DOT, DOT_GAP) * alike if alike else dashes)


def mark(
    axes: Axes,
    x: ArrayLike,
    y: ArrayLike,
    look: Appearance,
    *,
    wrong: bool = False,
    size: float = 5.5,
    markevery: tuple[int, int] | None = None,
) -> None:
    """Draw markers at points: at every one, or from a first one on at every so many."""
    axes.plot(x, y, linestyle="none", markevery=markevery, **_marker(look, wrong, size))


def _marker(look: Appearance, wrong: bool, size: float) -> dict[str, Any]:
    """A wrong result is a ring that no marker covers; others have an edge, to be seen before one of their colour."""
    if wrong:
        ring = {"marker": "o", "markersize": 1.8 * size, "markerfacecolor": "none", "markeredgewidth": 1.3}
        return {"color": look.colour} | ring
    edge = {"markersize": size + 1.6, "markeredgecolor": "white", "markeredgewidth": 0.6}
    return {"color": look.colour, "marker": look.marker} | edge


def line_key(backend: str, look: Appearance, line: LineStyleType, *, wrong: bool = False) -> Key:
    """The legend's entry of a backend that is drawn as a line with markers."""
    label = cut(backend) + " (invalid)" * wrong
    return Line2D([], [], linestyle=line, **_marker(look, wrong, 4.0 if wrong else 5.5)), label


@cache
def _renderer() -> RendererAgg:
    renderer: RendererAgg = FigureCanvasAgg(Figure(figsize=(1, 1), dpi=DPI)).get_renderer()
    return renderer


@lru_cache(maxsize=1 << 15)
def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Width of a line of text in inches."""
    font = FontProperties(family=RC["font.family"], size=size, weight=weight)
    return float(_renderer().get_text_width_height_descent(clean(text), font, ismath=False)[0] / DPI)


def wrap(text: str, width: float, size: float, weight: str = "normal", indent: str = "") -> list[str]:
    """The lines of the text, none wider than so many inches; all but the first begin with ``indent``.

    Matplotlib's own ``wrap=True`` knows one width, up to the edge of the figure: titles of neighbouring panels run into
    each other, and other words into the margin. It also leaves a word whole that is wider than the line, and cannot
    indent.
    """
    text = clean(text)
    length = int(1.2 * len(text) * width / max(text_width(text, size, weight), width)) + 1
    while True:
        lines = textwrap.wrap(text, length, subsequent_indent=indent, break_on_hyphens=False)
        if length <= 1 or all(text_width(line, size, weight) <= width for line in lines):
            return lines
        length -= 1
