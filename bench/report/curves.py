"""Curves: step time against N, and losses and how far they are from the reference's."""

from __future__ import annotations

import math
from collections.abc import Collection

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
from bench.report.canvas import Drawing, FigureWords, PointName, freeze, name_points, new_figure, set_scale
from bench.report.descriptions import without_sync
from bench.report.figure_data import CONTEXT, FACTS, TIMES, FigureData, Panel, floats, sync_pairs
from bench.report.style import DPI, GREY, INTERVAL, REFERENCE_COLOUR, TINY, text_width

MOST_PANELS, LAST = 3, 2.2
"""Panels, and how many times the width of others the last one has, at whose lines the names are."""
MOST_ROOM = 2.5
"""Inches of the names, at most."""


def draw_step_time(data: FigureData) -> list[Drawing]:
    """Seconds per optimizer step against N; nothing if times cannot be compared, or all have one N."""
    known = data.timed[data.timed["step_time_s"].notna()][[*FACTS, *TIMES]]
    if data.analysis.hides_times or known["accumulate"].nunique() < 2:
        return []
    panels, left_out = data.panels(known, CONTEXT, MOST_PANELS)
    drawn = pd.concat([panel.rows for panel in panels])
    words = data.figure_words(_step_time_title(data, panels[-1]), timed=True)
    dash_dotted = "; dash-dotted lines: deferred all-reduce" * bool((drawn["sync"] == Sync.DEFERRED_ALL_REDUCE).any())
    rings = ", rings are wrong results" * bool((drawn["status"] != Status.OK).any())
    words.notes[:0] = [
        *left_out,
        f"Solid lines with triangles: deferred sync; dashed lines with squares: eager sync{dash_dotted}. Vertical "
        f"lines are 95 % intervals{rings}. B is the same at every N.",
        *data.without_time(),
    ]
    keys = [name for name in data.backends_in(drawn) if name not in set(panels[-1].rows["backend"])]
    return [Drawing("step_time", _step_time_figure(data, panels, words, keys), known, words)]


def _step_time_figure(data: FigureData, panels: list[Panel], words: FigureWords, keys: list[str]) -> Figure:
    """The figure with these backends in its legend, and those whose names have no room at lines of the last panel."""
    looks = {name: data.looks[name] for name in keys}
    figure = new_figure(words, [style.line_key(name, look, look.sync_line) for name, look in looks.items()], 4.0)
    widths = [1] * (len(panels) - 1) + [LAST]
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True, width_ratios=widths)[0]
    ends = [_draw_backend_lines(data, axes, panel) for axes, panel in zip(grid, panels, strict=True)]
    axes = grid[-1]
    axes.set_xlabel("N, micro-batches per optimizer step")
    set_scale(axes, "y", pd.concat([panel.rows["step_time_s"] for panel in panels]))
    grid[0].set_ylabel("step time (s)")
    freeze(figure)
    names = {backend: end for backend, end in ends[-1].items() if backend not in keys}
    room = min(max((text_width(name.text, TINY) for name in names.values()), default=0) + 0.3, MOST_ROOM)
    (low, high), width = axes.get_xlim(), axes.get_window_extent().width / DPI
    axes.set_xlim(low, high * (high / low) ** (room / (width - room)))
    missing = name_points(axes, list(names.values()), ["east"])
    unnamed = [backend for backend, name in names.items() if name in missing]
    return _step_time_figure(data, panels, words, keys + unnamed) if unnamed else figure


def _step_time_title(data: FigureData, panel: Panel) -> str:
    """What deferring the sync saves at the largest N, or the range of step times."""
    rows = panel.rows[panel.rows["accumulate"] == panel.extent[1]]
    good = rows[rows["status"] == Status.OK]["step_time_s"]
    if good.empty:
        return "Step time against N"
    setting, scope = data.setting_of(rows.iloc[0]), scope_words(len(data.analysis.pool.runs))
    pairs = [data.analysis.compared(deferred, eager) for eager, deferred in sync_pairs(rows)]
    saved = {pair.time.ratio: pair.a.backend for pair in pairs if pair and pair.time and pair.verdict is Verdict.FASTER}
    if saved:
        share, name = 100 * (1 - min(saved)), without_sync(saved[min(saved)])
        return f"{setting}, deferring the sync saves {share:.0f} % of a step with {name}{scope}"
    if any(pair and pair.verdict is Verdict.SLOWER for pair in pairs):
        return f"{setting}, deferring the sync saves no time{scope}"
    return f"{setting}, a step takes {good.min():.3g} to {good.max():.3g} s, depending on the backend"


def _draw_backend_lines(data: FigureData, axes: Axes, panel: Panel) -> dict[str, PointName]:
    """Draw a line per backend: solid for deferred sync, dashed for eager. The names to write at their ends."""
    axes.set(title=style.safe(panel.title), xlabel="N")
    ticks = sorted({int(n) for n in panel.rows["accumulate"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    ends = {}
    for backend, rows in panel.rows.groupby("backend", sort=False):
        look, x, y = data.looks[str(backend)], floats(rows["accumulate"]), floats(rows["step_time_s"])
        axes.plot(x, y, color=look.colour, linestyle=look.sync_line)
        low, high = (floats(rows[name]) for name in TIMES[1:])
        axes.vlines(x, low, high, color=look.colour, linewidth=2 * INTERVAL)
        wrong = (rows["status"] != Status.OK).to_numpy()
        for chosen in (wrong, ~wrong):
            style.mark(axes, x[chosen], y[chosen], look, wrong=chosen is wrong, size=4.5)
        end = float(x[-1]), float(y[-1])
        ends[str(backend)] = data.point_name(str(backend), rows["outcome"].iloc[-1], end)
    return ends


MOST_LOSSES = 4
"""Panels of losses."""
SHORT = 0.25
"""A panel whose curves have less than this share of the longest curve's steps is not drawn: timed cells have few."""
VISIBLE = 0.01
"""Losses nearer than this to the reference's, in nats per token, lie on its line, and have no line of their own."""


def draw_loss_curves(data: FigureData) -> list[Drawing]:
    """Losses at the largest N: the reference's, and by name those of backends that are invalid or visibly differ."""
    keyed = _losses_beside_reference(data)
    if keyed.empty:
        return []
    steps = keyed.groupby(CONTEXT, dropna=False)["step"].transform("max") + 1
    short = keyed[steps < SHORT * steps.max()]["cell_id"].nunique()
    keyed = keyed[steps >= SHORT * steps.max()]
    panels, left_out = data.panels(keyed, CONTEXT, MOST_LOSSES)
    facts = list(dict.fromkeys([*FACTS, "step", "loss", "reference_loss", "deviation", "entropy_floor"]))
    drawn = pd.concat([panel.rows for panel in panels])
    invalid = drawn["status"] == Status.INVALID
    apart = drawn["deviation"].isna() | (drawn["deviation"] > VISIBLE) | invalid
    named = data.backends_in(drawn[apart])
    words = data.figure_words(_loss_title(panels))
    if short:
        left_out.append(f"The curves of {plural(short, 'cell')} are left out: they are much shorter than others.")
    words.notes[:0] = [*["Rings: invalid; the report of the run says why."] * bool(invalid.any()), *left_out]
    keys = [
        style.line_key(name, data.looks[name], data.looks[name].line, wrong=wrong)
        for name in named
        for wrong in invalid[drawn["backend"] == name].unique()
    ]
    near = drawn[~drawn["backend"].isin(named)]
    if len(near):
        count, most = plural(near["backend"].nunique(), "backend"), at_most(near["deviation"].max())
        others = f"the reference, and {count} within {most} nats/token of it"
        keys.append((Line2D([], [], color=REFERENCE_COLOUR, linestyle="--"), others))
    figure = new_figure(words, keys, 2.8)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        axes.set(title=style.safe(panel.title), xlabel="optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _draw_losses(data, axes, panel, named)
    figure.axes[0].set_ylabel("loss (nats/token)")
    return [Drawing("loss_curves", figure, keyed[facts], words)]


def _losses_beside_reference(data: FigureData) -> pd.DataFrame:
    """The losses of each backend at its largest N in the first repeat, beside the reference's."""
    cells = data.cells[list(dict.fromkeys([*FACTS, *WORK, "entropy_floor"]))]
    losses = data.tables.losses
    losses = losses[losses["repeat"] == losses.groupby("cell_id")["repeat"].transform("min")]
    keyed = cells.merge(losses.sort_values("step", kind="stable"), on="cell_id")
    truth = keyed[keyed["backend"].isin(REFERENCES)].sort_values("backend", kind="stable")  # single processes first
    truth = truth.drop_duplicates([*WORK, "step"])[[*WORK, "step", "loss"]]
    keyed = keyed[~keyed["backend"].isin(REFERENCES)]
    largest = keyed.groupby(["backend", *CONTEXT], dropna=False)["accumulate"].transform("max")
    keyed = keyed[keyed["accumulate"] == largest]
    keyed = keyed.merge(truth.rename(columns={"loss": "reference_loss"}), on=[*WORK, "step"], how="left")
    return keyed.assign(deviation=(keyed["loss"] - keyed["reference_loss"]).abs())


def _loss_title(panels: list[Panel]) -> str:
    """Which backends visibly deviate from the reference's loss, and where most, or how close to it all stay."""
    rows = pd.concat([panel.rows.assign(panel=f" ({panel.title})" if panel.title else "") for panel in panels])
    rows = rows.dropna(subset=["reference_loss"])
    if rows.empty:
        return "Losses, without a reference to compare them with"
    away = rows["deviation"].fillna(math.inf)
    most, far = away.max(), list(rows[away > VISIBLE]["backend"].unique())
    if far:
        by = f" by up to {at_most(most)} nats/token" * math.isfinite(most)
        by += str(rows[away == most]["panel"].iloc[0])
        return f"{some(far)} {'deviates' if len(far) == 1 else 'deviate'} from the reference's loss{by}"
    count, wrong = (found["backend"].nunique() for found in (rows, rows[rows["status"] == Status.INVALID]))
    whose = f"All {count} backends stay" if count > 1 else f"{rows['backend'].iloc[0]} stays"
    but = f", but {wrong} {'is' if wrong == 1 else 'are'} invalid" if wrong else ""
    return f"{whose} within {at_most(most)} nats/token of the reference's loss{but}"


def _draw_losses(data: FigureData, axes: Axes, panel: Panel, named: Collection[str]) -> None:
    """A line per cell of these backends, the reference's loss, and its floor."""
    drawn = panel.rows[panel.rows["backend"].isin(named)]
    for i, ((backend, _), rows) in enumerate(drawn.groupby(["backend", "cell_id"], sort=False)):
        look, wrong = data.looks[str(backend)], bool((rows["status"] == Status.INVALID).any())
        x, y = floats(rows["step"]), floats(rows["loss"])
        axes.plot(x, y, color=look.colour, linestyle=look.line)
        every = max(1, len(rows) // 6, min(len(rows), drawn["backend"].nunique()))
        style.mark(axes, x, y, look, wrong=wrong, size=4.5, markevery=(i % every, every))
    truth = panel.rows.dropna(subset=["reference_loss"]).drop_duplicates("step").sort_values("step")
    axes.plot(floats(truth["step"]), floats(truth["reference_loss"]), color=REFERENCE_COLOUR, linestyle="--")
    for floor in panel.rows["entropy_floor"].dropna()[:1]:
        axes.axhline(floor, color=GREY, linestyle=":")
        axes.annotate(f"entropy floor {floor:.3f}", (0.02, floor), (0, -2), size=TINY,
                      xycoords=axes.get_yaxis_transform(), textcoords="offset points", va="top",
                      color=GREY)  # fmt: skip
        axes.margins(y=0.12)
