"""How much trials of one cell differ, in the order in which they ran, beside the noise floor."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bench.analysis.statistics import Interval
from bench.analysis.verdicts import band
from bench.cell import REFERENCES, Status
from bench.report import style
from bench.report.panels import CSV_COLUMNS, Drawing, Run
from bench.report.style import REFERENCE_COLOUR, Key
from bench.words import plural

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


def draw_noise(run: Run, floor: Interval | None) -> list[Drawing]:
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
    figure = style.sheet(words, [keys], 2.6, 2.6)
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
