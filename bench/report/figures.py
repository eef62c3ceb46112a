"""The figures of a run, each as PNG and SVG with the plotted data beside it as CSV. Failed cells stay visible.

Figures that an earlier report drew and this one does not are removed: they would tell of cells that are gone.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style

from bench.judge.standing import Standing
from bench.judge.statistics import MARGIN
from bench.judge.tables import Tables
from bench.report import forest, sheet, style
from bench.report.bars import draw_held_gradients, draw_memory_categories, draw_traffic
from bench.report.comparison import Report
from bench.report.figure_data import FigureData
from bench.report.formats import guarded, write_frame
from bench.report.lines import draw_loss_curves, draw_peak_memory, draw_step_time
from bench.report.panels import MOST_PAGES, Drawing
from bench.report.rows import draw_noise, draw_optimizer_steps, draw_speed_up
from bench.report.scatter import draw_memory_vs_time

KINDS = (
    "step_time",
    "peak_memory",
    "memory_vs_time",
    "loss_curves",
    "optimizer_steps",
    "speed_up",
    "memory_categories",
    "held_gradients",
    "communication",
    "noise",
    "step_time_ratio",
)
"""All figures that a run may have: a page of one has its number after the name."""


def draw(tables: Tables, manifest: dict[str, Any], folder: Path, standing: Standing | None = None) -> list[Path]:
    """Write the figures of a judged run into the folder; returns the paths. Figures without data are not drawn.

    With its standing, also the ratios of step times to the baseline. Figures of an earlier report of the run that are
    not drawn again are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with matplotlib.style.context(list(style.BASE)):
        before: Drawing | None = None
        said = () if standing is None else standing.remarks
        drawings = [*figures(tables, manifest, said), *spread(tables, manifest, standing), *ratios(standing)]
        for drawing in drawings:
            written = paths[-1] if before is not None and before.data is drawing.data else None
            paths += sheet.save(drawing.figure, folder / drawing.stem, drawing.words)
            paths.append(folder / f"{drawing.stem}.csv")
            if written is None:
                write_frame(drawing.data, paths[-1])
            else:  # pages of one figure have their data in common
                shutil.copyfile(written, paths[-1])
            before = drawing
    remove_leftovers(folder, str(manifest.get("run_id")), KINDS, paths)
    return paths


def ratios(standing: Standing | None) -> list[Drawing]:
    """Every cell against the baseline's: ratios of step times with intervals, and the noise floor."""
    if standing is None or not standing.rows:
        return []
    report = Report(
        a=standing.baseline,
        b="each other backend",
        rows=standing.rows,
        differences=(),
        remarks=standing.remarks,
        notes=(),
        margin=MARGIN,
    )
    return forest.draw(report, "step_time_ratio", MOST_PAGES)


def spread(tables: Tables, manifest: dict[str, Any], standing: Standing | None) -> list[Drawing]:
    """How far trials are from the medians of their cells, beside the noise floor."""
    if tables.trials.empty:
        return []
    floor = None if standing is None or standing.floor is None else standing.floor.interval
    with matplotlib.style.context(list(style.BASE)):
        return draw_noise(FigureData(tables, manifest), floor)


def figures(tables: Tables, manifest: dict[str, Any], remarks: Sequence[str] = ()) -> list[Drawing]:
    """The figures of ``draw`` that need no verdicts, not yet saved, with these remarks below them."""
    if tables.trials.empty:
        return []
    run = FigureData(tables, manifest, remarks)
    with matplotlib.style.context(list(style.BASE)):
        makers = (
            draw_step_time,
            draw_peak_memory,
            draw_memory_vs_time,
            draw_loss_curves,
            draw_optimizer_steps,
            draw_speed_up,
        )
        found = [drawing for maker in makers for drawing in maker(run)]
        memory = (draw_memory_categories, draw_held_gradients)
        found += [drawing for maker in memory for drawing in maker(run, tables.memory)]
        return found + draw_traffic(run, tables.collectives)


SUFFIXES = (".png", ".svg", ".csv")
"""Of the files of one figure; the last has its data."""


def kind_of(stem: str) -> str:
    """The name of a figure without the number of its page: ``noise`` of ``noise`` and of ``noise-2``."""
    name, _, page = stem.rpartition("-")
    return name if name and page.isdecimal() else stem


def remove_leftovers(folder: Path, run_id: str, kinds: Collection[str], drawn: Collection[Path]) -> list[Path]:
    """Remove the figures of this run and of these kinds that are not among the files drawn; returns their paths.

    A figure is three files, the last of which names the run or its cells. All else in the folder may be a user's, and
    stays. Raises OSError if a file cannot be read or removed.
    """
    removed = []
    for data in sorted(folder.glob("*" + SUFFIXES[-1])):
        files = [data.with_suffix(suffix) for suffix in SUFFIXES]
        if kind_of(data.stem) not in kinds or not set(files).isdisjoint(drawn):
            continue
        if all(map(Path.is_file, files)) and _is_of(data, run_id):
            for path in files:
                path.unlink()
            removed += files
    return removed


def _is_of(data: Path, run_id: str) -> bool:
    """Whether the first row is one of the run; a row of ratios names no run but its two cells."""
    try:
        with data.open(encoding="utf-8", errors="replace", newline="") as lines:
            first = next(csv.DictReader(lines), {})
    except csv.Error:
        return False
    return first.get("run_id") == guarded(run_id) or {"cell_id_a", "cell_id_b"} <= set(first)
