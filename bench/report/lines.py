"""Lines: step time against N, and how far losses are from the reference's."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.plan.cell import REFERENCES, Status
from bench.plan.columns import WORK
from bench.report import sheet, style
from bench.report.figure_data import FACTS, TIMES, FigureData, apart, floats, lost, twins
from bench.report.panels import CONTEXT, Drawing, Panel, grid_shape, paged, panel_grid, set_scale, title_lines
from bench.report.style import GREY, INTERVAL, REFERENCE_COLOUR, SMALL, TINY, Key, safe
from bench.words import plural, some

MAX_DIRECT = 18
"""Lines that get labels of their own at the right."""
End = tuple[str, float, float, str]
"""Of a line: its label, last point and colour."""


def draw_step_time(run: FigureData) -> list[Drawing]:
    """Seconds per optimizer step against N; nothing if times cannot be compared, or all have one N."""
    timed = run.others[[world.times_communication for world in run.others["world"]]]
    known = timed[timed["step_time_s"].notna()][[*FACTS, *TIMES]]
    if run.obstacle or known["accumulate"].nunique() < 2:
        return []
    drawings = []
    for page in paged("step_time", run.panels(known, CONTEXT), 4):
        shown = run.shown(page.panels)
        direct = len(page.panels) == 1 and len(shown) <= MAX_DIRECT
        columns, lines = grid_shape(page.panels)
        words = run.words(_saving(run, page.panels[0].rows), timed=True)
        note = "Solid lines with triangles: deferred sync; dashed lines with squares: eager sync. Lines through points "
        words.notes[:0] = [
            *page.left_out,
            f"{note}are 95 % intervals, rings are wrong results. B is the same at every N.",
            *lost(timed, "step_time_s"),
        ]
        keys = [] if direct else [style.backend_key(name, run.looks[name], line=True) for name in shown]
        figure = sheet.sheet(words, [keys], 4.0 if columns == 1 else 2.3 * lines + 0.5, max(2.6, 1.6 * lines))
        grid = panel_grid(figure, page.panels, columns, sharex=True, sharey=True)
        for i, (axes, panel) in enumerate(zip(grid, page.panels, strict=True)):
            ends = _lines(run, axes, panel.rows)
            set_scale(axes, "y", known["step_time_s"])
            axes.set_ylabel("step time (s)" if i % columns == 0 else "")
            axes.set_xlabel("N, micro-batches per optimizer step" if i + columns >= len(page.panels) else "")
            if direct:
                _label_ends(figure, axes, ends)
        drawings.append(Drawing(page.stem, figure, known, words))
    return drawings


def _saving(run: FigureData, cells: pd.DataFrame) -> str:
    """What deferring the sync does at the largest N, or how far step times reach."""
    n = cells["accumulate"].max()
    own = cells[cells["accumulate"] == n]
    good = own[own["status"] == Status.OK]
    if good.empty:
        return "Step time against N"
    saved = {
        str(eager["backend"]).replace("-eager", ""): 100 * (1 - deferred["step_time_s"] / eager["step_time_s"])
        for eager, deferred in twins(own)
        if apart(eager, deferred)
    }
    if saved:
        most = max(saved, key=lambda name: saved[name])
        if saved[most] > 0:
            return f"At N = {n}, deferring the sync saves {saved[most]:.0f} % of a step with {most}"
        return f"At N = {n}, deferring the sync saves no time"
    least, longest = (good["step_time_s"].min(), good["step_time_s"].max())
    return f"At N = {n}, a step takes {least:.3g} to {longest:.3g} s, depending on the backend"


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
        word = str(rows["word"].iloc[-1])
        ends.append((f"{backend} ({word})" if word else str(backend), float(x[-1]), float(y[-1]), look.colour))
    return ends


def _label_ends(figure: Figure, axes: Axes, ends: list[End]) -> None:
    """Labels at the right, in the order of the lines' ends, moved apart by as little as needed."""
    figure.draw_without_rendering()
    box = axes.get_window_extent()
    gap = SMALL * 1.3 / 72 * figure.dpi / box.height
    placed = sorted((float((axes.transData.transform((x, y))[1] - box.y0) / box.height), x, y, text, colour)
                    for text, x, y, colour in ends)  # fmt: skip
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


SHORT = 0.25
"""Share of the longest curve's steps below which a curve is not drawn beside it: timed cells have few."""
VISIBLE = 0.01
"""Nats per token from the reference's loss from which the losses are drawn too: nearer ones are one line."""
LOSS_FLOOR = 1e-9
"""Where a loss equal to the reference's is drawn on a logarithmic axis."""


def draw_loss_curves(run: FigureData) -> list[Drawing]:
    """How far losses at the largest N are from the reference's; above that the losses, if that can be seen in them."""
    keyed = _losses(run)
    if keyed.empty:
        return []
    panels, left_out = _longest(run.panels(keyed, CONTEXT))
    facts = list(dict.fromkeys([*FACTS, "step", "loss", "reference_loss", "deviation", "entropy_floor"]))
    drawings = []
    for page in paged("loss_curves", panels, 4):
        known = any(panel.rows["deviation"].notna().any() for panel in page.panels)
        drawn = pd.concat([panel.rows for panel in page.panels])
        kinds = ["loss"] * bool(not known or drawn["deviation"].max() > VISIBLE) + ["deviation"] * known
        words = run.words(_deviating(drawn))
        words.notes[:0] = [*page.left_out, *left_out, *["Dashed and black: the reference's loss."][: "loss" in kinds]]
        keys: list[Key] = [style.backend_key(name, run.looks[name], line=True) for name in run.shown(page.panels)]
        columns = 2 if len(page.panels) == 4 else len(page.panels)
        lines = math.ceil(len(page.panels) / columns) * len(kinds)
        figure = sheet.sheet(words, [keys], 2.5 * lines + 0.3, 1.8 * lines)
        grid = figure.subplots(lines, columns, squeeze=False, sharex=True)
        for i, panel in enumerate(page.panels):
            for j, value in enumerate(kinds):
                axes = grid[len(kinds) * (i // columns) + j, i % columns]
                axes.sharey(grid[j, 0])
                _curves(run, axes, panel, value)
                if i % columns == 0:
                    said = f"|loss - reference's|\n(0 drawn at 1e{math.log10(LOSS_FLOOR):.0f})"
                    axes.set_ylabel("loss (nats/token)" if value == "loss" else said)
            grid[len(kinds) * (i // columns), i % columns].set_title(title_lines(panel.title, style.WIDTH / columns))
            lowest = grid[len(kinds) * (i // columns + 1) - 1, i % columns]
            if i + columns >= len(page.panels):
                lowest.set_xlabel("optimizer step")
                lowest.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        drawings.append(Drawing(page.stem, figure, keyed[facts], words))
    return drawings


def _losses(run: FigureData) -> pd.DataFrame:
    """The losses of the first repeat of each backend's largest N, beside the reference's."""
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
    """Which backends leave the reference's loss, or how close all stay."""
    wrong = rows[rows["status"] != Status.OK]["backend"].unique()
    if len(wrong):
        away = rows[rows["backend"].isin(wrong)]["deviation"].max()
        by = "" if pd.isna(away) else f" by up to {away:.2g} nats/token"
        return f"{some(list(wrong))} {'leaves' if len(wrong) == 1 else 'leave'} the reference's loss{by}"
    if rows["deviation"].isna().all():
        return "Losses, without a reference to hold them against"
    count = rows["backend"].nunique()
    whose = f"All {count} backends stay" if count > 1 else f"{rows['backend'].iloc[0]} stays"
    return f"{whose} within {rows['deviation'].max():.1g} nats/token of the reference's loss"


def _longest(panels: list[Panel]) -> tuple[list[Panel], list[str]]:
    """The panels whose curves are not much shorter than the longest, and what a figure says of the others."""
    steps = [int(panel.rows["step"].max()) + 1 for panel in panels]
    most = max(steps, default=0)
    kept = [panel for panel, length in zip(panels, steps, strict=True) if length >= SHORT * most]
    others = sum(panel.rows["cell_id"].nunique() for panel in panels) - sum(
        panel.rows["cell_id"].nunique() for panel in kept
    )
    if not others:
        return kept, []
    return kept, [
        f"The curves of {plural(others, 'cell')} are left out of this picture: they have less than {100 * SHORT:.0f} % "
        f"of the {plural(most, 'step')} of the longest. All are in the CSV beside it."
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
