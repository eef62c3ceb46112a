"""How the plots look: colours of frameworks, markers of sync, fonts, and how wide a text is."""

from __future__ import annotations

import itertools
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NotRequired, TypedDict

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.typing import LineStyleType
from numpy.typing import ArrayLike

from bench.backends.base import built_in
from bench.formatting import plain
from bench.judge.tables import rows_of

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

FRAMEWORK_COLOURS = {each.framework: each.colour for each in built_in().values() if each.colour}
"""Okabe and Ito's palette without its yellow, which is too pale on paper, and two of Paul Tol's."""
SYNC_MARKERS = {"none": "o", "eager": "s", "deferred-all-reduce": "v", "deferred": "^"}
OTHER_MARKER = "D"
OPEN_MARKER = SYNC_MARKERS["eager"]
"""Drawn as an outline: what is at the same place is seen within it."""
PALER = 0.45
"""How much of the way to white the second line of a colour is, where every line needs its own."""
SHARDING_DASHES: dict[str, tuple[float, ...]] = {
    "params": (8.0, 1.6),
    "grads": (3.6, 1.4),
    "optimizer": (1.0, 1.2),
}
SOLID_LENGTH, DOT, DOT_GAP = 14.0, 1.4, 1.4
"""Dashes of a solid line that resembles another, and the dots that distinguish lines."""

FONT = "DejaVu Sans"
RC: dict[str, object] = {
    "font.family": FONT,
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
BASE: tuple[str, dict[str, object]] = ("default", RC)


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
        if self.marker == SYNC_MARKERS["eager"]:
            return "--"
        return "-"


Key = tuple[Artist | tuple[Artist, ...], str]
"""A legend's entry: what is drawn and its label."""


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def clean(text: object) -> str:
    """One line that the font can draw, whatever was in the text."""
    composed = unicodedata.normalize("NFC", plain(text))
    for character in set(composed):
        if ord(character) not in _glyphs():
            composed = composed.replace(character, "?")
    return composed


def cut(text: object) -> str:
    """``clean``, cut in the middle if it is longer than a name may be."""
    name = clean(text)
    if len(name) <= NAME_LENGTH:
        return name
    return f"{name[: NAME_LENGTH // 2]}…{name[-NAME_LENGTH // 2 :]}"


def safe(text: object) -> str:
    """``clean``, with ``$`` escaped so that it is not read as mathematics."""
    return clean(text).replace("$", r"\$")


def colours(frameworks: Iterable[str]) -> dict[str, str]:
    """One colour per framework.

    It is fixed for the known ones; others have those that are left, last first.
    """
    unknown, taken = [], set()
    for name in sorted(set(frameworks)):
        if name in FRAMEWORK_COLOURS:
            taken.add(FRAMEWORK_COLOURS[name])
        else:
            unknown.append(name)
    free = [colour for colour in reversed(FRAMEWORK_COLOURS.values()) if colour not in taken]
    if not free:
        free = [GREY]
    return FRAMEWORK_COLOURS | dict(zip(unknown, itertools.cycle(free), strict=False))


def looks(trials: pd.DataFrame) -> dict[str, Appearance]:
    """The look of each backend, ordered by framework, sharding, sync and name.

    Backends of equal framework, sync and sharding differ by dots in the line.
    """
    facts = trials[["framework", "sharding", "sync", "backend"]]
    facts = facts.astype(object).fillna("").drop_duplicates("backend")
    colour = colours(facts["framework"])
    facts["place"] = facts["framework"].map(list(colour).index)
    facts = facts.sort_values(["place", "sharding", "sync", "backend"])
    seen: Counter[tuple[str, str, str]] = Counter()
    found = {}
    for row in rows_of(facts):
        framework, sharding, sync = str(row["framework"]), str(row["sharding"]), str(row["sync"])
        alike = seen[framework, sharding, sync]
        seen[framework, sharding, sync] += 1
        found[str(row["backend"])] = Appearance(
            colour=colour[framework],
            marker=SYNC_MARKERS.get(sync, OTHER_MARKER),
            line=_line(sharding, alike),
        )
    return found


def told_apart(looks: Mapping[str, Appearance]) -> dict[str, Appearance]:
    """The same looks; of those with one colour, all but the first have paler ones."""
    seen: Counter[str] = Counter()
    found = {}
    for backend, look in looks.items():
        paler = 1 - (1 - PALER) ** seen[look.colour]
        seen[look.colour] += 1
        found[backend] = replace(look, colour=mixed(look.colour, paler))
    return found


def mixed(colour: str, paler: float) -> str:
    """A colour so much of the way to white."""
    red, green, blue = to_rgb(colour)
    return to_hex((red + paler * (1 - red), green + paler * (1 - green), blue + paler * (1 - blue)))


def _line(sharding: str, alike: int) -> LineStyleType:
    dashes = SHARDING_DASHES.get(sharding, ())
    if not alike:
        return (0, dashes)
    if not dashes:
        dashes = (SOLID_LENGTH, DOT_GAP)
    dots = (DOT, DOT_GAP) * alike
    return (0, dashes + dots)


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


class _MarkerLook(TypedDict):
    """What matplotlib takes for a marker."""

    color: str
    marker: str
    markersize: float
    markeredgewidth: float
    markerfacecolor: NotRequired[str]
    markeredgecolor: NotRequired[str]


def _marker(look: Appearance, wrong: bool, size: float) -> _MarkerLook:
    """A wrong result is a ring that no marker covers.

    Others have an edge, to be seen before one of their colour.
    """
    if wrong:
        return {
            "color": look.colour,
            "marker": "o",
            "markersize": 1.8 * size,
            "markerfacecolor": "none",
            "markeredgewidth": 1.3,
        }
    if look.marker == OPEN_MARKER:
        return {
            "color": look.colour,
            "marker": look.marker,
            "markersize": size + 1.0,
            "markerfacecolor": "none",
            "markeredgewidth": 1.3,
        }
    return {
        "color": look.colour,
        "marker": look.marker,
        "markersize": size + 1.6,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


def line_key(backend: str, look: Appearance, line: LineStyleType, *, wrong: bool = False) -> Key:
    """The legend's entry of a backend that is drawn as a line with markers."""
    label, size = cut(backend), 5.5
    if wrong:
        label, size = f"{label} (invalid)", 4.0
    return Line2D([], [], linestyle=line, **_marker(look, wrong, size)), label


@cache
def _renderer() -> RendererAgg:
    renderer: RendererAgg = FigureCanvasAgg(Figure(figsize=(1, 1), dpi=DPI)).get_renderer()
    return renderer


@lru_cache(maxsize=1 << 15)
def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Width of a line of text in inches."""
    font = FontProperties(family=FONT, size=size, weight=weight)
    width, *_ = _renderer().get_text_width_height_descent(clean(text), font, ismath=False)
    return float(width / DPI)


def wrap(
    text: str,
    width: float,
    size: float,
    weight: str = "normal",
    indent: str = "",
) -> list[str]:
    """The lines of the text, none wider than so many inches; all but the first are indented.

    Matplotlib's own ``wrap=True`` knows one width, up to the edge of the figure: titles of
    neighbouring panels run into each other, and other words into the margin. It also leaves a word
    whole that is wider than the line, and cannot indent.
    """
    text = clean(text)
    length = int(1.2 * len(text) * width / max(text_width(text, size, weight), width)) + 1
    while True:
        lines = textwrap.wrap(text, length, subsequent_indent=indent, break_on_hyphens=False)
        if length <= 1 or all(text_width(line, size, weight) <= width for line in lines):
            return lines
        length -= 1
