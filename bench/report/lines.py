"""Lines: step time and peak memory against N, and loss curves with their distance from the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.plan.cell import REFERENCES, Status
from bench.report import sheet, style
from bench.report.figure_data import (
    LARGEST,
    SAID_OF_CELLS,
    TIMES,
    FigureData,
    cells_with,
    interval_line,
    with_cells,
    without_reference,
)
from bench.report.panels import (
    CONTEXT,
    COUNTED,
    CSV_COLUMNS,
    DODGE,
    DODGE_EACH,
    GIB_ABOVE,
    LOSS_FLOOR,
    MAX_DIRECT,
    MAX_DIRECT_WIDTH,
    REFERENCE_KEYS,
    REFERENCE_LABELS,
    SPREAD,
    Drawing,
    Panel,
    grid_shape,
    paged,
    panel_grid,
    reference_keys,
    set_scale,
    title_lines,
    varying_columns,
)
from bench.report.style import GREY, INTERVAL, REFERENCE_COLOUR, SMALL, TINY, Key, safe
from bench.words import plural


def draw_step_time(run: FigureData) -> list[Drawing]:
    """Seconds per optimizer step."""
    trials = with_cells(run, run.trials, "step_time_s")
    title = "Time of an optimizer step against the number of micro-batches N"
    return against_n(run, "step_time", trials, "step_time_s", title, "step time (s per optimizer step)", CONTEXT)


def with_memory(run: FigureData, *values: str) -> tuple[pd.DataFrame, float, str]:
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


def draw_peak_memory(run: FigureData) -> list[Drawing]:
    """Peak memory of a rank."""
    trials, unit, name = with_memory(run)
    by, label = [*CONTEXT, "peak_memory_source"], memory_label(trials, name)
    title = "Peak memory of a rank against the number of micro-batches N"
    return against_n(run, "peak_memory", trials, "peak_memory_bytes", title, label, by, unit)


def against_n(
    run: FigureData,
    stem: str,
    trials: pd.DataFrame,
    value: str,
    title: str,
    label: str,
    by: list[str],
    unit: float = 1.0,
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
        figure = sheet.sheet(
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


def _lines(run: FigureData, axes: Axes, panel: Panel, value: str, unit: float) -> list[tuple[str, float, float, str]]:
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


def _lost(run: FigureData, axes: Axes, trials: pd.DataFrame, value: str, *, wide: bool) -> None:
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


SHORT = 0.25
"""Share of the longest curve's steps below which a curve is not drawn beside it: timed cells have few."""


def draw_loss_curves(run: FigureData) -> list[Drawing]:
    """Loss against step, and how far it is from the reference's."""
    own = run.trials[[*CSV_COLUMNS, "entropy_floor", "max_loss_deviation"]]
    keyed = own.merge(run.losses.sort_values("step"), on=["cell_id", "repeat"])
    if keyed.empty:
        return []
    keyed = keyed[keyed["repeat"] == keyed.groupby("cell_id")["repeat"].transform("min")]
    groups = keyed.groupby(["backend", *CONTEXT], dropna=False)["accumulate"]
    keyed = keyed[keyed["accumulate"] == groups.transform("max")]
    truth = keyed[keyed["backend"].isin(REFERENCES)].sort_values("backend", kind="stable")  # single processes first
    truth = truth.drop_duplicates([*REFERENCE_KEYS, "step"])
    truth = truth[[*REFERENCE_KEYS, "step", "loss"]].rename(columns={"loss": "reference_loss"})
    keyed = keyed.merge(truth, on=[*REFERENCE_KEYS, "step"], how="left")
    keyed["deviation"] = (keyed["loss"] - keyed["reference_loss"]).abs()
    panels, left_out = _longest(run.panels(keyed, CONTEXT, ["loss"]))
    largest = sorted({n for panel in panels for n in panel.trials["accumulate"]})
    title = "Loss of every backend at its largest N" + (f" (N = {', '.join(map(str, largest))})" if largest else "")
    drawings = []
    # Ways to train (optimizer, clipping) are to be compared at a glance: four of them share a page, two in a row.
    ways = varying_columns(run.others, ["optimizer", "clip_norm"])
    plotted = ["step", "loss", "reference_loss", "deviation", "entropy_floor", "max_loss_deviation"]
    data = keyed[[*CSV_COLUMNS, *plotted]]
    for page in paged("loss_curves", panels, 4 if ways else 3):
        panels = page.panels
        shown = run.shown(panels)
        keys = _keys(run, keyed, shown, several=len(largest) > 1)
        keys += reference_keys(panels, "loss")
        known = any(p.trials["reference_loss"].notna().any() and len(p.reference) for p in panels)
        words = run.words(title)
        unknown = [] if known else ["the reference has no losses, so no deviation from it is drawn"]
        words.notes[:] = [*page.left_out, *left_out, *words.notes, *unknown]
        columns = 2 if len(panels) == 4 else len(panels)
        lines = math.ceil(len(panels) / columns)
        height = (4.6 if lines == 1 else 3.2 * lines) if known else 3.2 * lines
        least = (3.2 if lines == 1 else 2.9 * lines) if known else 2.0 * lines
        figure = sheet.sheet(words, [keys, run.signs(keyed)], height, least)
        grid = figure.subplots((1 + known) * lines, columns, squeeze=False, sharex=True)
        for i, panel in enumerate(panels):
            line, column = (1 + known) * (i // columns), i % columns
            above, below = grid[line, column], grid[line + known, column]
            above.sharey(grid[0, 0])
            above.set_title(title_lines(panel.title, (style.WIDTH - 0.9) / columns))
            _losses(run, above, panel, reference_on_top=bool(ways))
            if known:
                below.sharey(grid[1, 0])
                below.set_yscale("log")
                _curves(run, below, panel, "deviation")
            if i + columns >= len(panels):
                below.set_xlabel("optimizer step")
                below.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if column == 0:
                above.set_ylabel("loss (nats/token)")
                if known:
                    below.set_ylabel(_deviation_label(narrow=lines > 1))
        drawings.append(Drawing(page.stem, figure, data, words))
    return drawings


def _longest(panels: list[Panel]) -> tuple[list[Panel], list[str]]:
    """The panels whose curves are not much shorter than the longest, and what a figure says of the others."""
    steps = [int(panel.trials["step"].max()) + 1 for panel in panels]
    most = max(steps, default=0)
    kept = [panel for panel, length in zip(panels, steps, strict=True) if length >= SHORT * most]
    others = sum(panel.trials["cell_id"].nunique() for panel in panels if panel not in kept)
    if not others:
        return kept, []
    return kept, [
        f"The curves of {plural(others, 'cell')} are left out of this picture: they have less than {100 * SHORT:.0f} % "
        f"of the {plural(most, 'step')} of the longest. All are in the CSV beside it."
    ]


def _keys(run: FigureData, keyed: pd.DataFrame, shown: Sequence[str], *, several: bool) -> list[Key]:
    """The legend's entries of backends, with the N of each if there are several."""
    keys = []
    for name in shown:
        ns = keyed[keyed["backend"] == name]["accumulate"].sort_values().unique()
        label = f"{name}, N = {', '.join(map(str, ns))}" if several else name
        keys.append(style.backend_key(name, run.looks[name], line=True, label=label))
    return keys


def _deviation_label(*, narrow: bool) -> str:
    unit, least = "(nats/token;", f"0 drawn at 1e{math.log10(LOSS_FLOOR):.0f})"
    return f"|loss - reference's|\n{unit}\n{least}" if narrow else f"|loss - reference loss|\n{unit} {least}"


def _losses(run: FigureData, axes: Axes, panel: Panel, *, reference_on_top: bool) -> None:
    """The losses of a panel, their reference and their floor."""
    longest = panel.reference.drop_duplicates("step").sort_values("step")
    steps, losses = (longest[column].astype(float) for column in ("step", "loss"))
    if len(panel.reference) and not reference_on_top:
        axes.plot(steps, losses, color=REFERENCE_COLOUR, linestyle="--")
    _curves(run, axes, panel, "loss")
    if len(panel.reference) and reference_on_top:
        axes.plot(steps, losses, color=REFERENCE_COLOUR, linestyle=(0, (2, 6)))
    for floor in panel.trials["entropy_floor"].dropna()[:1]:
        axes.axhline(floor, color=GREY, linestyle=":")
        across = axes.get_yaxis_transform()
        text = f"entropy floor {floor:.3f}"
        axes.annotate(text, (0.02, floor), (0, -2), xycoords=across, textcoords="offset points", va="top", size=TINY,
                      color=GREY)  # fmt: skip
        axes.margins(y=0.12)


def _curves(run: FigureData, axes: Axes, panel: Panel, value: str) -> None:
    """A line per cell."""
    for i, ((backend, _), rows) in enumerate(panel.trials.groupby(["backend", "cell_id"], sort=False)):
        look, valid = run.looks[str(backend)], bool((rows["status"] == Status.OK).all())
        x, y = rows["step"].astype(float), rows[value].astype(float)
        y = y.clip(lower=LOSS_FLOOR) if value == "deviation" else y
        axes.plot(x, y, color=look.colour, linestyle=look.line)
        every = max(1, len(rows) // 6, min(len(rows), panel.trials["backend"].nunique()))
        style.mark(axes, x, y, look, valid=valid, size=4.5, markevery=(i % every, every))
