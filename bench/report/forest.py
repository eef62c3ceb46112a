"""Ratios of step times: a row per backend with a dot and its 95 % interval per N; the verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import matplotlib.style
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from bench.formatting import plural, some
from bench.judge.columns import WAYS, differing, phrases
from bench.judge.pairs import SLOWER, ComparedPair, record
from bench.judge.statistics import Interval
from bench.judge.verdicts import Verdict
from bench.plan.cell import Cell
from bench.report.canvas import LOG, Drawing, FigureWords, name_rows, new_figure
from bench.report.comparison import Report
from bench.report.descriptions import one_or_many
from bench.report.figure_data import largest, left_out_note
from bench.report.style import (
    BASE,
    CONTROL_COLOUR,
    GREY,
    REFERENCE_COLOUR,
    TINY,
    Key,
    cut,
    mixed,
    safe,
)

DARK = "#0B3C6F"
"""The dots of the largest N; smaller N are paler."""
PALEST = 0.65
"""How much of the way to white the dots of the smallest N are."""
SLOWER_COLOUR, MARGIN_COLOUR = "#D55E00", "#d9e8f2"
DOT, ROW, HEADING = 0.1, 0.12, 0.75
"""Inches of a dot's height within its row, of a row without its dots, and of the axis below."""
PAGE = 5.0
"""Inches that all rows may take."""
LEAST_REACH = 1.05
"""The axis reaches at least from 1 / LEAST_REACH to LEAST_REACH: a tiny difference must not look
large."""
WIDE = 2.2
"""Ratio of the ends of an axis from which its ticks are not equidistant."""
MOST_KEYS = 4
"""Differing keys of the fingerprints that are named."""
NO_CONTROL = "no A/A pair with an interval, so nothing is called faster, slower or the same"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The pairs that differ in N alone, which are one row of the figure."""

    name: str
    pairs: Sequence[ComparedPair]
    """In order of N."""

    @property
    def last(self) -> ComparedPair:
        """That of the largest N, whose verdict is written."""
        return self.pairs[-1]

    @property
    def extent(self) -> tuple[int, int]:
        """The most ranks, and the largest N."""
        return self.last.b.world_size, self.last.b.accumulate


NO_WORDS = FigureWords("", "", "")
"""Around a figure that stands by itself."""


def draw(
    report: Report,
    stem: str = "compare",
    around: FigureWords = NO_WORDS,
) -> list[Drawing]:
    """The figure, if anything was compared.

    Without room for all, the smallest N go first, then the fewest ranks.
    """
    every = _named_rows(report.rows)
    if not every:
        return []
    rows = _fitting(every)
    num_drawn = len(_pairs_of(rows))
    notes = [_legend(report, rows), *around.notes]
    for remark in report.remarks:
        notes.append(f"{remark}.")
    notes += left_out_note(len(report.rows), num_drawn, "comparisons")
    subtitle = _subtitle(report, around.subtitle)
    words = FigureWords(_title(report), subtitle, around.footer, notes)
    data = pd.DataFrame([record(pair) for pair in report.rows])
    with matplotlib.style.context(list(BASE)):
        return [Drawing(stem, _draw(report, rows, words), data, words)]


def _fitting(every: Sequence[Row]) -> list[Row]:
    room = int((PAGE / len(every) - ROW) / DOT)
    most = min(_most_dots(every), max(1, room))
    fitting = largest(every, int(PAGE / (ROW + DOT * most)), lambda row: row.extent)
    return [replace(row, pairs=row.pairs[-most:]) for row in fitting]


def _most_dots(rows: Sequence[Row]) -> int:
    return max(len(row.pairs) for row in rows)


def _legend(report: Report, rows: Sequence[Row]) -> str:
    """How to read the figure."""
    legend = "Below 1 is faster."
    if any(map(_is_hollow, _pairs_of(rows))):
        legend += " Hollow: no interval."
    if _control_interval(report) is None:
        legend += f" There is {NO_CONTROL}."
    return legend


def _pairs_of(rows: Sequence[Row]) -> list[ComparedPair]:
    found: list[ComparedPair] = []
    for row in rows:
        found += row.pairs
    return found


def _is_hollow(pair: ComparedPair) -> bool:
    return pair.time is not None and not pair.has_interval


def _named_rows(pairs: Sequence[ComparedPair]) -> list[Row]:
    """A row for the pairs that differ in N alone; the fastest at the largest N comes first.

    Rows of one setting are together; its words stand behind the name if several are shown.
    """
    cells = [pair.b for pair in pairs]
    every_way = differing(cells, ("precision", *WAYS))
    ways = [name for name in every_way if name not in ("accumulate", "global_batch_size")]
    several_worlds = len(set(map(_world, cells))) > 1
    alike: dict[tuple[str, str], list[ComparedPair]] = {}
    for pair in sorted(pairs, key=lambda pair: pair.b.accumulate):
        setting = phrases(pair.b, ways)
        if several_worlds:
            setting.insert(0, _world(pair.b))
        backend = pair.b.backend
        if pair.b.twin:
            backend += " again (A/A)"
        alike.setdefault((", ".join(setting), backend), []).append(pair)
    keyed = []
    for (context, backend), same in alike.items():
        last, seconds = same[-1], math.inf
        if last.time is not None:
            seconds = last.time.ratio
        row = Row(name=f"{backend} {context}".strip(), pairs=same)
        keyed.append(((context, -last.b.accumulate, seconds, backend), row))
    keyed.sort(key=itemgetter(0))
    return [row for _, row in keyed]


def _world(cell: Cell) -> str:
    return f"W = {cell.world_size} {cell.world.label}".strip()


def _subtitle(report: Report, setting: str) -> str:
    text = f"Step time of {report.b} relative to that of {report.a}"
    text += f", with 95 % intervals {_over(report)}"
    if report.differences:
        keys = [each.key for each in report.differences[:MOST_KEYS]]
        text += f". DIFFERENT MACHINES OR SOFTWARE: {', '.join(keys)}"
    if len(report.differences) > MOST_KEYS:
        text += " ..."
    if setting:
        text += f"; {setting}"
    return text


def _title(report: Report) -> str:
    """The verdicts at the largest N."""
    n = max(pair.b.accumulate for pair in report.rows)
    pairs = []
    for pair in report.rows:
        if pair.b.accumulate == n and not pair.b.twin:
            pairs.append(pair)
    if not pairs:
        return f"Only {report.a} was compared with itself"
    faster, slower = _with_verdict(pairs, Verdict.FASTER), _with_verdict(pairs, Verdict.SLOWER)
    if faster:
        scope = report.scope_of([pair for pair in pairs if pair.verdict is Verdict.FASTER])
        verb = one_or_many(len(faster), "is", "are")
        return f"At N = {n}, {some(faster)} {verb} faster than {report.a}{scope}"
    title = f"At N = {n}, no backend is shown to be faster than {report.a}"
    if slower:
        count = plural(len(pairs), "other")
        verb = one_or_many(len(slower), "is", "are")
        title += f"; {len(slower)} of {count} {verb} slower"
    return title + report.scope_of([pair for pair in pairs if pair.verdict is Verdict.SLOWER])


def _with_verdict(pairs: Sequence[ComparedPair], verdict: Verdict) -> list[str]:
    """The backends of the pairs with this verdict, each once."""
    return list(dict.fromkeys(pair.b.backend for pair in pairs if pair.verdict is verdict))


def _over(report: Report) -> str:
    """What the intervals are over, in the words of a subtitle."""
    if report.is_of_days:
        return "that allow for what days differ by"
    if report.num_runs == 1:
        return "over trials"
    text = f"over {report.num_runs} runs"
    if any(row.time is not None and row.time.next_low is not None for row in report.rows):
        text += "; thin lines: where the next run falls"
    return text


def _control_interval(report: Report) -> Interval | None:
    """The A/A pair's ratio; None without an interval."""
    for pair in report.rows:
        if pair.control is None:
            continue
        if pair.control.low is None:
            return None
        return pair.control
    return None


def _draw(report: Report, rows: Sequence[Row], words: FigureWords) -> Figure:
    control = _control_interval(report)
    colours = _shades(rows)
    most = _most_dots(rows)
    height = ROW + DOT * most
    figure = new_figure(words, _legend_keys(report, colours, control), height * len(rows) + HEADING)
    axes = figure.subplots()
    name_rows(axes, [row.name for row in rows])
    for place, row in enumerate(rows):
        for i, pair in enumerate(row.pairs):
            from_middle = i - (len(row.pairs) - 1) / 2
            y = place + DOT / height * from_middle
            _draw_dot(axes, y, pair, colours[pair.b.accumulate])
        _write_verdict(axes, place, row.last, has_several=len(colours) > 1)
        if most > 1:
            axes.axhline(place + 0.5, color="#e4e4e4", linewidth=0.5, zorder=0.3)
    axes.spines["left"].set_visible(False)
    _set_scale(axes, report)
    axes.set_xlabel(f"relative step time, {LOG}")
    if control is not None and control.low is not None and control.high is not None:
        axes.axvspan(control.low, control.high, color=CONTROL_COLOUR, zorder=0.1, linewidth=0)
    same = 1 + report.margin
    axes.axvspan(1 / same, same, color=MARGIN_COLOUR, zorder=0.2, linewidth=0)
    axes.axvline(1, color=REFERENCE_COLOUR, linewidth=0.9, zorder=1.5)
    if report.threshold is not None:
        gate = 1 + report.threshold
        axes.axvline(gate, color=SLOWER_COLOUR, linewidth=0.9, linestyle="--", zorder=1.5)
    return figure


def _set_scale(axes: Axes, report: Report) -> None:
    """A logarithmic axis with room for all ratios, ends of intervals, margin and threshold."""
    ends = [1 + report.margin, 1 / (1 + report.margin), LEAST_REACH, 1 / LEAST_REACH]
    if report.threshold is not None:
        ends.append(1 + report.threshold)
    times = [pair.time for pair in report.rows]
    times.append(_control_interval(report))
    for time in times:
        if time is None:
            continue
        for end in (time.ratio, time.low, time.high, time.next_low, time.next_high):
            if end is not None:
                ends.append(end)
    low, high = min(ends) / 1.02, max(ends) * 1.02
    axes.set(xscale="log", xlim=(low, high))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    if high / low > WIDE:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _shades(rows: Sequence[Row]) -> dict[int, str]:
    """The colours of the dots, by N: the smaller, the paler."""
    ns = sorted({pair.b.accumulate for pair in _pairs_of(rows)}, reverse=True)
    shades = {}
    for place, n in enumerate(ns):
        shades[n] = mixed(DARK, PALEST * place / max(len(ns) - 1, 1))
    return dict(sorted(shades.items()))


def _draw_dot(axes: Axes, y: float, pair: ComparedPair, colour: str) -> None:
    time = pair.time
    if time is None:
        return
    if time.next_low is not None and time.next_high is not None:
        ends = [time.next_low, time.next_high]
        axes.plot(ends, [y, y], color=colour, linewidth=0.5, zorder=2.4)
    face = "white"
    if time.low is not None and time.high is not None:
        axes.plot([time.low, time.high], [y, y], color=colour, linewidth=1.4, zorder=2.5)
        face = colour
    axes.plot(
        [time.ratio],
        [y],
        "o",
        color=colour,
        markerfacecolor=face,
        markersize=4.5,
        zorder=3,
    )


def _write_verdict(axes: Axes, y: float, pair: ComparedPair, *, has_several: bool) -> None:
    """Write the verdict beside a row, with its N if there are several."""
    words = _ratio_words(pair)
    if has_several:
        words = f"N = {pair.b.accumulate}: {words}"
    colour = "black"
    if pair.verdict is Verdict.NOT_COMPARABLE:
        colour = GREY
    elif SLOWER in pair.regressions:
        colour = SLOWER_COLOUR
    beside = axes.get_yaxis_transform()
    axes.text(1.02, y, safe(cut(words)), size=TINY, va="center", color=colour, transform=beside)


def _ratio_words(pair: ComparedPair) -> str:
    time, verdict = pair.time, str(pair.verdict)
    if SLOWER in pair.regressions:
        verdict = "REGRESSED"
    if pair.verdict is Verdict.NOT_COMPARABLE:
        return f"{verdict}: {pair.reason}"
    if time is None:
        return verdict
    if time.low is None:
        return f"{time.ratio:.3f}, no interval (n = {time.num_trials}), {verdict}"
    if pair.may_differ:
        verdict += ", may differ"
    return f"{time.ratio:.3f} [{time.low:.3f}, {time.high:.3f}] {verdict}"


def _legend_keys(report: Report, colours: dict[int, str], control: Interval | None) -> list[Key]:
    keys: list[Key] = []
    if len(colours) > 1:
        for n, colour in colours.items():
            dot = Line2D([], [], color=colour, marker="o", markersize=4.5, linewidth=1.4)
            keys.append((dot, f"N = {n}"))
    keys.append((Patch(color=MARGIN_COLOUR), f"margin of {100 * report.margin:g} %"))
    if control is not None:
        ends = f"{control.low:.3f} to {control.high:.3f}"
        keys.append((Patch(color=CONTROL_COLOUR), f"A/A pair{report.control_place}, {ends}"))
    if report.threshold is not None:
        line = Line2D([], [], color=SLOWER_COLOUR, linestyle="--", linewidth=0.9)
        keys.append((line, f"--fail-on slower={100 * report.threshold:g}%"))
    return keys
