"""Trials around the medians of their cells, in the order in which they ran, and blocks in which all were slower."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bench.formatting import plural
from bench.judge.samples import block_effects
from bench.plan.cell import REFERENCES, Status
from bench.report import style
from bench.report.canvas import Drawing, new_figure
from bench.report.figure_data import CONTEXT, FigureData
from bench.report.style import GREY, REFERENCE_COLOUR, Key

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


def draw_noise(data: FigureData) -> list[Drawing]:
    """A point per trial; nothing if no cell has two good ones."""
    timed = [world.times_communication for world in data.trials["world"]]
    trials = deviations(data.trials[timed])
    if trials.empty:
        return []
    away = trials[DEVIATION].abs()
    reach = max(LEAST, float(away.quantile(INSIDE))) * ROOM
    beyond = int((away > reach).sum())
    typical = f"Half of the trials are within {away.median():.2g} % of the median of their cell"
    blocks = block_effects(data.trials)
    if blocks is not None:
        typical += f"; blocks {'differ in all cells together' if blocks[1].found else 'do not differ significantly'}"
    words = data.figure_words(typical, timed=True)
    first = ["Good trials in the order in which they ran: a slope means drift, two clouds mean two modes."]
    if beyond:
        first.append(f"Triangles at the edge: {plural(beyond, 'trial')} farther away, up to {away.max():.3g} %.")
    words.notes[:0] = first
    frameworks = list(dict.fromkeys(data.trials["framework"]))
    colours = style.colours(frameworks)
    shown = [name for name in frameworks if (trials["framework"] == name).any()]
    keys: list[Key] = [
        (Line2D([], [], linestyle="none", marker="o", markersize=3, color=colours[name]), style.cut(name))
        for name in shown
    ]
    if blocks is not None:
        keys.append((Line2D([], [], color=REFERENCE_COLOUR, linewidth=1.4), "mean of a block over all cells"))
    figure = new_figure(words, keys, 2.6)
    axes = figure.subplots()
    _draw_points(axes, trials, colours, reach)
    for block, effect in () if blocks is None else blocks[0].items():
        where = trials.loc[trials["repeat"] == block, "place"]
        if len(where):
            axes.hlines(100 * np.expm1(effect), where.min(), where.max(), color=REFERENCE_COLOUR, linewidth=1.4)
    axes.axhline(0, color=GREY, linewidth=0.5, zorder=1.2)
    axes.set_xlabel("trials, in the order in which they ran")
    axes.set_ylabel("from the cell's median (%)")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return [Drawing("noise", figure, trials[COLUMNS], words)]


def _draw_points(axes: Axes, trials: pd.DataFrame, colours: dict[str, str], reach: float) -> None:
    """Draw a point per trial; those beyond the axis's reach are triangles at its edge."""
    for framework, rows in trials.groupby("framework", sort=False):
        values, places = rows[DEVIATION].to_numpy(dtype=float), rows["place"].to_numpy(dtype=float)
        for marker, chosen in (("o", abs(values) <= reach), ("^", values > reach), ("v", values < -reach)):
            clipped = np.clip(values[chosen], -reach, reach)
            size = 2.4 if marker == "o" else 4.5
            axes.plot(places[chosen], clipped, marker, markersize=size, color=colours[str(framework)])
    axes.set_ylim(-1.06 * reach, 1.06 * reach)
