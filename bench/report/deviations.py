"""Trials around the medians of their cells, and cells whose counts are not what they should be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bench.formatting import plural, some
from bench.judge.samples import block_effects
from bench.plan.cell import REFERENCES, Status
from bench.report import style
from bench.report.canvas import Drawing, name_rows, new_figure
from bench.report.figure_data import CONTEXT, FACTS, FigureData, floats
from bench.report.style import GREY, REFERENCE_COLOUR, Key

MOST_ODD = 30
"""Cells in a figure of counts; the CSV has all."""
STEPS = {"expected": "optimizer_steps_expected", "observed": "optimizer_steps_observed",
         "reported by the framework": "optimizer_steps_reported"}  # fmt: skip
HELD = {"by its formula": "expected_bytes", "measured": "bytes"}


MARKS: tuple[dict[str, Any], ...] = (
    {"marker": "|", "markersize": 11, "color": GREY},
    {"marker": "o", "markersize": 5, "color": REFERENCE_COLOUR},
    {"marker": "o", "markersize": 9, "color": "#D55E00", "markerfacecolor": "none"},
)
"""How what should be, what was, and what was reported is drawn."""


def draw_optimizer_steps(run: FigureData) -> list[Drawing]:
    """The cells that took or report a wrong number of optimizer steps; nothing if there are none."""
    expected, observed, reported = (run.others[name] for name in STEPS.values())
    odd = (observed.notna() & (observed != expected)) | (reported.notna() & (reported != observed))
    cells = run.others[odd.fillna(False)]
    title = "counts its optimizer steps wrong" if len(cells) == 1 else "count their optimizer steps wrong"
    return _odd(run, "optimizer_steps", cells, STEPS, title, "optimizer steps")


def held_gradients(memory: pd.DataFrame) -> pd.DataFrame:
    """The rows of the memory table on gradients held between micro-batches, where a formula gives their bytes."""
    return memory[(memory["category"] == "held_gradients") & memory["expected_bytes"].notna()]


def held_sentence(memory: pd.DataFrame) -> str:
    """How many cells hold the bytes of gradients that their formula gives; empty if there is no formula."""
    rows = held_gradients(memory)
    right = int((rows["bytes"] == rows["expected_bytes"]).sum())
    if rows.empty:
        return ""
    return (
        f"Between micro-batches, {right} of {plural(len(rows), 'cell')} hold exactly the bytes of gradients that their "
        "formula gives."
    )


def draw_held_gradients(run: FigureData) -> list[Drawing]:
    """The cells that do not hold the bytes of gradients that their formula gives; nothing if there are none."""
    rows = held_gradients(run.tables.memory)
    wrong = rows[rows["bytes"] != rows["expected_bytes"]].drop_duplicates("cell_id").set_index("cell_id")
    cells = run.others.join(wrong[["bytes", "expected_bytes"]], how="inner")
    title = f"{'holds' if len(cells) == 1 else 'hold'} other gradients between micro-batches than expected"
    return _odd(run, "held_gradients", cells, HELD, title, "bytes of gradients held on a rank")


def _odd(
    run: FigureData, stem: str, cells: pd.DataFrame, columns: Mapping[str, str], title: str, label: str
) -> list[Drawing]:
    """A row per cell, with a mark for each of these columns."""
    if cells.empty:
        return []
    shown = cells[:MOST_ODD]
    names = [f"{cell.backend} N = {cell.accumulate}" for cell in shown.itertuples()]
    marks = dict(zip(columns, MARKS, strict=False))
    words = run.words(f"{some(list(dict.fromkeys(cells['backend'])))} {title}")
    if len(cells) > len(shown):
        words.notes.insert(0, f"{len(cells) - len(shown)} more cells are in the CSV beside this figure.")
    keys: list[Key] = [(Line2D([], [], linestyle="none", **mark), name) for name, mark in marks.items()]
    figure = new_figure(words, keys, 0.2 * len(shown) + 0.6)
    axes = figure.subplots()
    for name, column in columns.items():
        axes.plot(floats(shown[column]), range(len(shown)), linestyle="none", markeredgewidth=1.3, **marks[name])
    name_rows(axes, names)
    axes.set_xlim(left=0)
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return [Drawing(stem, figure, cells[[*FACTS, *columns.values()]], words)]


INSIDE, ROOM = 0.98, 1.4
"""Share of the trials that are drawn at their true place, and how much farther than these the axis reaches."""
LEAST = 0.5
"""Per cent that the axis reaches to either side, at least."""
DEVIATION = "deviation_percent"
"""Column: how far a trial's step time is from the median of its cell."""
COLUMNS = ["run_id", "cell_id", "repeat", "backend", "accumulate", *CONTEXT, "place", "step_time_s", DEVIATION]


def deviations(trials: pd.DataFrame) -> pd.DataFrame:
    """The good trials of cells with at least two, in the order in which they ran, with DEVIATION."""
    good = trials[(trials["status"] == Status.OK) & trials["step_time_s"].notna() & ~trials["backend"].isin(REFERENCES)]
    times = good["step_time_s"].astype(float)
    middle = times.groupby(good["cell_id"]).transform("median")
    found = good.assign(**{DEVIATION: 100 * (times / middle - 1)})
    found = found[found.groupby("cell_id")["repeat"].transform("size") > 1]
    order = ["slot"] if found["slot"].notna().all() else ["repeat"]
    found = found.sort_values(order, kind="stable")
    return found.assign(place=np.arange(1, len(found) + 1))


def draw_noise(run: FigureData) -> list[Drawing]:
    """A point per trial; nothing if no cell has two good ones."""
    timed = [world.times_communication for world in run.trials["world"]]
    trials = deviations(run.trials[timed])
    if trials.empty:
        return []
    away = trials[DEVIATION].abs()
    reach = max(LEAST, float(away.quantile(INSIDE))) * ROOM
    beyond = int((away > reach).sum())
    typical = f"Half of the trials are within {away.median():.2g} % of the median of their cell"
    blocks = block_effects(run.trials)
    if blocks is not None:
        typical += "; blocks differ in all cells together" if blocks.found else "; no block differs from the others"
    words = run.words(typical, timed=True)
    first = ["Good trials in the order in which they ran: a slope means drift, two clouds mean two modes."]
    if beyond:
        first.append(f"Triangles at the edge: {plural(beyond, 'trial')} farther away, up to {away.max():.3g} %.")
    words.notes[:0] = first
    frameworks = list(dict.fromkeys(run.trials["framework"]))
    colours = style.colours(frameworks)
    shown = [name for name in frameworks if (trials["framework"] == name).any()]
    keys: list[Key] = [
        (Line2D([], [], linestyle="none", marker="o", markersize=3, color=colours[name]), name) for name in shown
    ]
    if blocks is not None:
        keys.append((Line2D([], [], color=REFERENCE_COLOUR, linewidth=1.4), "mean of a block over all cells"))
    figure = new_figure(words, keys, 2.6)
    axes = figure.subplots()
    _points(axes, trials, colours, reach)
    for block, effect in () if blocks is None else blocks.effects.items():
        where = trials.loc[trials["repeat"] == block, "place"]
        if len(where):
            axes.hlines(100 * np.expm1(effect), where.min(), where.max(), color=REFERENCE_COLOUR, linewidth=1.4)
    axes.axhline(0, color=GREY, linewidth=0.5, zorder=1.2)
    axes.set_xlabel("trials, in the order in which they ran")
    axes.set_ylabel("from the cell's median (%)")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return [Drawing("noise", figure, trials[COLUMNS], words)]


def _points(axes: Axes, trials: pd.DataFrame, colours: dict[str, str], reach: float) -> None:
    """Those beyond the axis's reach are triangles at its edge."""
    for framework, rows in trials.groupby("framework", sort=False):
        values, places = rows[DEVIATION].to_numpy(dtype=float), rows["place"].to_numpy(dtype=float)
        for marker, chosen in (("o", abs(values) <= reach), ("^", values > reach), ("v", values < -reach)):
            clipped = np.clip(values[chosen], -reach, reach)
            size = 2.4 if marker == "o" else 4.5
            axes.plot(places[chosen], clipped, marker, markersize=size, color=colours[str(framework)])
    axes.set_ylim(-1.06 * reach, 1.06 * reach)
