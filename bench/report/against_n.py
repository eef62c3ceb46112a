"""Step time and peak memory against N, the number of micro-batches in a window."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.cell import Status
from bench.report import style
from bench.report.numbers import LARGEST, SAID_OF_CELLS, TIMES, cells_with, interval_line, with_cells
from bench.report.panels import (
    CONTEXT,
    COUNTED,
    CSV_COLUMNS,
    DODGE,
    DODGE_EACH,
    GIB_ABOVE,
    MAX_DIRECT,
    MAX_DIRECT_WIDTH,
    REFERENCE_LABELS,
    SPREAD,
    Drawing,
    Panel,
    Run,
    grid_shape,
    paged,
    panel_grid,
    reference_keys,
    set_scale,
    without_reference,
)
from bench.report.style import GREY, INTERVAL, REFERENCE_COLOUR, SMALL, TINY, safe


def draw_step_time(run: Run) -> list[Drawing]:
    """Seconds per optimizer step."""
    trials = with_cells(run, run.trials, "step_time_s")
    title = "Time of an optimizer step against the number of micro-batches N"
    return against_n(run, "step_time", trials, "step_time_s", title, "step time (s per optimizer step)", CONTEXT)


def with_memory(run: Run, *values: str) -> tuple[pd.DataFrame, float, str]:
    """The trials with a source for every memory, and the unit: its bytes and name."""
    trials = with_cells(run, run.trials, "peak_memory_bytes", *values)
    sources = trials["peak_memory_source"].mode()
    trials["peak_memory_source"] = trials["peak_memory_source"].fillna(sources.iloc[0] if len(sources) else "unknown")
    most = trials["peak_memory_bytes"].max()
    return (trials, 2.0**30, "GiB") if not pd.isna(most) and most >= GIB_ABOVE else (trials, 2.0**20, "MiB")


def memory_label(trials: pd.DataFrame, unit: str) -> str:
    """The axis label, which names where the numbers come from."""
    measured = trials[trials["peak_memory_bytes"].notna()]["peak_memory_source"].unique()
    return f"peak memory of a rank ({unit})\npeak_memory_source:\n{safe(', '.join(measured))}"


def draw_peak_memory(run: Run) -> list[Drawing]:
    """Peak memory of a rank."""
    trials, unit, name = with_memory(run)
    by, label = [*CONTEXT, "peak_memory_source"], memory_label(trials, name)
    title = "Peak memory of a rank against the number of micro-batches N"
    return against_n(run, "peak_memory", trials, "peak_memory_bytes", title, label, by, unit)


def against_n(
    run: Run, stem: str, trials: pd.DataFrame, value: str, title: str, label: str, by: list[str], unit: float = 1.0
) -> list[Drawing]:
    """A value against N: every trial a point, a line through the cells, and the intervals of those that have one."""
    drawings = []
    said = SAID_OF_CELLS.get(value, LARGEST)
    data = trials[[*dict.fromkeys([*CSV_COLUMNS, *by]), value, *(name for name in trials if name in _ends(value))]]
    for page in paged(stem, run.panels(trials, by, [value]), 6):
        panels = page.panels
        shown = run.shown(panels)
        keys = run.keys(shown, line=True) + reference_keys(panels, value)
        direct = len(panels) == 1 and len(keys) <= MAX_DIRECT
        direct = direct and max(style.text_width(text, SMALL) for _, text in keys) <= MAX_DIRECT_WIDTH
        columns, lines = grid_shape(panels)
        height = 4.2 if columns == 1 else 2.1 * lines + 0.5
        words = run.words(title)
        words.notes[:0] = [*page.left_out, SPREAD.format(said) + ("." if columns == 1 else COUNTED)]
        figure = style.sheet(
            words, [[] if direct else keys, run.signs(without_reference(trials))], height, max(2.6, 1.4 * lines)
        )
        grid = panel_grid(figure, panels, columns, sharex=True, sharey=True)
        for i, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
            ends = _lines(run, axes, panel, value, unit)
            set_scale(axes, "y", trials[value].dropna() / unit)
            _lost(run, axes, panel.trials, value, wide=columns == 1)
            axes.set_ylabel(label if i % columns == 0 else "")
            axes.set_xlabel("N, micro-batches per optimizer step" if i + columns >= len(panels) else "")
            if direct:
                _label_ends(figure, axes, ends)
        drawings.append(Drawing(page.stem, figure, data, words))
    return drawings


def _ends(value: str) -> list[str]:
    """Columns of what is said of a cell."""
    return [f"{value}_{end}" for end in ("cell", "low", "high")]


def _lines(run: Run, axes: Axes, panel: Panel, value: str, unit: float) -> list[tuple[str, float, float, str]]:
    """One line per backend; returns label, last point and colour of each."""
    ticks = sorted({int(n) for n in panel.trials["accumulate"]})
    backends = list(panel.trials["backend"].unique())
    width = min(DODGE, DODGE_EACH * len(backends))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.set_xlim(ticks[0] / 2 ** (0.2 + width / 2), ticks[-1] * 2 ** (0.2 + width / 2))
    ends = []
    for reference in cells_with(panel.reference, value)[f"{value}_cell"][:1] / unit:
        axes.axhline(reference, color=REFERENCE_COLOUR, linestyle="--", linewidth=1)
        label = REFERENCE_LABELS[panel.reference["backend"].iloc[0]]
        ends.append((label, axes.get_xlim()[1], float(reference), REFERENCE_COLOUR))
    for i, backend in enumerate(backends):
        look, rows = run.looks[backend], panel.trials[panel.trials["backend"] == backend]
        shift = 2 ** (width * (i - (len(backends) - 1) / 2) / max(len(backends) - 1, 1))
        cells = cells_with(rows, value)
        x, y = cells["accumulate"].astype(float) * shift, cells[f"{value}_cell"].astype(float) / unit
        every = rows.drop_duplicates("cell_id").sort_values("accumulate")
        # A cell without a number breaks the line.
        through = every[f"{value}_cell"].to_numpy(dtype=float, na_value=np.nan) / unit
        axes.plot(every["accumulate"].astype(float) * shift, through, color=look.colour, linestyle=look.line)
        if value in TIMES:
            places, ends_of = interval_line(cells, value, unit)
            axes.plot(x.to_numpy()[places], ends_of, color=look.colour, linewidth=INTERVAL)
        for valid, part in rows[rows[value].notna()].groupby(rows["status"] == Status.OK):
            style.mark(axes, part["accumulate"].astype(float) * shift, part[value].astype(float) / unit, look,
                       valid=bool(valid), size=2.2, alpha=0.6)  # fmt: skip
        for valid in (True, False):
            style.mark(axes, x[cells["valid"] == valid], y[cells["valid"] == valid], look, valid=valid)
        if len(cells):
            ends.append((backend, float(x.iloc[-1]), float(y.iloc[-1]), look.colour))
    return ends


def _lost(run: Run, axes: Axes, trials: pd.DataFrame, value: str, *, wide: bool) -> None:
    """Above the axes, at each N: the cells that have no number."""
    lost = trials[trials[f"{value}_cell"].isna()].drop_duplicates("cell_id")
    for n in lost["accumulate"].unique():
        rows = lost[lost["accumulate"] == n]
        counts = rows["status"].value_counts(sort=False)
        text = "\n".join(f"{count} {status}" for status, count in counts.items()) if wide else f"{len(rows)}\u2715"
        colour = run.looks[rows["backend"].iloc[0]].colour if len(rows) == 1 else GREY
        axes.annotate(text, (float(n), 1), (0, 2), xycoords=("data", "axes fraction"),
                      textcoords="offset points", ha="center", va="bottom", size=TINY, color=colour)  # fmt: skip
    if not lost.empty:
        lines = lost.groupby("accumulate")["status"].nunique().max() if wide else 1
        axes.set_title(axes.get_title(), pad=6 + 9 * lines)


def _label_ends(figure: Figure, axes: Axes, ends: list[tuple[str, float, float, str]]) -> None:
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
        axes.annotate(safe(text), (x, y), (1.035, height), xycoords="data", textcoords="axes fraction", va="center",
                      size=SMALL, color=colour, arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5,
                      "alpha": 0.6, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)})  # fmt: skip
