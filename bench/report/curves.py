"""Curves: step time against N, and losses and how far they are from the reference's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from bench.formatting import at_most, plural, some
from bench.judge.columns import WORK
from bench.judge.pairs import ComparedPair
from bench.judge.verdicts import Verdict, scope_of
from bench.plan.cell import REFERENCES, Status, Sync
from bench.report import style
from bench.report.canvas import (
    LOG,
    Drawing,
    FigureWords,
    PointName,
    freeze,
    name_points,
    new_figure,
    set_scale,
)
from bench.report.descriptions import one_or_many, without_sync
from bench.report.figure_data import (
    CONTEXT,
    FACTS,
    TIMES,
    FigureData,
    Panel,
    floats,
    rows_of_panels,
    sync_pairs,
)
from bench.report.style import (
    DPI,
    GREY,
    INTERVAL,
    REFERENCE_COLOUR,
    TINY,
    Appearance,
    Key,
    text_width,
)

MOST_PANELS, LAST = 3, 2.2
"""Panels, and how many times the width of others the last one has, at whose lines the names are."""
MOST_ROOM = 2.5
"""Inches of the names, at most."""
APART, MOST_APART = 0.4, 0.06
"""Doublings of N that all backends at one N take together, and that two of them are apart, at
most."""
TO_NAME = 0.5
"""Points of the line from the last marker of a backend to its name."""


def draw_step_time(data: FigureData) -> list[Drawing]:
    """Seconds per optimizer step against N; nothing if times cannot be compared, or have one N."""
    known = data.timed[data.timed["step_time_s"].notna()][[*FACTS, *TIMES]]
    if data.analysis.hides_times or known["accumulate"].nunique() < 2:
        return []
    panels, left_out = data.panels(known, CONTEXT, MOST_PANELS)
    drawn = rows_of_panels(panels)
    words = data.figure_words(_step_time_title(data, panels[-1]), timed=True)
    words.notes[:0] = [*left_out, _step_time_legend(drawn), *data.without_time()]
    ends_in_last = set(panels[-1].rows["backend"])
    keys = [name for name in data.backends_in(drawn) if name not in ends_in_last]
    figure = _step_time_figure(data, panels, words, keys)
    return [Drawing("step_time", figure, known, words)]


def _step_time_legend(drawn: pd.DataFrame) -> str:
    """What lines and markers mean."""
    legend = "Solid lines with triangles: deferred sync; dashed lines with squares: eager sync"
    if (drawn["sync"] == Sync.DEFERRED_ALL_REDUCE).any():
        legend += "; dash-dotted lines: deferred all-reduce"
    legend += ". Vertical lines are 95 % intervals; the backends at an N stand side by side"
    if (drawn["status"] != Status.OK).any():
        legend += ". Rings: some trials failed"
    return f"{legend}. B is the same at every N."


def _step_time_figure(
    data: FigureData,
    panels: list[Panel],
    words: FigureWords,
    keys: list[str],
) -> Figure:
    """The figure with these backends in its legend.

    Those whose names have no room at lines of the last panel are in it, too.
    """
    entries = []
    for backend in keys:
        look = data.looks[backend]
        entries.append(style.line_key(backend, look, look.sync_line))
    figure = new_figure(words, entries, 4.0)
    widths = [1.0] * len(panels)
    widths[-1] = LAST
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True, width_ratios=widths)[0]
    ends: dict[str, PointName] = {}
    for axes, panel in zip(grid, panels, strict=True):
        ends = _draw_backend_lines(data, axes, panel)
    last = grid[-1]
    last.set_xlabel(f"N, micro-batches per optimizer step, {LOG}")
    seconds = rows_of_panels(panels)["step_time_s"]
    for axes in grid:
        set_scale(axes, "y", seconds, "step time (s)")
        axes.label_outer()
    freeze(figure)
    named = {backend: end for backend, end in ends.items() if backend not in keys}
    names = list(named.values())
    _leave_room(last, names)
    missing = name_points(last, names, ["east", "northeast", "southeast"])
    unnamed = [backend for backend, name in named.items() if name in missing]
    if not unnamed:
        return figure
    return _step_time_figure(data, panels, words, keys + unnamed)


def _leave_room(axes: Axes, names: Sequence[PointName]) -> None:
    """Extend the axis of N, so that names have room right of the lines."""
    room = 0.3
    if names:
        room += max(text_width(name.text, TINY) for name in names)
    room = min(room, MOST_ROOM)
    low, high = axes.get_xlim()
    width = axes.get_window_extent().width / DPI
    axes.set_xlim(low, high * (high / low) ** (room / (width - room)))


def _step_time_title(data: FigureData, panel: Panel) -> str:
    """What the verdicts on deferring the sync are at the largest N, or the range of step times."""
    rows = panel.rows[panel.rows["accumulate"] == panel.extent[1]]
    good = rows[rows["status"] == Status.OK]["step_time_s"]
    if good.empty:
        return "Step time against N"
    setting = data.setting_of(rows.iloc[0])
    pairs = []
    for eager, deferred in sync_pairs(rows):
        pair = data.analysis.compared(deferred, eager)
        if pair is not None:
            pairs.append(pair)
    if not pairs:
        backends = plural(len(good), "backend")
        return f"{setting}, a step takes {good.min():.3g} to {good.max():.3g} s with {backends}"
    scope = scope_of(pairs, len(data.analysis.pool.runs))
    return f"{setting}, {_verdicts(pairs)}{scope}"


def _verdicts(pairs: Sequence[ComparedPair]) -> str:
    """In how many pairs the deferred backend is shown to be faster than the eager, or slower."""
    names: dict[Verdict, list[str]] = {Verdict.FASTER: [], Verdict.SLOWER: []}
    for pair in pairs:
        if pair.verdict in names:
            names[pair.verdict].append(without_sync(pair.a.backend))
    parts = []
    for verdict, found in names.items():
        if found:
            parts.append(f"{verdict} in {len(found)} of {len(pairs)} pairs ({some(found)})")
    if not parts:
        count = plural(len(pairs), "pair")
        return f"deferring the sync is not shown to be faster or slower in any of {count}"
    if len(pairs) == 1:
        (pair,) = pairs
        return f"{pair.b.backend} is {pair.verdict} than {pair.a.backend}"
    return f"deferring the sync is shown to be {' and '.join(parts)}"


def _draw_backend_lines(data: FigureData, axes: Axes, panel: Panel) -> dict[str, PointName]:
    """Draw a line per backend: solid for deferred sync, dashed for eager.

    Returns the names to write at their ends, by backend.
    """
    axes.set(title=style.safe(panel.title), xlabel="N")
    ticks = sorted(map(int, panel.rows["accumulate"].unique()))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    ends = {}
    every = list(panel.rows.groupby("backend", sort=False))
    step = min(MOST_APART, APART / len(every))
    for place, (backend, rows) in enumerate(every):
        look = data.looks[str(backend)]
        aside = 2 ** (step * (place - (len(every) - 1) / 2))
        x, y = aside * floats(rows["accumulate"]), floats(rows["step_time_s"])
        axes.plot(x, y, color=look.colour, linestyle=look.sync_line)
        low, high = floats(rows["step_time_low_s"]), floats(rows["step_time_high_s"])
        axes.vlines(x, low, high, color=look.colour, linewidth=2 * INTERVAL)
        wrong = (rows["status"] != Status.OK).to_numpy()
        style.mark(axes, x[wrong], y[wrong], look, wrong=True, size=4.5)
        style.mark(axes, x[~wrong], y[~wrong], look, size=4.5)
        # The name stands right of all backends at that N.
        right = float(rows["accumulate"].iloc[-1]) * 2 ** (step * len(every) / 2)
        end = right, float(y[-1])
        axes.plot([x[-1], right], [y[-1], y[-1]], color=look.colour, linewidth=TO_NAME)
        ends[str(backend)] = data.point_name(str(backend), rows["outcome"].iloc[-1], end)
    return ends


MOST_LOSSES = 4
"""Panels of losses."""
SHORT = 0.25
"""A panel whose curves have less than this share of the longest one's steps is not drawn: timed
cells have few."""
VISIBLE = 0.01
"""Losses nearer than this to the reference's, in nats per token, have no line of their own."""
LOSS_HEIGHT, AWAY_HEIGHT = 2.2, 1.9
"""Inches of the losses, and of how far they are from the reference's."""
LINE = 1.1
"""Points of a line; one that another of its colour may hide is as much wider."""
RING = 1.4
"""Points by which the rings of such a line are larger."""
NEAR_COLOUR = "#9a9a9a"
"""Of the lines without a name."""
EQUAL = "At the lower edge: equal to the last bit."


def draw_loss_curves(data: FigureData) -> list[Drawing]:
    """Losses at the largest N, and below how far they are from the reference's.

    Backends that differ from it or are invalid have names and colours; the others are grey.
    """
    every = _losses_beside_reference(data)
    if every.empty:
        return []
    steps = every.groupby(CONTEXT, dropna=False)["step"].transform("max") + 1
    is_short = steps < SHORT * steps.max()
    short = every[is_short]["cell_id"].nunique()
    keyed = every[~is_short]
    panels, left_out = data.panels(keyed, CONTEXT, MOST_LOSSES)
    if short:
        cells = plural(short, "cell")
        left_out.append(f"The curves of {cells} are left out: they are much shorter than others.")
    drawn = rows_of_panels(panels)
    invalid = drawn["status"] == Status.INVALID
    apart = drawn["deviation"].isna() | (drawn["deviation"] > VISIBLE) | invalid
    named = _named_curves(data, data.backends_in(drawn[apart]))
    words = data.figure_words(_loss_title(panels))
    words.notes[:0] = left_out
    if invalid.any():
        words.notes.insert(0, "Rings: invalid; the report of the run says why.")
    has_distance = bool((drawn["deviation"] > 0).any())
    if has_distance and (drawn["deviation"] == 0).any():
        words.notes.insert(0, EQUAL)
    heights = [LOSS_HEIGHT]
    if has_distance:
        heights.append(AWAY_HEIGHT)
    figure = new_figure(words, _loss_keys(drawn, named), sum(heights))
    grid = figure.subplots(
        len(heights),
        len(panels),
        squeeze=False,
        sharex="col",
        sharey="row",
        height_ratios=heights,
    )
    for column, panel in enumerate(panels):
        grid[0][column].set_title(style.safe(panel.title))
        grid[-1][column].set_xlabel("optimizer step")
        grid[-1][column].xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _draw_losses(grid[0][column], panel, named)
    grid[0][0].set_ylabel("loss (nats/token)")
    if has_distance:
        for axes, panel in zip(grid[1], panels, strict=True):
            _draw_distances(axes, panel, named)
        _set_distance_scale(grid[1][0], drawn["deviation"])
    columns = [*FACTS, "step", "loss", "reference_loss", "deviation", "entropy_floor"]
    table = keyed[list(dict.fromkeys(columns))]
    return [Drawing("loss_curves", figure, table, words)]


@dataclass(frozen=True, slots=True)
class NamedCurve:
    """How a backend with a line of its own is drawn: another of its colour may lie on it."""

    look: Appearance
    num_above: int
    """Later lines that were of its colour."""

    @property
    def width(self) -> float:
        return LINE * (1 + self.num_above)

    @property
    def ring(self) -> float:
        return 4.5 + RING * self.num_above


def _named_curves(data: FigureData, named: Sequence[str]) -> dict[str, NamedCurve]:
    looks = {backend: data.looks[backend] for backend in named}
    left = Counter(look.colour for look in looks.values())
    found = {}
    for backend, look in style.told_apart(looks).items():
        left[looks[backend].colour] -= 1
        found[backend] = NamedCurve(look, left[looks[backend].colour])
    return found


def _loss_keys(drawn: pd.DataFrame, named: Mapping[str, NamedCurve]) -> list[Key]:
    """The legend: an entry per backend with a line of its own, the reference, and all others."""
    keys: list[Key] = []
    for backend, curve in named.items():
        statuses = drawn[drawn["backend"] == backend]["status"]
        for is_invalid in (statuses == Status.INVALID).unique():
            look = curve.look
            keys.append(style.line_key(backend, look, look.line, wrong=bool(is_invalid)))
    if drawn["reference_loss"].notna().any():
        keys.append((Line2D([], [], color=REFERENCE_COLOUR, linestyle="--"), "the reference"))
    near = drawn[~drawn["backend"].isin(list(named))]
    if len(near):
        count, most = plural(near["backend"].nunique(), "backend"), at_most(near["deviation"].max())
        others = f"{count} within {most} nats/token of it"
        keys.append((Line2D([], [], color=NEAR_COLOUR, linewidth=LINE), others))
    return keys


def _losses_beside_reference(data: FigureData) -> pd.DataFrame:
    """The losses of each backend at its largest N in the first repeat, beside the reference's."""
    cells = data.cells[list(dict.fromkeys([*FACTS, *WORK, "entropy_floor"]))]
    losses = data.tables.losses
    first_repeats = losses.groupby("cell_id")["repeat"].transform("min")
    losses = losses[losses["repeat"] == first_repeats]
    keyed = cells.merge(losses.sort_values("step", kind="stable"), on="cell_id")
    is_reference = keyed["backend"].isin(REFERENCES)
    # Of two references, the one of a single process counts.
    truth = keyed[is_reference].sort_values("backend", kind="stable")
    truth = truth.drop_duplicates([*WORK, "step"])[[*WORK, "step", "loss"]]
    truth = truth.rename(columns={"loss": "reference_loss"})
    keyed = keyed[~is_reference]
    largest = keyed.groupby(["backend", *CONTEXT], dropna=False)["accumulate"].transform("max")
    keyed = keyed[keyed["accumulate"] == largest]
    keyed = keyed.merge(truth, on=[*WORK, "step"], how="left")
    return keyed.assign(deviation=(keyed["loss"] - keyed["reference_loss"]).abs())


def _loss_title(panels: list[Panel]) -> str:
    """Which backends visibly deviate from the reference's loss, and where most.

    If none does, how close to it all stay.
    """
    parts = []
    for panel in panels:
        place = ""
        if panel.title:
            place = f" ({panel.title})"
        parts.append(panel.rows.assign(panel=place))
    rows = pd.concat(parts).dropna(subset=["reference_loss"])
    if rows.empty:
        return "Losses, without a reference to compare them with"
    away = rows["deviation"].fillna(math.inf)
    most = away.max()
    far = list(rows[away > VISIBLE]["backend"].unique())
    if far:
        verb = one_or_many(len(far), "deviates", "deviate")
        text = f"{some(far)} {verb} from the reference's loss"
        if math.isfinite(most):
            text += f" by up to {at_most(most)} nats/token"
        return text + str(rows[away == most]["panel"].iloc[0])
    count = rows["backend"].nunique()
    text = f"All {count} backends stay"
    if count == 1:
        text = f"{rows['backend'].iloc[0]} stays"
    text += f" within {at_most(most)} nats/token of the reference's loss"
    invalid = rows[rows["status"] == Status.INVALID]["backend"].nunique()
    if invalid == 1:
        text += ", but 1 is invalid"
    elif invalid:
        text += f", but {invalid} are invalid"
    return text


def _draw_losses(axes: Axes, panel: Panel, named: Mapping[str, NamedCurve]) -> None:
    """A line per cell, grey without a name, the reference's loss, and its floor."""
    _draw_curves(axes, panel, named, "loss")
    truth = panel.rows.dropna(subset=["reference_loss"]).drop_duplicates("step")
    truth = truth.sort_values("step")
    x, y = floats(truth["step"]), floats(truth["reference_loss"])
    axes.plot(x, y, color=REFERENCE_COLOUR, linestyle="--")
    for floor in panel.rows["entropy_floor"].dropna()[:1]:
        axes.axhline(floor, color=GREY, linestyle=":")
        axes.annotate(
            f"entropy floor {floor:.3f}",
            (0.02, floor),
            (0, -2),
            size=TINY,
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="top",
            color=GREY,
        )
        axes.margins(y=0.12)


def _draw_distances(axes: Axes, panel: Panel, named: Mapping[str, NamedCurve]) -> None:
    """How far each cell's loss is from the reference's."""
    known = panel.rows.dropna(subset=["deviation"])
    _draw_curves(axes, Panel(panel.title, known), named, "deviation")


def _draw_curves(axes: Axes, panel: Panel, named: Mapping[str, NamedCurve], column: str) -> None:
    """A line per cell: those without a name first, in grey."""
    is_named = panel.rows["backend"].isin(list(named))
    for _, rows in panel.rows[~is_named].groupby(["backend", "cell_id"], sort=False):
        axes.plot(floats(rows["step"]), floats(rows[column]), color=NEAR_COLOUR, linewidth=0.6)
    drawn = panel.rows[is_named]
    for i, ((backend, _), rows) in enumerate(drawn.groupby(["backend", "cell_id"], sort=False)):
        curve = named[str(backend)]
        look = curve.look
        wrong = bool((rows["status"] == Status.INVALID).any())
        x, y = floats(rows["step"]), floats(rows[column])
        axes.plot(x, y, color=look.colour, linestyle=look.line, linewidth=curve.width)
        every = max(1, len(rows) // 6, min(len(rows), drawn["backend"].nunique()))
        size = 4.5
        if wrong:
            size = curve.ring
        style.mark(axes, x, y, look, wrong=wrong, size=size, markevery=(i % every, every))


def _set_distance_scale(axes: Axes, distances: pd.Series) -> None:
    """A logarithmic axis, with what is zero at its lower edge."""
    positive = distances[distances > 0].astype(float)
    low, high = float(positive.min()) / 3, float(positive.max()) * 3
    axes.set_yscale("log", nonpositive="clip")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"from the reference's\n(nats/token), {LOG}")
