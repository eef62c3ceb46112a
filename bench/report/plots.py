"""Six figures of a run, each as PNG and SVG with the plotted data beside it as CSV. Failed cells stay visible."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox

from bench.cell import REFERENCE, Status
from bench.report import style
from bench.report.style import GREY, REFERENCE_COLOUR, SMALL, TINY, Key, Words, safe
from bench.tables import Tables

CONTEXT = [
    "workload", "model", "device", "global_batch_size", "sequence_length", "optimizer", "accumulation_dtype",
    "world_size", "precision",
]
"""Cells that differ in one of these are never in one panel."""
REFERENCE_KEYS = ["workload", "model", "sequence_length", "global_batch_size", "optimizer", "device"]
"""What a trial shares with its reference."""
CSV_COLUMNS = [
    "run_id", "cell_id", "repeat", "backend", "framework", "sharding", "sync", "accumulate", *CONTEXT, "status",
    "reason",
]
NAMES = {
    "accumulate": "N = {}", "world_size": "W = {}", "global_batch_size": "B = {}", "sequence_length": "{} tokens",
    "accumulation_dtype": "summed in {}",
}
"""How a value of a column is named in titles; others speak for themselves."""
REFERENCE_LABEL = "reference: one process, full batch"
ONE_GPU = "one GPU: no bytes move between ranks"
REFERENCE_KEY: Key = (Line2D([], [], color=REFERENCE_COLOUR, linestyle="--"), REFERENCE_LABEL)
LOSS_FLOOR = 1e-9
"""Where a loss equal to the reference's is drawn on a logarithmic axis."""
SPREAD = "Points are spread sideways at each N; small points are trials, large ones the medians of cells"
COUNTED = "; 2\u2715 above a panel: two cells without a number at that N."
LOG_ABOVE = 5.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
GIB_ABOVE = 4 * 2**30
MAX_DIRECT, MAX_DIRECT_WIDTH = 12, 2.3
"""Lines that get labels of their own at the right, and the inches that those may take."""
DODGE, DODGE_EACH = 0.32, 0.04
"""Octaves over which the backends are spread at one N: at most, and per backend."""
REASON_LENGTH = 220


@dataclass
class Drawing:
    """One figure before it is saved."""

    stem: str
    figure: Figure
    data: pd.DataFrame
    words: Words


@dataclass
class Panel:
    """The trials that share one pair of axes, and those of their reference."""

    title: str
    trials: pd.DataFrame
    reference: pd.DataFrame


def draw(tables: Tables, manifest: dict[str, Any], folder: Path) -> list[Path]:
    """Write the figures of a judged run into the folder; returns the paths. Figures without data are not drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with matplotlib.style.context(list(style.BASE)):
        for drawing in figures(tables, manifest):
            paths += style.save(drawing.figure, folder / drawing.stem, drawing.words)
            paths.append(folder / f"{drawing.stem}.csv")
            drawing.data.to_csv(paths[-1], index=False)
    return paths


def figures(tables: Tables, manifest: dict[str, Any]) -> list[Drawing]:
    """The figures of ``draw``, not yet saved."""
    if tables.trials.empty:
        return []
    run = Run(tables, manifest)
    with matplotlib.style.context(list(style.BASE)):
        makers = (_step_time, _peak_memory, _memory_vs_time, _loss_curves, _optimizer_steps, _speed_up)
        return [drawing for maker in makers for drawing in maker(run)]


class Run:
    """The trials in the order of drawing, and what all figures say about them."""

    def __init__(self, tables: Tables, manifest: dict[str, Any]) -> None:
        self.manifest, self.losses = manifest, tables.losses
        trials = tables.trials.copy()
        for column in ("framework", "sharding", "sync"):
            known = {name: about.get(column) for name, about in manifest.get("backends", {}).items()}
            trials[column] = trials[column].fillna(trials["backend"].map(known).astype("string")).fillna("")
        trials["reason"] = trials["reason"].fillna("")
        self.looks = style.looks(trials)
        order = {name: i for i, name in enumerate(self.looks)}
        ranks = trials["backend"].map(order)
        self.trials = trials.assign(_rank=ranks).sort_values(["_rank", "accumulate", "repeat"], kind="stable")
        self.others = _others(self.trials)

    def words(self, title: str) -> Words:
        """The words around a figure."""
        all_on_one_gpu = bool((self.trials["device"] == "cuda").all() and (self.trials["world_size"] == 1).all())
        subtitle = f"{self._models()}; {self._batch()}"
        machine = self.manifest.get("machine") or {}
        gpus = [str(gpu.get("name", "GPU")) for gpu in machine.get("gpus") or []]
        parts = [str(machine.get("cpu") or "unknown CPU")]
        if machine.get("cores"):
            parts.append(f"{machine['cores']} cores")
        parts += [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)] or ["no GPU"]
        torch = (self.manifest.get("packages") or {}).get("torch")
        footer = f"run {self.manifest.get('run_id', 'unnamed')}; machine: {', '.join(parts)}"
        return Words(
            f"{title} ({ONE_GPU})" if all_on_one_gpu else title,
            subtitle,
            footer + (f"; torch {torch}" if torch else ""),
            self._notes(),
        )

    def _models(self) -> str:
        sizes = self.trials.groupby("model")["num_parameters"].max()
        models = [f"{name} ({_count(sizes[name])} parameters)" for name in self.others["model"].unique()]
        return f"model {', '.join(models)}"

    def _batch(self) -> str:
        def values(column: str) -> str:
            return ", ".join(str(v) for v in sorted(self.others[column].dropna().unique()))

        return (
            f"B = {values('global_batch_size')} samples of {values('sequence_length')} tokens per optimizer step, "
            f"N = {values('accumulate')}, W = {values('world_size')}, {values('precision')} "
            f"(summed in {values('accumulation_dtype')}), {values('device')}"
        )

    def _notes(self) -> list[str]:
        """What is wrong with which cells: those of equal status and reason, numbers aside, in one note."""
        varying = [c for c in CONTEXT if self.others[c].nunique(dropna=False) > 1]
        size = self.trials.groupby("cell_id").size()
        groups: dict[tuple[bool, str, str], dict[str, list[str]]] = {}
        reasons: dict[tuple[bool, str, str], list[str]] = {}
        bad = self.trials[self.trials["status"] != Status.OK]
        for cell_id, rows in bad.groupby("cell_id", sort=False):
            for status, alike in rows.groupby("status"):
                first = alike.iloc[0]
                key = (status == Status.INVALID, str(status), re.sub(r"[-+]?\d[\d.e+-]*", "#", first["reason"]))
                some = "" if len(alike) == size[cell_id] else f" ({len(alike)} of {size[cell_id]} trials)"
                where = " ".join([str(first["backend"]), *(_name(c, first[c]).replace(" = ", "=") for c in varying)])
                groups.setdefault(key, {}).setdefault(where, []).append(f"{first['accumulate']}{some}")
                reasons.setdefault(key, []).append(str(first["reason"]))
        notes = []
        for key in sorted(groups, key=lambda k: k[:2]):
            cells = "; ".join(f"{where} N={', '.join(ns)}" for where, ns in groups[key].items())
            reason = _shorten(reasons[key][0]) or "no reason was recorded"
            alike_only = " (numbers of the first)" if len(set(reasons[key])) > 1 else ""
            notes.append(f"{key[1]}: {cells}: {reason}{alike_only}")
        return notes

    def panels(self, trials: pd.DataFrame, by: list[str], values: list[str]) -> list[Panel]:
        """The trials of all but the reference, split by these columns; parts without any value are left out."""
        others = _others(trials)
        varying = [column for column in by if others[column].nunique(dropna=False) > 1]
        found = []
        for _, rows in others.groupby(by, dropna=False, sort=True):
            first = rows.iloc[0]
            same = (trials[REFERENCE_KEYS] == first[REFERENCE_KEYS]).all(axis=1)
            if "peak_memory_source" in by:
                same &= trials["peak_memory_source"] == first["peak_memory_source"]
            reference = trials[same & (trials["backend"] == REFERENCE)] if others is not trials else trials.iloc[:0]
            if rows[values].notna().all(axis=1).any():
                found.append(Panel(", ".join(_name(c, first[c]) for c in varying), rows, reference))
        return found

    def shown(self, panels: Sequence[Panel], *, reference: bool = False) -> list[str]:
        """The backends of these panels, in the order of drawing."""
        frames = [frame for p in panels for frame in ([p.trials, p.reference] if reference else [p.trials])]
        found = {backend for frame in frames for backend in frame["backend"]}
        return [backend for backend in self.looks if backend in found]

    def keys(self, backends: Sequence[str], *, line: bool) -> list[Key]:
        return [style.backend_key(name, self.looks[name], line=line) for name in backends]

    def signs(self, trials: pd.DataFrame) -> list[Key]:
        return style.sync_keys(trials, invalid=bool((trials["status"] != Status.OK).any()))


def _others(trials: pd.DataFrame) -> pd.DataFrame:
    """All but the reference; the trials themselves if there is nothing else."""
    others = trials[trials["backend"] != REFERENCE]
    return trials if others.empty else others


def _count(value: Any) -> str:
    if pd.isna(value):
        return "unknown number of"
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def _name(column: str, value: Any) -> str:
    return NAMES.get(column, "{}").format("unknown" if pd.isna(value) else value)


def _shorten(reason: str) -> str:
    return reason if len(reason) <= REASON_LENGTH else reason[: REASON_LENGTH - 4].rstrip() + " ..."


def _centred(trials: pd.DataFrame, *values: str) -> pd.DataFrame:
    """With ``<value>_cell_median``, over the ok trials if there are any, and ``valid``: all that was measured is ok."""
    trials = trials.copy()
    for value in values:
        trials[value] = trials[value].where(np.isfinite(trials[value].to_numpy(dtype=float, na_value=np.nan)))
    fine = trials["status"] == Status.OK
    trials["valid"] = (fine | trials[list(values)].isna().any(axis=1)).groupby(trials["cell_id"]).transform("all")
    for value in values:
        good = trials[value].where(fine).groupby(trials["cell_id"]).transform("median")
        trials[f"{value}_cell_median"] = good.fillna(trials[value].groupby(trials["cell_id"]).transform("median"))
    return trials


def _cells(trials: pd.DataFrame, value: str) -> pd.DataFrame:
    """One row per cell that has a number."""
    return trials[trials[f"{value}_cell_median"].notna()].drop_duplicates("cell_id").sort_values("accumulate")


def _pages(stem: str, items: list[Panel], size: int) -> Iterator[tuple[str, list[Panel]]]:
    """Parts of at most this size, with the stem of each."""
    count = math.ceil(len(items) / size)
    each = math.ceil(len(items) / max(count, 1))
    for page in range(count):
        yield stem if count == 1 else f"{stem}-{page + 1}", items[page * each : (page + 1) * each]


def _shape(panels: list[Panel]) -> tuple[int, int]:
    """Columns and rows of a grid of panels, at most four columns for twelve."""
    columns = len(panels) if len(panels) <= 3 else math.ceil(math.sqrt(len(panels)))
    return columns, math.ceil(len(panels) / columns)


def _grid(figure: Figure, panels: Sequence[Panel], columns: int, **share: Any) -> list[Axes]:
    """One pair of axes per panel, row by row, none empty; the lowest of each column has the x axis's words."""
    rows = math.ceil(len(panels) / columns)
    axes = figure.subplots(rows, columns, squeeze=False, **share).ravel()
    for spare in axes[len(panels) :]:
        spare.remove()
    for i, panel in enumerate(panels):
        axes[i].set_title(safe(panel.title))
        if i + columns >= len(panels):
            axes[i].tick_params(labelbottom=True)
    return list(axes[: len(panels)])


def _scale(axes: Axes, which: str, values: pd.Series) -> None:
    """Linear, or logarithmic with plain numbers where values differ much."""
    axis = getattr(axes, f"{which}axis")
    if len(values) and values.min() > 0 and values.max() / values.min() > LOG_ABOVE:
        getattr(axes, f"set_{which}scale")("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(5))


def _step_time(run: Run) -> list[Drawing]:
    trials = _centred(run.trials, "step_time_s")
    title = "Time of an optimizer step against the number of micro-batches N"
    return _against_n(run, "step_time", trials, "step_time_s", title, "step time (s per optimizer step)", CONTEXT)


def _with_memory(run: Run, *values: str) -> tuple[pd.DataFrame, float, str]:
    """The trials with a source for every memory, and the unit: its bytes and name."""
    trials = _centred(run.trials, "peak_memory_bytes", *values)
    sources = trials["peak_memory_source"].mode()
    trials["peak_memory_source"] = trials["peak_memory_source"].fillna(sources.iloc[0] if len(sources) else "unknown")
    most = trials["peak_memory_bytes"].max()
    return (trials, 2.0**30, "GiB") if not pd.isna(most) and most >= GIB_ABOVE else (trials, 2.0**20, "MiB")


def _memory_label(trials: pd.DataFrame, unit: str) -> str:
    measured = trials[trials["peak_memory_bytes"].notna()]["peak_memory_source"].unique()
    return f"peak memory of a rank ({unit})\npeak_memory_source:\n{safe(', '.join(measured))}"


def _peak_memory(run: Run) -> list[Drawing]:
    trials, unit, name = _with_memory(run)
    by, label = [*CONTEXT, "peak_memory_source"], _memory_label(trials, name)
    title = "Peak memory of a rank against the number of micro-batches N"
    return _against_n(run, "peak_memory", trials, "peak_memory_bytes", title, label, by, unit)


def _against_n(
    run: Run, stem: str, trials: pd.DataFrame, value: str, title: str, label: str, by: list[str], unit: float = 1.0
) -> list[Drawing]:
    """A value against N: every trial a point, a line through the medians of the cells."""
    drawings = []
    for name, panels in _pages(stem, run.panels(trials, by, [value]), 6):
        shown = run.shown(panels)
        keys = run.keys(shown, line=True) + [REFERENCE_KEY] * any(p.reference[value].notna().any() for p in panels)
        direct = len(panels) == 1 and len(keys) <= MAX_DIRECT
        direct = direct and max(style.text_width(text, SMALL) for _, text in keys) <= MAX_DIRECT_WIDTH
        columns, lines = _shape(panels)
        height = 4.2 if columns == 1 else 2.1 * lines + 0.5
        words = run.words(title)
        words.notes.insert(0, SPREAD + ("." if columns == 1 else COUNTED))
        figure = style.sheet(words, [[] if direct else keys, run.signs(_others(trials))], height, max(2.6, 1.4 * lines))
        grid = _grid(figure, panels, columns, sharex=True, sharey=True)
        for i, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
            ends = _lines(run, axes, panel, value, unit)
            _scale(axes, "y", trials[value].dropna() / unit)
            _lost(run, axes, panel.trials, value, wide=columns == 1)
            axes.set_ylabel(label if i % columns == 0 else "")
            axes.set_xlabel("N, micro-batches per optimizer step" if i + columns >= len(panels) else "")
            if direct:
                _label_ends(figure, axes, ends)
        data = trials[[*dict.fromkeys([*CSV_COLUMNS, *by]), value, f"{value}_cell_median"]]
        drawings.append(Drawing(name, figure, data, words))
    return drawings


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
    for reference in _cells(panel.reference, value)[f"{value}_cell_median"][:1] / unit:
        axes.axhline(reference, color=REFERENCE_COLOUR, linestyle="--", linewidth=1)
        ends.append((REFERENCE_LABEL, axes.get_xlim()[1], float(reference), REFERENCE_COLOUR))
    for i, backend in enumerate(backends):
        look, rows = run.looks[backend], panel.trials[panel.trials["backend"] == backend]
        shift = 2 ** (width * (i - (len(backends) - 1) / 2) / max(len(backends) - 1, 1))
        cells = _cells(rows, value)
        x, y = cells["accumulate"].astype(float) * shift, cells[f"{value}_cell_median"].astype(float) / unit
        every = rows.drop_duplicates("cell_id").sort_values("accumulate")
        # A cell without a number breaks the line.
        medians = every[f"{value}_cell_median"].to_numpy(dtype=float, na_value=np.nan) / unit
        axes.plot(every["accumulate"].astype(float) * shift, medians, color=look.colour, linestyle=look.line)
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
    lost = trials[trials[f"{value}_cell_median"].isna()].drop_duplicates("cell_id")
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
                      "alpha": 0.6, "shrinkA": 1, "shrinkB": 3})  # fmt: skip


def _memory_vs_time(run: Run) -> list[Drawing]:
    """Memory against step time, with an arrow from each eager backend to its deferred twin."""
    values = ["step_time_s", "peak_memory_bytes"]
    trials, unit, name = _with_memory(run, "step_time_s")
    by = [*CONTEXT, "peak_memory_source", "accumulate"]
    drawings = []
    for stem, panels in _pages("memory_vs_time", run.panels(trials, by, values), 12):
        columns, lines = _shape(panels)
        shown = run.shown(panels, reference=True)
        keys = [style.backend_key(b, run.looks[b], line=False, label=f"{i}  {b}") for i, b in enumerate(shown, start=1)]
        words = run.words("Peak memory against step time, arrows from eager to deferred sync")
        height = 3.6 if lines == 1 else 2.1 * lines + 0.5
        figure = style.sheet(words, [keys, run.signs(trials)], height, 1.5 * lines + 0.4)
        numbered: list[tuple[Axes, list[tuple[float, float, int]], list[Any]]] = []
        grid = _grid(figure, panels, columns, sharex=True, sharey=True)
        for i, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
            both = pd.concat([panel.reference, panel.trials])
            cells = _cells(both, values[0])
            cells = cells[cells[f"{values[1]}_cell_median"].notna()]
            x, y = (cells[f"{value}_cell_median"].astype(float) for value in values)
            y = y / unit
            twins = list(_twins(cells))
            for eager, deferred in twins:
                colour = run.looks[cells["backend"][eager]].colour
                arrow = {"arrowstyle": "-|>", "color": colour, "shrinkA": 3, "shrinkB": 3}
                axes.annotate("", (x[deferred], y[deferred]), (x[eager], y[eager]), arrowprops=arrow)
            for cell in cells.index:
                style.mark(axes, x[cell], y[cell], run.looks[cells["backend"][cell]], valid=cells["valid"][cell])
            points = [(x[c], y[c], shown.index(cells["backend"][c]) + 1) for c in cells.index]
            numbered.append((axes, points, [((x[a], y[a]), (x[b], y[b])) for a, b in twins]))
            lost = both["cell_id"].nunique() - len(cells)
            axes.set_title(safe(panel.title) + f" ({lost} without numbers)" * bool(lost))
            _scale(axes, "x", trials["step_time_s"].dropna())
            _scale(axes, "y", trials["peak_memory_bytes"].dropna() / unit)
            axes.margins(0.12)
            axes.set_ylabel(_memory_label(trials, name) if i % columns == 0 else "")
            axes.set_xlabel("s per optimizer step" if i + columns >= len(panels) else "")
        figure.draw_without_rendering()
        for axes, points, arrows in numbered:
            _number(axes, points, arrows)
        medians = [f"{value}_cell_median" for value in values]
        data = trials[[*CSV_COLUMNS, "peak_memory_source", *values, *medians]]
        drawings.append(Drawing(stem, figure, data, words))
    return drawings


def _twins(cells: pd.DataFrame) -> Iterator[tuple[Any, Any]]:
    """Index of the eager and of the deferred cell of each framework and sharding; by name if there are several."""
    for _, alike in cells.groupby(["framework", "sharding"]):
        eager, deferred = (alike[alike["sync"] == sync] for sync in ("eager", "deferred"))
        for index, backend in eager["backend"].items():
            named = deferred[deferred["backend"] == str(backend).replace("eager", "deferred")]
            twins = named if len(named) else deferred if len(eager) == len(deferred) == 1 else named
            yield from ((index, twin) for twin in twins.index)


def _square(centre: Any, size: float) -> Bbox:
    return Bbox.from_bounds(centre[0] - size / 2, centre[1] - size / 2, size, size)


def _number(axes: Axes, points: list[tuple[float, float, int]], arrows: list[Any]) -> None:
    """The number of each point beside it, where no marker, no arrow and no other number is."""
    point = axes.figure.dpi / 72
    pixels = axes.transData.transform([(x, y) for x, y, _ in points])
    taken = [_square(pixel, 6 * point) for pixel in pixels]
    for tail, head in (axes.transData.transform(arrow) for arrow in arrows):
        taken += [_square(tail + (head - tail) * i / 20, 2 * point) for i in range(21)]
    frame = axes.get_window_extent()
    for (x, y, number), (left, base) in zip(points, pixels, strict=True):
        width, height = 4.3 * len(str(number)) * point, 7 * point
        for radius in range(7, 60, 3):
            spots = [(radius * math.cos(a * math.pi / 8), radius * math.sin(a * math.pi / 8)) for a in range(16)]
            corners = [(left + dx * point - width / 2, base + dy * point - height / 2) for dx, dy in spots]
            boxes = [Bbox.from_bounds(x0, y0, width, height) for x0, y0 in corners]
            free = [
                i for i, box in enumerate(boxes)
                if frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 and box.y1 < frame.y1
                and not any(box.overlaps(other) for other in taken)
            ]  # fmt: skip
            if free:
                taken.append(boxes[free[0]])
                leader = {"arrowstyle": "-", "linewidth": 0.3, "shrinkA": 0, "shrinkB": 1} if radius >= 10 else None
                axes.annotate(str(number), (x, y), spots[free[0]], textcoords="offset points", size=TINY, ha="center",
                              va="center_baseline", arrowprops=leader)  # fmt: skip
                break


def _loss_curves(run: Run) -> list[Drawing]:
    """Loss against step, and how far it is from the reference's."""
    keyed = run.trials.merge(run.losses.sort_values("step"), on=["cell_id", "repeat"])
    if keyed.empty:
        return []
    keyed = keyed[keyed["repeat"] == keyed.groupby("cell_id")["repeat"].transform("min")]
    groups = keyed.groupby(["backend", *CONTEXT], dropna=False)["accumulate"]
    keyed = keyed[keyed["accumulate"] == groups.transform("max")]
    truth = keyed[keyed["backend"] == REFERENCE].drop_duplicates([*REFERENCE_KEYS, "step"])
    truth = truth[[*REFERENCE_KEYS, "step", "loss"]].rename(columns={"loss": "reference_loss"})
    keyed = keyed.merge(truth, on=[*REFERENCE_KEYS, "step"], how="left")
    keyed["deviation"] = (keyed["loss"] - keyed["reference_loss"]).abs()
    largest = sorted(keyed[keyed["backend"] != REFERENCE]["accumulate"].unique())
    title = "Loss of every backend at its largest N" + (f" (N = {', '.join(map(str, largest))})" if largest else "")
    drawings = []
    for stem, panels in _pages("loss_curves", run.panels(keyed, CONTEXT, ["loss"]), 3):
        shown = run.shown(panels)
        keys = []
        for name in shown:
            ns = keyed[keyed["backend"] == name]["accumulate"].sort_values().unique()
            label = f"{name}, N = {', '.join(map(str, ns))}" if len(largest) > 1 else name
            keys.append(style.backend_key(name, run.looks[name], line=True, label=label))
        keys += [REFERENCE_KEY] * any(len(p.reference) for p in panels)
        known = any(p.trials["reference_loss"].notna().any() and len(p.reference) for p in panels)
        words = run.words(title)
        if not known:
            words.notes.append("the reference has no losses, so no deviation from it is drawn")
        figure = style.sheet(words, [keys, run.signs(keyed)], 4.6 if known else 3.2, 3.2 if known else 2.0)
        grid = figure.subplots(1 + known, len(panels), squeeze=False, sharex=True, sharey="row")
        for i, panel in enumerate(panels):
            grid[0, i].set_title(safe(panel.title))
            grid[-1, i].set_xlabel("optimizer step")
            grid[-1, i].xaxis.set_major_locator(MaxNLocator(6, integer=True))
            _curves(run, grid[0, i], panel, "loss")
            for floor in panel.trials["entropy_floor"].dropna()[:1]:
                grid[0, i].axhline(floor, color=GREY, linestyle=":")
                across = grid[0, i].get_yaxis_transform()
                text = f"entropy floor {floor:.3f}"
                grid[0, i].annotate(text, (0.02, floor), (0, -2), xycoords=across, textcoords="offset points", va="top",
                                    size=TINY, color=GREY)  # fmt: skip
                grid[0, i].margins(y=0.12)
            if known:
                grid[1, i].set_yscale("log")
                _curves(run, grid[1, i], panel, "deviation")
        grid[0, 0].set_ylabel("loss (nats/token)")
        if known:
            grid[1, 0].set_ylabel(f"|loss - reference loss|\n(nats/token; 0 drawn at 1e{math.log10(LOSS_FLOOR):.0f})")
        plotted = ["step", "loss", "reference_loss", "deviation", "entropy_floor", "max_loss_deviation"]
        data = keyed[[*CSV_COLUMNS, *plotted]]
        drawings.append(Drawing(stem, figure, data, words))
    return drawings


def _curves(run: Run, axes: Axes, panel: Panel, value: str) -> None:
    if value == "loss" and len(panel.reference):
        steps, losses = (panel.reference[column].astype(float) for column in ("step", "loss"))
        axes.plot(steps, losses, color=REFERENCE_COLOUR, linestyle="--")
    for i, ((backend, _), rows) in enumerate(panel.trials.groupby(["backend", "cell_id"], sort=False)):
        look, valid = run.looks[str(backend)], bool((rows["status"] == Status.OK).all())
        x, y = rows["step"].astype(float), rows[value].astype(float)
        y = y.clip(lower=LOSS_FLOOR) if value == "deviation" else y
        axes.plot(x, y, color=look.colour, linestyle=look.line)
        every = max(1, len(rows) // 6, min(len(rows), panel.trials["backend"].nunique()))
        style.mark(axes, x, y, look, valid=valid, size=4.5, markevery=(i % every, every))


Painter = Callable[[Axes, int, pd.DataFrame, Panel], str]
"""Draws a cell's trials in a row and returns the word for the right margin."""


def _rows(
    run: Run, stem: str, trials: pd.DataFrame, value: str, title: str, label: str, keys: list[Key], paint: Painter,
    also: list[str], limits: list[str], remark: str,
) -> list[Drawing]:
    """A panel per N with a row per backend."""
    panels = run.panels(trials, [*CONTEXT, "accumulate"], [value])
    shown = run.shown(panels, reference=True)
    if not panels:
        return []
    names = max(style.text_width(name, SMALL) for name in shown)
    most = min(4, max(1, int((style.WIDTH - 0.4 - names) / 1.3)))
    row = 0.135 if len(shown) > 8 else 0.19
    per_page = most * max(1, int(4.8 / (row * len(shown) + 0.3)))
    drawings = []
    for name, chunk in _pages(stem, panels, per_page):
        lines = math.ceil(len(chunk) / most)
        columns = math.ceil(len(chunk) / lines)
        words = run.words(title)
        words.notes.insert(0, f"Right margins: {remark}.")
        height = lines * (row * len(shown) + 0.3) + 0.35
        figure = style.sheet(words, [keys, run.signs(trials)], height, height)
        grid = _grid(figure, chunk, columns, sharex=True, sharey=True)
        for i, (axes, panel) in enumerate(zip(grid, chunk, strict=True)):
            axes.set_yticks(range(len(shown)), [safe(b) for b in shown])
            axes.set_ylim(len(shown) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
            axes.set_xlabel(label if i + columns >= len(chunk) else "")
            both = pd.concat([panel.reference, panel.trials])
            for (backend, _), cell in both.groupby(["backend", "cell_id"], sort=False):
                at = shown.index(str(backend))
                margin = paint(axes, at, cell, panel)
                axes.text(1.02, at, safe(margin), transform=axes.get_yaxis_transform(), va="center", size=6, color=GREY)
            axes.set_xlim(0, 1.08 * float(trials[limits].max().max()))
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        drawings.append(Drawing(name, figure, trials[[*CSV_COLUMNS, *also]], words))
    return drawings


def _optimizer_steps(run: Run) -> list[Drawing]:
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
    return _rows(run, "optimizer_steps", run.trials, counts[1], "Optimizer steps expected, observed and reported",
                 "optimizer steps", keys, paint, also, counts,
                 "\"none\" where none reported: the framework gave no count; other words say how the cell failed")


def _speed_up(run: Run) -> list[Drawing]:
    """Tokens per second of every backend, and how many times the reference's that is."""
    value = "tokens_per_s"
    trials = _centred(run.trials, value)
    reference = trials[(trials["backend"] == REFERENCE) & trials["valid"]]
    good = reference.groupby(REFERENCE_KEYS)[f"{value}_cell_median"].first()
    trials = trials.merge(good.rename("reference_tokens_per_s"), on=REFERENCE_KEYS, how="left")
    trials["speed_up"] = trials[f"{value}_cell_median"] / trials["reference_tokens_per_s"]

    def paint(axes: Axes, at: int, cell: pd.DataFrame, _: Panel) -> str:
        first, look = cell.iloc[0], run.looks[cell["backend"].iloc[0]]
        if pd.isna(first[f"{value}_cell_median"]):
            return str(first["status"])
        axes.plot([0, first[f"{value}_cell_median"]], [at, at], color=look.colour, linewidth=0.8)
        for valid, part in cell[cell[value].notna()].groupby(cell["status"] == Status.OK):
            style.mark(axes, part[value].astype(float), [at] * len(part), look, valid=bool(valid), size=2.2, alpha=0.6)
        style.mark(axes, [first[f"{value}_cell_median"]], [at], look, valid=bool(first["valid"]), size=5)
        if not first["valid"]:
            return "invalid"
        return "" if pd.isna(first["speed_up"]) else f"{first['speed_up']:.2f}x"

    remark = "parallel speed-up, tokens/s over the reference's; or how the cell failed" if len(good) else "failed cells"
    also = [value, f"{value}_cell_median", "reference_tokens_per_s", "speed_up"]
    return _rows(run, "speed_up", trials, value, "Speed: tokens per second", "tokens/s", [], paint, also, [value],
                 f"{remark}; small points are trials, large ones their medians")
