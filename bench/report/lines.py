"""Lines: step time against N, and how far losses are from the reference's."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.plan.axes import WORK
from bench.plan.cell import REFERENCES, Status
from bench.report import sheet, style
from bench.report.figure_data import CONTEXT, FACTS, TIMES, FigureData, Panel, apart, failure, floats, lost, twins
from bench.report.sheet import Drawing, panel_grid, set_scale, title_lines
from bench.report.style import GREY, INTERVAL, REFERENCE_COLOUR, SMALL, TINY, Key, safe
from bench.words import plural, some

MAX_DIRECT = 18
"""Lines that get labels of their own at the right; more are in a legend."""
BELOW = 0.5
"""Inches of the x axis's words."""
MOST_PANELS = 3
End = tuple[str, float, float, str]
"""The label of a line, its last point and its colour."""


def draw_step_time(run: FigureData) -> list[Drawing]:
    """Seconds per optimizer step against N; nothing if times cannot be compared, or all have one N."""
    known = run.timed[run.timed["step_time_s"].notna()][[*FACTS, *TIMES]]
    if run.obstacle or known["accumulate"].nunique() < 2:
        return []
    panels, left_out = run.panels(known, CONTEXT, MOST_PANELS)
    drawn = pd.concat([panel.rows for panel in panels])
    shown = run.shown(drawn)
    direct = len(panels) == 1 and len(shown) <= MAX_DIRECT
    columns = min(len(panels), 2 if len(panels) == 4 else 3)
    lines = math.ceil(len(panels) / columns)
    words = run.words(_saving(panels[-1]), timed=True)
    words.notes[:0] = [
        *left_out,
        "Solid lines with triangles: deferred sync; dashed lines with squares: eager sync. Vertical lines are 95 % "
        "intervals, rings are wrong results. B is the same at every N.",
        *lost(run.timed, "step_time_s"),
    ]
    keys = [] if direct else [style.line_key(name, run.looks[name]) for name in shown]
    figure = sheet.sheet(words, [keys], 4.0 if columns == 1 else 2.3 * lines + 0.5, max(2.6, 1.6 * lines))
    grid = panel_grid(figure, [panel.title for panel in panels], columns, sharex=True, sharey=True)
    for i, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        ends = _lines(run, axes, panel.rows)
        set_scale(axes, "y", drawn["step_time_s"])
        axes.set_ylabel("step time (s)" if i % columns == 0 else "")
        axes.set_xlabel("N, micro-batches per optimizer step" if i + columns >= len(panels) else "")
        if direct:
            _label_ends(figure, axes, ends)
    return [Drawing("step_time", figure, known, words)]


def _saving(panel: Panel) -> str:
    """What deferring the sync saves at the largest N, or the range of step times."""
    n = panel.rows["accumulate"].max()
    own = panel.rows[panel.rows["accumulate"] == n]
    good = own[own["status"] == Status.OK]
    if good.empty:
        return "Step time against N"
    where = ", ".join(filter(None, (f"At N = {n}", panel.title)))
    saved = {
        str(eager["backend"]).replace("-eager", ""): 100 * (1 - deferred["step_time_s"] / eager["step_time_s"])
        for eager, deferred in twins(own)
        if apart(eager, deferred)
    }
    if saved:
        most = max(saved, key=lambda name: saved[name])
        if saved[most] > 0:
            return f"{where}, deferring the sync saves {saved[most]:.0f} % of a step with {most}"
        return f"{where}, deferring the sync saves no time"
    least, longest = (good["step_time_s"].min(), good["step_time_s"].max())
    return f"{where}, a step takes {least:.3g} to {longest:.3g} s, depending on the backend"


def _lines(run: FigureData, axes: Axes, cells: pd.DataFrame) -> list[End]:
    """One line per backend, of one hue per framework: solid for deferred sync, dashed for eager."""
    ticks = sorted({int(n) for n in cells["accumulate"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    ends = []
    for backend, rows in cells.groupby("backend", sort=False):
        look, x, y = run.looks[str(backend)], floats(rows["accumulate"]), floats(rows["step_time_s"])
        axes.plot(x, y, color=look.colour, linestyle="--" if look.marker == style.SYNC_MARKERS["eager"] else "-")
        low, high = (floats(rows[name]) for name in TIMES[1:])
        axes.vlines(x, low, high, color=look.colour, linewidth=2 * INTERVAL)
        wrong = (rows["status"] != Status.OK).to_numpy()
        for chosen in (wrong, ~wrong):
            style.mark(axes, x[chosen], y[chosen], look, wrong=chosen is wrong, size=4.5)
        word = failure(rows["outcome"].iloc[-1])
        ends.append((f"{backend} ({word})" if word else str(backend), float(x[-1]), float(y[-1]), look.colour))
    return ends


def _label_ends(figure: Figure, axes: Axes, ends: list[End]) -> None:
    """Labels at the right, in the order of the lines' ends, moved apart by as little as needed."""
    layout = figure.get_layout_engine()
    room = 1.0 if layout is None else layout.get()["rect"][3]
    gap = SMALL * 1.3 / 72 / (room * figure.get_figheight() - BELOW)
    axes.set_ylim(axes.get_ylim())  # asked for, limits are final
    share = axes.transScale + axes.transLimits
    placed = sorted((float(share.transform((x, y))[1]), x, y, text, colour) for text, x, y, colour in ends)
    wanted = np.array([end[0] for end in placed])
    up, down = wanted.copy(), wanted.copy()
    for i in range(1, len(wanted)):
        up[i] = max(up[i], up[i - 1] + gap)
        down[-1 - i] = min(down[-1 - i], down[-i] - gap)
    middle = (up + down) / 2
    steps = gap * np.arange(len(wanted))
    middle = np.maximum(np.minimum(middle, 1 - steps[::-1]), steps)
    for (_, x, y, text, colour), height in zip(placed, middle, strict=True):
        label = safe(style.fit(text, style.NAME_WIDTH))
        axes.annotate(label, (x, y), (1.035, height), xycoords="data", textcoords="axes fraction", va="center",
                      size=SMALL, color=colour, arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5,
                      "alpha": 0.6, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)})  # fmt: skip


MOST_LOSSES = 4
"""Panels of losses."""
SHORT = 0.25
"""A panel whose curves have less than this share of the longest curve's steps is not drawn: timed cells have few."""
VISIBLE = 0.01
"""The losses themselves are drawn if they are so many nats per token from the reference's: nearer ones are one line."""
LOSS_FLOOR = 1e-9
"""Where a loss equal to the reference's is drawn on a logarithmic axis."""


def draw_loss_curves(run: FigureData) -> list[Drawing]:
    """How far losses at the largest N are from the reference's, and above that the losses, if they visibly differ."""
    keyed = _losses(run)
    if keyed.empty:
        return []
    keyed, short = _longest(keyed)
    panels, left_out = run.panels(keyed, CONTEXT, MOST_LOSSES)
    facts = list(dict.fromkeys([*FACTS, "step", "loss", "reference_loss", "deviation", "entropy_floor"]))
    drawn = pd.concat([panel.rows for panel in panels])
    known = drawn["deviation"].notna().any()
    kinds = ["loss"] * bool(not known or drawn["deviation"].max() > VISIBLE) + ["deviation"] * bool(known)
    words = run.words(_deviating(drawn))
    words.notes[:0] = [*left_out, *short, *["Dashed and black: the reference's loss."][: "loss" in kinds]]
    keys: list[Key] = [style.line_key(name, run.looks[name]) for name in run.shown(drawn)]
    columns = 2 if len(panels) == 4 else len(panels)
    lines = math.ceil(len(panels) / columns) * len(kinds)
    figure = sheet.sheet(words, [keys], 2.5 * lines + 0.3, 1.8 * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True)
    for i, panel in enumerate(panels):
        place, column = len(kinds) * (i // columns), i % columns
        for j, value in enumerate(kinds):
            axes = grid[place + j, column]
            axes.sharey(grid[j, 0])
            _curves(run, axes, panel, value)
            if column == 0:
                said = f"|loss - reference's|\n(0 drawn at 1e{math.log10(LOSS_FLOOR):.0f})"
                axes.set_ylabel("loss (nats/token)" if value == "loss" else said)
        grid[place, column].set_title(title_lines(panel.title, style.WIDTH / columns))
        if i + columns >= len(panels):
            lowest = grid[place + len(kinds) - 1, column]
            lowest.set_xlabel("optimizer step")
            lowest.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return [Drawing("loss_curves", figure, keyed[facts], words)]


def _losses(run: FigureData) -> pd.DataFrame:
    """The losses of each backend at its largest N in the first repeat, beside the reference's."""
    cells = run.cells[list(dict.fromkeys([*FACTS, *WORK, "entropy_floor"]))]
    losses = run.tables.losses
    losses = losses[losses["repeat"] == losses.groupby("cell_id")["repeat"].transform("min")]
    keyed = cells.merge(losses.sort_values("step", kind="stable"), on="cell_id")
    truth = keyed[keyed["backend"].isin(REFERENCES)].sort_values("backend", kind="stable")  # single processes first
    truth = truth.drop_duplicates([*WORK, "step"])[[*WORK, "step", "loss"]]
    keyed = keyed[~keyed["backend"].isin(REFERENCES)]
    largest = keyed.groupby(["backend", *CONTEXT], dropna=False)["accumulate"].transform("max")
    keyed = keyed[keyed["accumulate"] == largest]
    keyed = keyed.merge(truth.rename(columns={"loss": "reference_loss"}), on=[*WORK, "step"], how="left")
    return keyed.assign(deviation=(keyed["loss"] - keyed["reference_loss"]).abs())


def _deviating(rows: pd.DataFrame) -> str:
    """Which backends leave the reference's loss, or how close to it all stay."""
    wrong = rows[rows["status"] != Status.OK]["backend"].unique()
    if len(wrong):
        away = rows[rows["backend"].isin(wrong)]["deviation"].max()
        by = "" if pd.isna(away) else f" by up to {away:.2g} nats/token"
        return f"{some(list(wrong))} {'leaves' if len(wrong) == 1 else 'leave'} the reference's loss{by}"
    if rows["deviation"].isna().all():
        return "Losses, without a reference to compare them with"
    count = rows["backend"].nunique()
    whose = f"All {count} backends stay" if count > 1 else f"{rows['backend'].iloc[0]} stays"
    return f"{whose} within {rows['deviation'].max():.1g} nats/token of the reference's loss"


def _longest(keyed: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The rows of panels whose curves are not much shorter than the longest, and a sentence on the others."""
    steps = keyed.groupby(CONTEXT, dropna=False)["step"].transform("max") + 1
    kept = keyed[steps >= SHORT * steps.max()]
    others = keyed["cell_id"].nunique() - kept["cell_id"].nunique()
    if not others:
        return kept, []
    return kept, [
        f"The curves of {plural(others, 'cell')} are left out: they have less than {100 * SHORT:.0f} % of the "
        f"{plural(int(steps.max()), 'step')} of the longest."
    ]


def _curves(run: FigureData, axes: Axes, panel: Panel, value: str) -> None:
    """A line per cell, and the reference's loss and its floor."""
    if value == "deviation":
        axes.set_yscale("log")
    for i, ((backend, _), rows) in enumerate(panel.rows.groupby(["backend", "cell_id"], sort=False)):
        look, wrong = run.looks[str(backend)], bool((rows["status"] != Status.OK).any())
        x, y = floats(rows["step"]), floats(rows[value])
        y = y.clip(min=LOSS_FLOOR) if value == "deviation" else y
        axes.plot(x, y, color=look.colour, linestyle=look.line)
        every = max(1, len(rows) // 6, min(len(rows), panel.rows["backend"].nunique()))
        style.mark(axes, x, y, look, wrong=wrong, size=4.5, markevery=(i % every, every))
    if value == "loss":
        truth = panel.rows.dropna(subset=["reference_loss"]).drop_duplicates("step").sort_values("step")
        axes.plot(floats(truth["step"]), floats(truth["reference_loss"]), color=REFERENCE_COLOUR, linestyle="--")
        for floor in panel.rows["entropy_floor"].dropna()[:1]:
            axes.axhline(floor, color=GREY, linestyle=":")
            axes.annotate(f"entropy floor {floor:.3f}", (0.02, floor), (0, -2), size=TINY,
                          xycoords=axes.get_yaxis_transform(), textcoords="offset points", va="top",
                          color=GREY)  # fmt: skip
            axes.margins(y=0.12)
