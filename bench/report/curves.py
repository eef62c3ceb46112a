"""Curves: step time against N, and losses and how far they are from the reference's."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bench.formatting import at_most, plural, some
from bench.judge.columns import WORK
from bench.judge.verdicts import Verdict, scope_words
from bench.plan.cell import REFERENCES, Status, Sync
from bench.report import style
from bench.report.canvas import (
    Drawing,
    FigureWords,
    PointName,
    freeze,
    name_points,
    new_figure,
    set_scale,
)
from bench.report.descriptions import without_sync
from bench.report.figure_data import CONTEXT, FACTS, TIMES, FigureData, Panel, floats, sync_pairs
from bench.report.style import DPI, GREY, INTERVAL, REFERENCE_COLOUR, TINY, Key, text_width

MOST_PANELS, LAST = 3, 2.2
"""Panels, and how many times the width of others the last one has, at whose lines the names are."""
MOST_ROOM = 2.5
"""Inches of the names, at most."""


def draw_step_time(data: FigureData) -> list[Drawing]:
    """Seconds per optimizer step against N; nothing if times cannot be compared, or have one N."""
    known = data.timed[data.timed["step_time_s"].notna()][[*FACTS, *TIMES]]
    if data.analysis.hides_times or known["accumulate"].nunique() < 2:
        return []
    panels, left_out = data.panels(known, CONTEXT, MOST_PANELS)
    drawn = pd.concat([panel.rows for panel in panels])
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
    legend += ". Vertical lines are 95 % intervals"
    if (drawn["status"] != Status.OK).any():
        legend += ", rings are wrong results"
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
    last.set_xlabel("N, micro-batches per optimizer step")
    set_scale(last, "y", pd.concat([panel.rows["step_time_s"] for panel in panels]))
    grid[0].set_ylabel("step time (s)")
    freeze(figure)
    names = {backend: end for backend, end in ends.items() if backend not in keys}
    _leave_room(last, list(names.values()))
    missing = name_points(last, list(names.values()), ["east"])
    unnamed = [backend for backend, name in names.items() if name in missing]
    if not unnamed:
        return figure
    return _step_time_figure(data, panels, words, keys + unnamed)


def _leave_room(axes: Axes, names: Sequence[PointName]) -> None:
    """Extend the axis of N, so that names have room right of the lines."""
    longest = max((text_width(name.text, TINY) for name in names), default=0)
    room = min(longest + 0.3, MOST_ROOM)
    low, high = axes.get_xlim()
    width = axes.get_window_extent().width / DPI
    axes.set_xlim(low, high * (high / low) ** (room / (width - room)))


def _step_time_title(data: FigureData, panel: Panel) -> str:
    """What deferring the sync saves at the largest N, or the range of step times."""
    rows = panel.rows[panel.rows["accumulate"] == panel.extent[1]]
    good = rows[rows["status"] == Status.OK]["step_time_s"]
    if good.empty:
        return "Step time against N"
    setting, scope = data.setting_of(rows.iloc[0]), scope_words(len(data.analysis.pool.runs))
    saved: dict[float, str] = {}
    some_are_slower = False
    for eager, deferred in sync_pairs(rows):
        pair = data.analysis.compared(deferred, eager)
        if pair is None:
            continue
        if pair.time and pair.verdict is Verdict.FASTER:
            saved[pair.time.ratio] = pair.a.backend
        if pair.verdict is Verdict.SLOWER:
            some_are_slower = True
    if saved:
        least = min(saved)
        share, name = 100 * (1 - least), without_sync(saved[least])
        return f"{setting}, deferring the sync saves {share:.0f} % of a step with {name}{scope}"
    if some_are_slower:
        return f"{setting}, deferring the sync saves no time{scope}"
    ends = f"{good.min():.3g} to {good.max():.3g} s"
    return f"{setting}, a step takes {ends}, depending on the backend"


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
    for backend, rows in panel.rows.groupby("backend", sort=False):
        look = data.looks[str(backend)]
        x, y = floats(rows["accumulate"]), floats(rows["step_time_s"])
        axes.plot(x, y, color=look.colour, linestyle=look.sync_line)
        low, high = floats(rows["step_time_low_s"]), floats(rows["step_time_high_s"])
        axes.vlines(x, low, high, color=look.colour, linewidth=2 * INTERVAL)
        wrong = (rows["status"] != Status.OK).to_numpy()
        style.mark(axes, x[wrong], y[wrong], look, wrong=True, size=4.5)
        style.mark(axes, x[~wrong], y[~wrong], look, size=4.5)
        end = float(x[-1]), float(y[-1])
        ends[str(backend)] = data.point_name(str(backend), rows["outcome"].iloc[-1], end)
    return ends


MOST_LOSSES = 4
"""Panels of losses."""
SHORT = 0.25
"""A panel whose curves have less than this share of the longest one's steps is not drawn: timed
cells have few."""
VISIBLE = 0.01
"""Losses nearer than this to the reference's, in nats per token, have no line of their own."""


def draw_loss_curves(data: FigureData) -> list[Drawing]:
    """Losses at the largest N: the reference's, and those of backends that differ or are invalid.

    These have their names in the legend.
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
    drawn = pd.concat([panel.rows for panel in panels])
    invalid = drawn["status"] == Status.INVALID
    apart = drawn["deviation"].isna() | (drawn["deviation"] > VISIBLE) | invalid
    named = data.backends_in(drawn[apart])
    words = data.figure_words(_loss_title(panels))
    words.notes[:0] = left_out
    if invalid.any():
        words.notes.insert(0, "Rings: invalid; the report of the run says why.")
    figure = new_figure(words, _loss_keys(data, drawn, named), 2.8)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(grid, panels, strict=True):
        axes.set(title=style.safe(panel.title), xlabel="optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _draw_losses(data, axes, panel, named)
    grid[0].set_ylabel("loss (nats/token)")
    columns = [*FACTS, "step", "loss", "reference_loss", "deviation", "entropy_floor"]
    table = keyed[list(dict.fromkeys(columns))]
    return [Drawing("loss_curves", figure, table, words)]


def _loss_keys(data: FigureData, drawn: pd.DataFrame, named: Sequence[str]) -> list[Key]:
    """The legend: an entry per backend that has a line of its own, and one for all others."""
    keys: list[Key] = []
    for backend in named:
        look = data.looks[backend]
        statuses = drawn[drawn["backend"] == backend]["status"]
        for is_invalid in (statuses == Status.INVALID).unique():
            key = style.line_key(backend, look, look.line, wrong=bool(is_invalid))
            keys.append(key)
    near = drawn[~drawn["backend"].isin(named)]
    if len(near):
        count, most = plural(near["backend"].nunique(), "backend"), at_most(near["deviation"].max())
        others = f"the reference, and {count} within {most} nats/token of it"
        keys.append((Line2D([], [], color=REFERENCE_COLOUR, linestyle="--"), others))
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
        deviate = "deviate"
        if len(far) == 1:
            deviate = "deviates"
        text = f"{some(far)} {deviate} from the reference's loss"
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


def _draw_losses(data: FigureData, axes: Axes, panel: Panel, named: Collection[str]) -> None:
    """A line per cell of these backends, the reference's loss, and its floor."""
    drawn = panel.rows[panel.rows["backend"].isin(named)]
    for i, ((backend, _), rows) in enumerate(drawn.groupby(["backend", "cell_id"], sort=False)):
        look = data.looks[str(backend)]
        wrong = bool((rows["status"] == Status.INVALID).any())
        x, y = floats(rows["step"]), floats(rows["loss"])
        axes.plot(x, y, color=look.colour, linestyle=look.line)
        every = max(1, len(rows) // 6, min(len(rows), drawn["backend"].nunique()))
        marks = (i % every, every)
        style.mark(axes, x, y, look, wrong=wrong, size=4.5, markevery=marks)
    truth = panel.rows.dropna(subset=["reference_loss"]).drop_duplicates("step").sort_values("step")
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
