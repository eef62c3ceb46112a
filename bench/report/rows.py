"""One row per backend: optimizer steps, tokens per second, and how much trials of one cell differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bench.judge.sides import restless
from bench.judge.statistics import Interval
from bench.judge.verdicts import Reason, band
from bench.plan.cell import REFERENCE, REFERENCES, Precision, Status
from bench.report import sheet, style
from bench.report.figure_data import SAID_OF_CELLS, FigureData, cells_with, interval_line, with_cells
from bench.report.panels import CONTEXT, CSV_COLUMNS, REFERENCE_KEYS, Drawing, Panel, paged, panel_grid
from bench.report.style import GREY, REFERENCE_COLOUR, SMALL, Key, safe
from bench.words import plural

INTERVAL_ON_LINE = 2.0
"""Points of an interval that lies on a thinner line."""
Painter = Callable[[Axes, int, pd.DataFrame, Panel], str]
"""Draws a cell's trials in a row and returns the word for the right margin."""


def _rows(
    run: FigureData,
    stem: str,
    trials: pd.DataFrame,
    value: str,
    title: str,
    label: str,
    keys: list[Key],
    paint: Painter,
    also: list[str],
    limits: list[str],
    remark: str,
    refused: str = "",
) -> list[Drawing]:
    """A panel per N with a row per backend."""
    panels = run.panels(trials, [*CONTEXT, "accumulate"], [value])
    shown = run.shown(panels, reference=True)
    if not panels:
        return []
    labels = [style.fit(name, style.NAME_WIDTH) for name in shown]
    names = max(style.text_width(label, SMALL) for label in labels)
    most = min(4, max(1, int((style.WIDTH - 0.4 - names) / 1.3)))
    row = 0.135 if len(shown) > 8 else 0.19
    per_page = most * max(1, int(4.8 / (row * len(shown) + 0.3)))
    drawings = []
    painted = [name for name in ("cell_id", "backend", "accumulate", "status", "valid", *also) if name in trials]
    data = trials[[*CSV_COLUMNS, *also]]
    for page in paged(stem, panels, per_page):
        chunk = page.panels
        lines = math.ceil(len(chunk) / most)
        columns = math.ceil(len(chunk) / lines)
        words = run.words(title)
        words.subtitle += f"; {refused}" if refused else ""
        words.notes[:0] = [*page.left_out, f"Right margins: {remark}."]
        height = lines * (row * len(shown) + 0.3) + 0.35
        figure = sheet.sheet(words, [keys, run.signs(trials)], height, height)
        grid = panel_grid(figure, chunk, columns, names + 0.4, sharex=True, sharey=True)
        for i, (axes, panel) in enumerate(zip(grid, chunk, strict=True)):
            axes.set_yticks(range(len(shown)), [safe(label) for label in labels])
            axes.set_ylim(len(shown) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
            axes.set_xlabel(label if i + columns >= len(chunk) else "")
            both = pd.concat([panel.reference[painted], panel.trials[painted]])
            for (backend, _), cell in both.groupby(["backend", "cell_id"], sort=False):
                at = shown.index(str(backend))
                margin = paint(axes, at, cell, panel)
                axes.text(1.02, at, safe(margin), transform=axes.get_yaxis_transform(), va="center", size=6, color=GREY)
            axes.set_xlim(0, 1.08 * float(trials[limits].max().max()))
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        drawings.append(Drawing(page.stem, figure, data, words))
    return drawings


def draw_optimizer_steps(run: FigureData) -> list[Drawing]:
    """How many optimizer steps were due, were seen, and were reported."""
    counts = [f"optimizer_steps_{kind}" for kind in ("expected", "observed", "reported")]
    base: dict[str, Any] = {"linestyle": "none", "markersize": 9}
    due = base | {"marker": "|", "color": GREY, "markeredgewidth": 2.5, "alpha": 0.5}
    said = base | {"marker": "o", "color": "#000000", "markerfacecolor": "none", "markeredgewidth": 0.7}

    def paint(axes: Axes, at: int, cell: pd.DataFrame, _: Panel) -> str:
        look = run.looks[cell["backend"].iloc[0]]
        for expected in cell[counts[0]].dropna().unique():
            axes.plot([expected], [at], **due)
        seen = cell[cell[counts[1]].notna()]
        for observed in seen[counts[1]].unique():
            alike = seen[seen[counts[1]] == observed]
            style.mark(axes, [float(observed)], [at], look, valid=bool((alike["status"] == Status.OK).all()), size=5)
        for reported in cell[counts[2]].dropna().unique():
            axes.plot([reported], [at], **said)
        return str(cell["status"].iloc[0]) if seen.empty else "" if cell[counts[2]].notna().any() else "none"

    keys: list[Key] = [
        (Line2D([], [], **due), "expected"),
        (Line2D([], [], linestyle="none", marker="s", color=GREY, markersize=5), "observed at the inner optimizer"),
        (Line2D([], [], **said), "reported by the framework"),
    ]
    also = [*counts, "optimizer_steps_reported_by"]
    return _rows(
        run,
        "optimizer_steps",
        run.trials[[*CSV_COLUMNS, *also]],
        counts[1],
        "Optimizer steps expected, observed and reported",
        "optimizer steps",
        keys,
        paint,
        also,
        counts,
        '"none" where none reported: the framework gave no count; other words say how the cell failed',
    )


def draw_speed_up(run: FigureData) -> list[Drawing]:
    """Tokens per second of every backend, and how many times the reference's that is."""
    value = "tokens_per_s"
    trials = with_cells(run, run.trials, value)
    # What compare calls not comparable is drawn, and no number is said of it.
    ok = run.trials[run.trials["status"] == Status.OK]
    disturbed = [cell_id for cell_id, rows in ok.groupby("cell_id") if restless(rows)]
    trials["disturbed"] = trials["cell_id"].isin(disturbed)
    reference = trials[(trials["backend"] == REFERENCE) & trials["valid"]]
    good = reference.groupby(REFERENCE_KEYS).agg(
        reference_tokens_per_s=(f"{value}_cell", "first"), reference_disturbed=("disturbed", "first")
    )
    trials = trials.merge(good, on=REFERENCE_KEYS, how="left")
    # The reference is fp32, and what is invalid has no ratio.
    fair = trials["valid"] & (trials["precision"] == Precision.FP32) & trials["reference_tokens_per_s"].notna()
    refused = fair & (trials["disturbed"] | trials["reference_disturbed"].eq(True))
    ratio = trials[f"{value}_cell"] / trials["reference_tokens_per_s"]
    trials["speed_up"] = ratio.where(fair & ~refused)

    def paint(axes: Axes, at: int, cell: pd.DataFrame, _: Panel) -> str:
        first, look = cell.iloc[0], run.looks[cell["backend"].iloc[0]]
        if pd.isna(first[f"{value}_cell"]):
            return str(first["status"])
        axes.plot([0, first[f"{value}_cell"]], [at, at], color=look.colour, linewidth=0.8)
        for valid, part in cell[cell[value].notna()].groupby(cell["status"] == Status.OK):
            style.mark(axes, part[value].astype(float), [at] * len(part), look, valid=bool(valid), size=2.2, alpha=0.6)
        _, interval = interval_line(cells_with(cell, value), value)
        axes.plot(interval, [at] * len(interval), color=look.colour, linewidth=INTERVAL_ON_LINE)
        style.mark(axes, [first[f"{value}_cell"]], [at], look, valid=bool(first["valid"]), size=5)
        if not first["valid"]:
            return "invalid"
        return "" if pd.isna(first["speed_up"]) else f"{first['speed_up']:.2f}x"

    remark = "parallel speed-up, tokens/s over the reference's; or how the cell failed" if len(good) else "failed cells"
    also = [value, *(f"{value}_{end}" for end in ("cell", "low", "high")), "reference_tokens_per_s", "speed_up"]
    return _rows(
        run,
        "speed_up",
        trials,
        value,
        "Speed: tokens per second",
        "tokens/s",
        [],
        paint,
        also,
        [value],
        f"{remark}; small points are trials, large ones their cells ({SAID_OF_CELLS[value]})",
        _refused(trials[refused]),
    )


def _refused(trials: pd.DataFrame) -> str:
    """Why speed-ups of cells are not said, with how many; empty if all are."""
    cells = trials.loc[~trials["backend"].isin(REFERENCES), "cell_id"].nunique()
    return f"no speed-up of {plural(cells, 'cell')}: {Reason.DISTURBED} there or at the reference" if cells else ""


FLOOR_COLOUR = "#f3dfb4"
INSIDE, ROOM = 0.98, 1.4
"""Share of the trials that the axis shows at their place, and how much farther than those it reaches."""
LEAST = 0.5
"""Per cent that the axis reaches to either side, at least."""
DEVIATION = "deviation_percent"


def deviations(trials: pd.DataFrame) -> pd.DataFrame:
    """The good trials of cells that have two, in the order in which they ran, with DEVIATION from the cell's median."""
    good = trials[(trials["status"] == Status.OK) & trials["step_time_s"].notna() & ~trials["backend"].isin(REFERENCES)]
    times = good["step_time_s"].astype(float)
    middle = times.groupby(good["cell_id"]).transform("median")
    found = good.assign(**{DEVIATION: 100 * (times / middle - 1)})
    found = found[found.groupby("cell_id")["repeat"].transform("size") > 1]
    order = ["slot"] if found["slot"].notna().all() else ["repeat"]
    found = found.sort_values(order, kind="stable")
    return found.assign(place=np.arange(1, len(found) + 1))


def draw_noise(run: FigureData, floor: Interval | None) -> list[Drawing]:
    """A point per trial; nothing if no cell has two good ones."""
    trials = deviations(run.trials)
    if trials.empty:
        return []
    noise = None if floor is None or floor.low is None else 100 * (band(floor) - 1)
    away = trials[DEVIATION].abs()
    reach = max(LEAST, noise or 0.0, float(away.quantile(INSIDE))) * ROOM
    beyond = int((away > reach).sum())
    words = run.words("How far each trial is from the median of its cell")
    first = ["Good trials in the order in which they ran: a slope is drift of the machine, two clouds are two modes."]
    if beyond:
        first.append(f"Triangles at the edge: {plural(beyond, 'trial')} farther away, up to {away.max():.3g} %.")
    if noise is None:
        first.append("The noise floor is unknown: there is no A/A pair, or too few trials of it.")
    words.notes[:0] = first
    frameworks = list(dict.fromkeys(run.trials["framework"]))
    colours = style.colours(frameworks)
    shown = [name for name in frameworks if (trials["framework"] == name).any()]
    keys: list[Key] = [
        (Line2D([], [], linestyle="none", marker="o", markersize=3, color=colours[name]), name) for name in shown
    ]
    if noise is not None:
        keys.append((Patch(color=FLOOR_COLOUR), f"noise floor, {noise:.2g} %"))
    figure = sheet.sheet(words, [keys], 2.6, 2.6)
    axes = figure.subplots()
    _points(axes, trials, colours, reach)
    if noise is not None:
        axes.axhspan(-noise, noise, color=FLOOR_COLOUR, zorder=0.5, linewidth=0)
    axes.axhline(0, color=REFERENCE_COLOUR, linewidth=0.7, zorder=1.2)
    axes.set_xlabel("trials, in the order in which they ran")
    axes.set_ylabel("from the cell's median (%)")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return [Drawing("noise", figure, trials[[*CSV_COLUMNS, "place", "step_time_s", DEVIATION]], words)]


def _points(axes: Axes, trials: pd.DataFrame, colours: dict[str, str], reach: float) -> None:
    """Those beyond the axis's reach are triangles at its edge."""
    for framework, rows in trials.groupby("framework", sort=False):
        values, places = rows[DEVIATION].to_numpy(dtype=float), rows["place"].to_numpy(dtype=float)
        for marker, chosen in (("o", abs(values) <= reach), ("^", values > reach), ("v", values < -reach)):
            clipped = np.clip(values[chosen], -reach, reach)
            size = 2.4 if marker == "o" else 4.5
            axes.plot(
                places[chosen], clipped, linestyle="none", marker=marker, markersize=size, color=colours[str(framework)]
            )
    axes.set_ylim(-1.06 * reach, 1.06 * reach)
