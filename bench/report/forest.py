"""Ratios of step times: one row per backend with a dot and its 95 % interval for each N, sorted, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib.style
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from bench.formatting import plural, some
from bench.grouping import grouped
from bench.judge.columns import WAYS, differing, phrases
from bench.judge.pairs import SLOWER, ComparedPair, record
from bench.judge.statistics import Interval
from bench.judge.verdicts import Verdict
from bench.plan.cell import Cell
from bench.report.canvas import Drawing, FigureWords, name_rows, new_figure
from bench.report.comparison import Report
from bench.report.figure_data import largest, left_out_note
from bench.report.style import BASE, CONTROL_COLOUR, GREY, REFERENCE_COLOUR, TINY, Key, cut, safe

DARK = "#0B3C6F"
"""The dots of the largest N; smaller N are paler."""
PALEST = 0.65
"""How much of the way to white the dots of the smallest N are."""
SLOWER_COLOUR, MARGIN_COLOUR = "#D55E00", "#d9e8f2"
DOT, ROW, HEADING = 0.1, 0.12, 0.75
"""Inches of a dot's height within its row, of a row without its dots, and of the axis below the rows."""
PAGE = 5.0
"""Inches that all rows may take."""
LEAST_REACH = 1.05
"""The axis reaches at least from 1 / LEAST_REACH to LEAST_REACH, so that a tiny difference does not look large."""
WIDE = 2.2
"""Ratio of the ends of an axis from which its ticks are not equidistant."""
Row = tuple[str, list[ComparedPair]]
"""A name, and its pairs in order of N."""


def draw(report: Report, stem: str = "compare", around: FigureWords | None = None) -> list[Drawing]:
    """The figure, if anything was compared. Without room for all, the smallest N go first, then the fewest ranks."""
    every = _named_rows(report.rows)
    if not every:
        return []
    count = min(max(len(pairs) for _, pairs in every), max(1, int((PAGE / len(every) - ROW) / DOT)))
    fitting = largest(
        every, int(PAGE / (ROW + DOT * count)), lambda row: (row[1][-1].b.world_size, row[1][-1].b.accumulate)
    )
    shown = [(name, pairs[-count:]) for name, pairs in fitting]
    drawn = [pair for _, pairs in shown for pair in pairs]
    legend = "Below 1 is faster." + " Hollow: no interval." * any(row.time and not row.has_interval for row in drawn)
    if _control_interval(report) is None:
        legend += " There is no A/A pair with an interval, so nothing is called faster, slower or the same."
    around = around or FigureWords("", "", "")
    left_out = left_out_note(len(report.rows), len(drawn), "comparisons")
    notes = [legend, *around.notes, *(f"{text}." for text in report.remarks), *left_out]
    words = FigureWords(_title(report), _subtitle(report, around.subtitle), around.footer, notes)
    data = pd.DataFrame([record(row) for row in report.rows])
    with matplotlib.style.context(list(BASE)):
        return [Drawing(stem, _draw(report, shown, words), data, words)]


def _named_rows(pairs: Sequence[ComparedPair]) -> list[Row]:
    """A row for the pairs that differ in N alone, with its name; the fastest at the largest N comes first."""
    cells = [row.b for row in pairs]
    ways = [name for name in differing(cells, ("precision", *WAYS)) if name not in ("accumulate", "global_batch_size")]
    worlds = {row.b: f"W = {row.b.world_size} {row.b.world.label}".strip() for row in pairs}
    several = len(set(worlds.values())) > 1

    def key(cell: Cell) -> tuple[str, str]:
        context = ", ".join([worlds[cell]] * several + phrases(cell, ways))
        return context, cell.backend + " again (A/A)" * bool(cell.twin)

    def order(item: tuple[tuple[str, str], list[ComparedPair]]) -> tuple[str, int, float, str]:
        (context, name), alike = item
        last = alike[-1]
        return context, -last.b.accumulate, last.time.ratio if last.time else math.inf, name

    found = grouped((key(row.b), row) for row in sorted(pairs, key=lambda row: row.b.accumulate))
    rows = sorted(found.items(), key=order)
    return [(" ".join(filter(None, (name, context))), alike) for (context, name), alike in rows]


def _subtitle(report: Report, setting: str) -> str:
    text = f"Step time of {report.b} relative to that of {report.a}, with 95 % intervals {_over(report)}"
    if report.differences:
        keys = ", ".join(each.key for each in report.differences[:4])
        text += f". DIFFERENT MACHINES OR SOFTWARE: {keys}" + (" ..." if len(report.differences) > 4 else "")
    return "; ".join(filter(None, [text, setting]))


def _title(report: Report) -> str:
    """The verdicts at the largest N."""
    n = max(row.b.accumulate for row in report.rows)
    rows = [row for row in report.rows if row.b.accumulate == n and not row.b.twin]
    if not rows:
        return f"Only {report.a} was compared with itself"
    names = grouped((row.verdict, row.b.backend) for row in rows)
    faster, slower = (list(dict.fromkeys(names.get(each, ()))) for each in (Verdict.FASTER, Verdict.SLOWER))
    if faster:
        those = f"{some(faster)} {'is' if len(faster) == 1 else 'are'}"
        return f"At N = {n}, {those} faster than {report.a}{report.scope}"
    certain = f"; {len(slower)} of {plural(len(rows), 'other')} {'is' if len(slower) == 1 else 'are'} slower"
    return f"At N = {n}, no backend is shown to be faster than {report.a}{certain if slower else ''}{report.scope}"


def _over(report: Report) -> str:
    """What the intervals are over, in the words of a subtitle."""
    if report.num_runs == 1:
        return "over trials"
    return f"over {report.num_runs} runs; thin lines: where the next run falls"


def _control_interval(report: Report) -> Interval | None:
    """The A/A pair's ratio; None without an interval."""
    found = [row.control for row in report.rows if row.control]
    return found[0] if found and found[0].low is not None else None


def _draw(report: Report, rows: Sequence[Row], words: FigureWords) -> Figure:
    control = _control_interval(report)
    ns = sorted({pair.b.accumulate for _, pairs in rows for pair in pairs})
    colours = {n: _shade_of(i, len(ns)) for i, n in enumerate(ns)}
    most = max(len(pairs) for _, pairs in rows)
    height = ROW + DOT * most
    figure = new_figure(words, _legend_keys(report, colours, control), height * len(rows) + HEADING)
    axes = figure.subplots()
    name_rows(axes, [name for name, _ in rows])
    for place, (_, pairs) in enumerate(rows):
        for i, pair in enumerate(pairs):
            _draw_dot(axes, place + DOT / height * (i - (len(pairs) - 1) / 2), pair, colours[pair.b.accumulate])
        _write_verdict(axes, place, pairs[-1], f"N = {pairs[-1].b.accumulate}: " * (len(ns) > 1))
        if most > 1:
            axes.axhline(place + 0.5, color="#e4e4e4", linewidth=0.5, zorder=0.3)
    axes.spines["left"].set_visible(False)
    _set_scale(axes, report)
    axes.set_xlabel("relative step time")
    if control is not None and control.low is not None and control.high is not None:
        axes.axvspan(control.low, control.high, color=CONTROL_COLOUR, zorder=0.1, linewidth=0)
    axes.axvspan(1 / (1 + report.margin), 1 + report.margin, color=MARGIN_COLOUR, zorder=0.2, linewidth=0)
    axes.axvline(1, color=REFERENCE_COLOUR, linewidth=0.9, zorder=1.5)
    if report.threshold is not None:
        axes.axvline(1 + report.threshold, color=SLOWER_COLOUR, linewidth=0.9, linestyle="--", zorder=1.5)
    return figure


def _set_scale(axes: Axes, report: Report) -> None:
    """A logarithmic axis with room for all ratios, ends of intervals, margin and threshold."""
    ends = [1 + report.margin, 1 / (1 + report.margin), LEAST_REACH, 1 / LEAST_REACH, 1 + (report.threshold or 0)]
    for time in filter(None, [_control_interval(report), *(row.time for row in report.rows)]):
        known = (time.ratio, time.low, time.high, time.next_low, time.next_high)
        ends += [end for end in known if end is not None]
    low, high = min(ends) / 1.02, max(ends) * 1.02
    axes.set(xscale="log", xlim=(low, high))
    wide = high / low > WIDE
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)) if wide else MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _shade_of(place: int, count: int) -> str:
    paler = PALEST * (count - 1 - place) / max(count - 1, 1)
    red, green, blue = (part + paler * (1 - part) for part in to_rgb(DARK))
    return to_hex((red, green, blue))


def _draw_dot(axes: Axes, y: float, row: ComparedPair, colour: str) -> None:
    time = row.time
    if time is None:
        return
    if time.next_low is not None and time.next_high is not None:
        axes.plot([time.next_low, time.next_high], [y, y], color=colour, linewidth=0.5, zorder=2.4)
    if time.low is not None and time.high is not None:
        axes.plot([time.low, time.high], [y, y], color=colour, linewidth=1.4, zorder=2.5)
    face = "white" if time.low is None else colour
    axes.plot([time.ratio], [y], "o", color=colour, markerfacecolor=face, markersize=4.5, zorder=3)


def _write_verdict(axes: Axes, y: float, row: ComparedPair, n: str) -> None:
    words, barred = safe(cut(n + _ratio_words(row))), row.verdict is Verdict.NOT_COMPARABLE
    colour = GREY if barred else SLOWER_COLOUR if SLOWER in row.regressions else "black"
    axes.text(1.02, y, words, size=TINY, va="center", color=colour, transform=axes.get_yaxis_transform())


def _ratio_words(row: ComparedPair) -> str:
    time, verdict = row.time, "REGRESSED" if SLOWER in row.regressions else str(row.verdict)
    if row.verdict is Verdict.NOT_COMPARABLE:
        return f"{verdict}: {row.reason}"
    if time is None:
        return verdict
    if time.low is None:
        return f"{time.ratio:.3f}, no interval (n = {time.num_trials}), {verdict}"
    turning = ", may differ" if row.may_differ else ""
    return f"{time.ratio:.3f} [{time.low:.3f}, {time.high:.3f}] {verdict}{turning}"


def _legend_keys(report: Report, colours: dict[int, str], control: Interval | None) -> list[Key]:
    keys: list[Key] = [
        (Line2D([], [], color=colour, marker="o", markersize=4.5, linewidth=1.4), f"N = {n}")
        for n, colour in colours.items()
        if len(colours) > 1
    ]
    keys.append((Patch(color=MARGIN_COLOUR), f"margin of {100 * report.margin:g} %"))
    if control is not None:
        keys.append(
            (Patch(color=CONTROL_COLOUR), f"A/A pair{report.control_place}, {control.low:.3f} to {control.high:.3f}")
        )
    if report.threshold is not None:
        line = Line2D([], [], color=SLOWER_COLOUR, linestyle="--", linewidth=0.9)
        keys.append((line, f"--fail-on slower={100 * report.threshold:g}%"))
    return keys
