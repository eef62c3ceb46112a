"""Stacked bars: a row per backend, a panel per N and W, a colour per part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bench.cell import Status
from bench.report import style
from bench.report.panels import CONTEXT, CSV_COLUMNS, Drawing, Panel, Run, paged, panel_grid
from bench.report.style import GREY, SMALL, TINY, safe

ROW, MANY_ROWS, TITLE_AND_AXIS = 0.2, 0.15, 0.34
"""Inches of a bar, of one among more than eight, and of the words above and below a panel."""
MARGIN_WORDS = 0.62
"""Inches for the words at the right of a bar."""
PANELS_HEIGHT = 6.0
"""Inches that the panels of one page may take."""


def one_per_cell(trials: pd.DataFrame) -> pd.DataFrame:
    """One trial of each cell, a good one if there is one: memory is measured once per cell."""
    good_first = trials.assign(_bad=trials["status"] != Status.OK)
    first = good_first.sort_values(["_bad", "repeat"], kind="stable").drop_duplicates("cell_id")
    return trials.loc[first.index].sort_values(["_rank", "accumulate"], kind="stable")


def stacked(
    run: Run,
    stem: str,
    trials: pd.DataFrame,
    total: str,
    parts: Mapping[str, Mapping[str, Any]],
    title: str,
    note: str,
    label: str,
    unit: float,
    also: Sequence[str],
) -> list[Drawing]:
    """The figures of a total and the columns that add up to it, by how each is painted; one trial of each cell.

    ``unit`` is how much of the columns is 1 on the axis, and ``also`` are columns of the data beside the total.
    """
    trials = trials[[*CSV_COLUMNS, total, *also]]
    panels = run.panels(trials, [*CONTEXT, "accumulate"], [total])
    if not panels:
        return []
    shown = run.shown(panels)
    beside = max(style.text_width(style.fit(name, style.NAME_WIDTH), SMALL) for name in shown) + 0.15
    fit = max(1, int((style.WIDTH - beside) / (1.2 + MARGIN_WORDS)))
    most = min(fit, 3 if len(panels) == 3 else max(2, math.ceil(math.sqrt(len(panels)))), 3)
    row = MANY_ROWS if len(shown) > 8 else ROW
    per_page = most * max(1, int(PANELS_HEIGHT / (row * len(shown) + TITLE_AND_AXIS)))
    largest = float(trials[total].max()) / unit
    drawings = []
    for page in paged(stem, panels, per_page):
        chunk = page.panels
        lines = math.ceil(len(chunk) / most)
        columns = math.ceil(len(chunk) / lines)
        width = (style.WIDTH - 2 * style.MARGIN - beside) / columns
        words = run.words(title)
        words.notes[:0] = [*page.left_out, note]
        height = lines * (row * len(shown) + TITLE_AND_AXIS) + 0.3
        keys: list[style.Key] = [(Patch(**paint), part.replace("_", " ")) for part, paint in parts.items()]
        figure = style.sheet(words, [keys], height, height)
        grid = panel_grid(figure, chunk, columns, beside + 0.2 * columns, sharex=True, sharey=True)
        for i, (axes, panel) in enumerate(zip(grid, chunk, strict=True)):
            _bars(axes, panel, shown, total, parts, unit)
            axes.set_xlim(0, largest * width / (width - MARGIN_WORDS) or 1)
            axes.set_xlabel(label if i + columns >= len(chunk) else "")
        drawings.append(Drawing(page.stem, figure, trials, words))
    return drawings


def _bars(
    axes: Axes, panel: Panel, shown: list[str], total: str, parts: Mapping[str, Mapping[str, Any]], unit: float
) -> None:
    """The bars of one panel, in the rows of all backends."""
    axes.set_yticks(range(len(shown)), [safe(style.fit(backend, style.NAME_WIDTH)) for backend in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    known = panel.trials[panel.trials[total].notna()]
    rows = [shown.index(backend) for backend in known["backend"]]
    ends = np.zeros(len(known))
    for part, paint in parts.items():
        widths = known[part].to_numpy(dtype=float) / unit
        axes.barh(rows, widths, 0.72, ends, **paint)
        ends = ends + widths
    reached = dict(zip(rows, ends, strict=True))
    for backend, status in zip(panel.trials["backend"], panel.trials["status"].astype(str), strict=True):
        at = shown.index(backend)
        left, words = reached.get(at, 0.0), "" if status == Status.OK else status
        words = f"{left:.3g} {words}".strip() if at in reached else words or "not measured"
        axes.annotate(safe(words), (left, at), (3, 0), textcoords="offset points", va="center", size=TINY, color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(4))
