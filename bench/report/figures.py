"""The figures of a run, each as PNG and SVG with the plotted data beside it as CSV. Failed cells stay visible.

Figures that an earlier report drew and this one does not are removed: they would show cells that are gone.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection
from pathlib import Path

import matplotlib.style

from bench.report import forest, sheet, style
from bench.report.bars import draw_memory_categories, draw_traffic
from bench.report.comparison import Report
from bench.report.deviations import draw_held_gradients, draw_noise, draw_optimizer_steps
from bench.report.figure_data import FigureData
from bench.report.formats import guarded, write_frame
from bench.report.lines import draw_loss_curves, draw_step_time
from bench.report.report_data import ReportData
from bench.report.scatter import draw_memory_vs_time
from bench.report.sheet import Drawing

MAKERS = {
    "memory_vs_time": draw_memory_vs_time,
    "step_time": draw_step_time,
    "memory_categories": draw_memory_categories,
    "communication": draw_traffic,
    "loss_curves": draw_loss_curves,
    "optimizer_steps": draw_optimizer_steps,
    "held_gradients": draw_held_gradients,
    "noise": draw_noise,
}
RATIOS = "step_time_ratio"
KINDS = (*MAKERS, RATIOS)
"""All figures that a run may have."""
FORMER = ("peak_memory", "speed_up")
"""Figures that earlier versions drew; they also drew several of a kind, with a number after the name."""


def draw(data: ReportData, folder: Path, obstacle: str = "") -> list[Path]:
    """Write the figures of a judged run into the folder; returns the paths. Figures without data are not drawn.

    ``obstacle`` is why times cannot be compared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with matplotlib.style.context(list(style.BASE)):
        for drawing in figures(data, obstacle):
            paths += sheet.save(drawing.figure, folder / drawing.stem, drawing.words)
            paths.append(folder / f"{drawing.stem}.csv")
            write_frame(drawing.data, paths[-1])
    remove_leftovers(folder, data.run.name, {*KINDS, *FORMER}, paths)
    return paths


def figures(data: ReportData, obstacle: str = "") -> list[Drawing]:
    """The figures of ``draw``, not yet saved."""
    if data.run.tables.trials.empty:
        return []
    run, against_baseline = FigureData(data, obstacle), data.against_baseline
    with matplotlib.style.context(list(style.BASE)):
        found = [drawing for maker in MAKERS.values() for drawing in maker(run)]
    if obstacle:
        return found
    # Every cell against the baseline's, but those that run once, as their matrix wants it.
    timed = [row for row in against_baseline.rows if row.pair.b.world.times_communication]
    rows = [row for row in timed if row.pair.b.cell_id not in (data.run.manifest.get("once") or ())]
    report = Report(a=against_baseline.baseline, b="each other backend", rows=rows, remarks=against_baseline.remarks)
    return found + forest.draw(report, RATIOS)


SUFFIXES = (".png", ".svg", ".csv")
"""Endings of the files of one figure; the last file has its data."""


def remove_leftovers(folder: Path, run_id: str, kinds: Collection[str], drawn: Collection[Path]) -> None:
    """Remove the figures of this run and of these kinds that are not among the files drawn.

    A figure is three files, the last of which names the run or its cells. All other files may be a user's, and stay.
    Raises OSError if a file cannot be read or removed.
    """
    for data in sorted(folder.glob("*" + SUFFIXES[-1])):
        files = [data.with_suffix(suffix) for suffix in SUFFIXES]
        if re.sub(r"-\d+$", "", data.stem) not in kinds or not set(files).isdisjoint(drawn):
            continue
        if all(map(Path.is_file, files)) and _is_of(data, run_id):
            for path in files:
                path.unlink()


def _is_of(data: Path, run_id: str) -> bool:
    """Whether the first row belongs to the run; a row of ratios names no run but its two cells."""
    try:
        with data.open(encoding="utf-8", errors="replace", newline="") as lines:
            first = next(csv.DictReader(lines), {})
    except csv.Error:
        return False
    return first.get("run_id") == guarded(run_id) or {"cell_id_a", "cell_id_b"} <= set(first)
