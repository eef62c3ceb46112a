"""The forest plot of a comparison: one row per cell, its ratio of step times with the interval, and its verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import matplotlib.style
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from bench.judge.pairs import SLOWER, ComparedPair, record
from bench.judge.verdicts import Verdict, band
from bench.report import sheet, style
from bench.report.comparison import Report
from bench.report.panels import Drawing, largest, left_out_words
from bench.report.sheet import FigureWords
from bench.report.style import GREY, REFERENCE_COLOUR, TINY, Key, safe

COLOURS = {
    Verdict.FASTER: "#0072B2",
    Verdict.SLOWER: "#D55E00",
    Verdict.SAME: "#009E73",
    Verdict.AMBIGUOUS: GREY,
    Verdict.NOT_COMPARABLE: GREY,
}
MARKERS = {
    Verdict.FASTER: "<",
    Verdict.SLOWER: ">",
    Verdict.SAME: "s",
    Verdict.AMBIGUOUS: "o",
    Verdict.NOT_COMPARABLE: "x",
}
"""A verdict can be told without its colour."""
MARGIN_COLOUR, FLOOR_COLOUR, BARRED_COLOUR = "#d9e8f2", "#f3dfb4", "#f0f0f0"
ROW, HEADING = 0.19, 0.75
"""Inches of a row, and of the axis beneath them."""
GROUP_GAP = 0.5
"""Rows of room between groups."""
MOST_ROWS = 30
"""Of a figure; more cells make more figures."""
WORD_WIDTH = 2.2
"""Inches of the words at the right of the rows; longer ones are cut in the middle."""
LEAST_REACH = 1.05
"""The axis shows at least 1 / LEAST_REACH to LEAST_REACH, so that a tiny difference does not look like a large one."""
NICE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1.0, 1.5, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Ticks of an axis that is too long for even ones."""


def draw(report: Report, stem: str = "compare", most_pages: int | None = None) -> list[Drawing]:
    """The figures: one of that name, or several, ``-1`` and so on, where the cells do not fit into one.

    Of more than fit into ``most_pages``, the rows of the most ranks and the largest N are drawn; the CSV has all.
    """
    most = len(report.rows) if most_pages is None else most_pages * MOST_ROWS
    shown = largest(report.rows, most, lambda row: (row.pair.b.world_size, row.pair.b.accumulate))
    left_out = left_out_words(len(report.rows), len(shown), "comparisons")
    data = pd.DataFrame([record(row) for row in report.rows]) if left_out else None
    count = math.ceil(len(shown) / MOST_ROWS)
    size = math.ceil(len(shown) / count) if count else 0
    parts = [shown[i * size : (i + 1) * size] for i in range(count)]
    with matplotlib.style.context(list(style.BASE)):
        found = [
            _draw(
                report, rows, f"{stem}-{i}" if count > 1 else stem, f", {i} of {count}" if count > 1 else "", left_out
            )
            for i, rows in enumerate(parts, start=1)
        ]
    return found if data is None else [replace(drawing, data=data) for drawing in found]


def _draw(report: Report, rows: Sequence[ComparedPair], stem: str, which: str, notes: Sequence[str]) -> Drawing:
    subtitle = f"B: {report.b}; A: {report.a}; an optimizer step's time, 95 % intervals over trials"
    if report.differences:
        keys = ", ".join(one.key for one in report.differences[:4])
        subtitle += f". DIFFERENT MACHINES OR SOFTWARE: {keys}" + (" ..." if len(report.differences) > 4 else "")
    floors = [row.judgement.comparison.floor for row in report.rows if row.judgement.comparison.floor]
    floor = floors[0] if floors and floors[0].low is not None else None
    footer = f"{'; '.join(_marks(report.rows))}."
    if floor is None:
        footer += " The noise floor is unknown, so no row is called faster, slower or the same."
    said = [*(f"{text}." for text in report.remarks), *notes]
    words = FigureWords(f"Time of B over time of A{which}", subtitle, footer, said)
    noise = None if floor is None else band(floor)
    inches = ROW * (len(rows) + GROUP_GAP * _num_groups(rows)) + HEADING
    figure = sheet.sheet(words, [_keys(report, rows, noise)], inches, inches)
    axes = figure.subplots()
    _rows(axes, rows)
    limits = _limits(report)
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    axes.xaxis.set_major_locator(FixedLocator(ticks(*limits)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("time of B / time of A")
    if noise:
        axes.axvspan(1 / noise, noise, color=FLOOR_COLOUR, zorder=0.4, linewidth=0)
    axes.axvspan(1 / (1 + report.margin), 1 + report.margin, color=MARGIN_COLOUR, zorder=0.5, linewidth=0)
    axes.axvline(1, color=REFERENCE_COLOUR, linewidth=0.9, zorder=1.5)
    if report.threshold is not None:
        axes.axvline(1 + report.threshold, color=COLOURS[Verdict.SLOWER], linewidth=0.9, linestyle="--", zorder=1.5)
    return Drawing(stem, figure, pd.DataFrame([record(row) for row in rows]), words)


def _marks(rows: Sequence[ComparedPair]) -> Iterator[str]:
    """How to read what is drawn; of marks that are not there nothing is said."""
    yield "Below 1, B is faster"
    if any(row.time is not None and row.time.low is None for row in rows):
        yield "hollow: no interval, with too few trials"
    if any(row.judgement.verdict is Verdict.NOT_COMPARABLE for row in rows):
        yield "on grey: not comparable"


def _num_groups(rows: Sequence[ComparedPair]) -> int:
    return len({row.pair.group for row in rows})


def _rows(axes: Axes, rows: Sequence[ComparedPair]) -> None:
    """Names at the left, intervals in the middle, numbers and verdicts at the right; a gap between groups."""
    places: list[float] = []
    for i, row in enumerate(rows):
        gap = GROUP_GAP if i and row.pair.group != rows[i - 1].pair.group else 0.0
        places.append(places[-1] + 1 + gap if places else 0.0)
        _row(axes, places[-1], row)
    axes.set_yticks(places, [safe(style.fit(row.pair.name, style.NAME_WIDTH)) for row in rows])
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _row(axes: Axes, y: float, row: ComparedPair) -> None:
    verdict, time = row.judgement.verdict, row.time
    barred = verdict is Verdict.NOT_COMPARABLE
    colour = COLOURS[verdict]
    if barred:
        axes.axhspan(y - 0.42, y + 0.42, color=BARRED_COLOUR, zorder=0.6, linewidth=0)
    if time is not None:
        if time.low is not None and time.high is not None:
            axes.plot([time.low, time.high], [y, y], color=colour, linewidth=1.4, zorder=2.5)
        axes.plot([time.ratio], [y], zorder=3, **_mark(verdict, hollow=time.low is None))
    text = axes.text(
        1.02, y, safe(style.fit(said(row), WORD_WIDTH)), size=TINY, va="center", transform=axes.get_yaxis_transform()
    )
    text.set_color(GREY if barred else COLOURS[Verdict.SLOWER] if SLOWER in row.regressions else "black")


def _mark(verdict: Verdict, *, hollow: bool) -> dict[str, Any]:
    colour = COLOURS[verdict]
    face = "white" if hollow else colour
    return {
        "marker": MARKERS[verdict],
        "color": colour,
        "markerfacecolor": face,
        "markersize": 5,
        "linestyle": "none",
        "markeredgewidth": 0.9,
    }


def said(row: ComparedPair) -> str:
    """The words at the right of a row."""
    time, judgement = row.time, row.judgement
    ends = "REGRESSED" if SLOWER in row.regressions else str(judgement.verdict)
    if judgement.verdict is Verdict.NOT_COMPARABLE:
        return f"{time.ratio:.3f} forced; {ends}: {judgement.reason}" if time else f"{ends}: {judgement.reason}"
    if time is None:
        return ends
    if time.low is None:
        return f"{time.ratio:.3f}, no interval (n = {time.num_trials}), {ends}"
    return f"{time.ratio:.3f} [{time.low:.3f}, {time.high:.3f}] {ends}"


def _limits(report: Report) -> tuple[float, float]:
    """Of the axis: all ratios and intervals, the margin and the threshold, with a little room."""
    ends = [1 + report.margin, 1 / (1 + report.margin), LEAST_REACH, 1 / LEAST_REACH, 1 + (report.threshold or 0)]
    for row in report.rows:
        if row.time is not None:
            ends += [end for end in (row.time.ratio, row.time.low, row.time.high) if end is not None]
    low, high = min(ends), max(ends)
    room = (high / low) ** 0.04
    return low / room, high * room


def ticks(low: float, high: float) -> list[float]:
    """Ratios at which the axis is marked, 1 among them."""
    if high / low < 2.2:
        found = [float(round(value, 6)) for value in MaxNLocator(nbins=6).tick_values(low, high)]
    else:
        found = list(NICE)
    inside = [value for value in found if low <= value <= high]
    return inside if 1.0 in inside else sorted([*inside, 1.0])


def _keys(report: Report, rows: Sequence[ComparedPair], noise: float | None) -> list[Key]:
    verdicts = {row.judgement.verdict for row in rows if row.time is not None}
    keys: list[Key] = [
        (Line2D([], [], **_mark(verdict, hollow=False)), str(verdict)) for verdict in Verdict if verdict in verdicts
    ]
    if any(row.judgement.verdict is Verdict.NOT_COMPARABLE and row.time is None for row in rows):
        keys.append((Patch(color=BARRED_COLOUR), "not comparable, no ratio"))
    keys.append((Patch(color=MARGIN_COLOUR), f"margin of {100 * report.margin:g} %"))
    if noise:
        keys.append((Patch(color=FLOOR_COLOUR), f"noise floor, {100 * (noise - 1):.2g} %"))
    if report.threshold is not None:
        line = Line2D([], [], color=COLOURS[Verdict.SLOWER], linestyle="--", linewidth=0.9)
        keys.append((line, f"--fail-on slower={100 * report.threshold:g}%"))
    return keys
