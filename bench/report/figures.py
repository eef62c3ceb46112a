"""The figures of a run, each as PNG with the plotted data beside it as CSV. Failed cells stay visible.

Figures that an earlier report drew and this one does not are removed: they would show cells that are gone.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.style
from PIL import Image, UnidentifiedImageError

from bench.judge.analysis import Analysis
from bench.report import canvas, forest, style
from bench.report.bars import draw_memory_categories, draw_traffic
from bench.report.canvas import Drawing
from bench.report.comparison import Report
from bench.report.curves import draw_loss_curves, draw_step_time
from bench.report.figure_data import FigureData
from bench.report.formats import write_frame
from bench.report.scatter import draw_memory_vs_time, draw_noise

MAKERS = {
    "memory_vs_time": draw_memory_vs_time,
    "step_time": draw_step_time,
    "memory_categories": draw_memory_categories,
    "communication": draw_traffic,
    "loss_curves": draw_loss_curves,
    "noise": draw_noise,
}
RATIOS = "step_time_ratio"
KINDS = (*MAKERS, RATIOS)
"""All figures that a run may have."""


def draw(data: Analysis, folder: Path) -> list[Path]:
    """Write the figures of a judged run into the folder; returns the paths. Figures without data are not drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, run_id = [], data.run.name
    drawings = {drawing.stem: drawing for drawing in figures(data)}
    for kind in KINDS:
        picture, table = folder / f"{kind}.png", folder / f"{kind}.csv"
        if (drawing := drawings.get(kind)) is not None:
            paths += [canvas.save(drawing.figure, picture, drawing.words, run_id), table]
            write_frame(drawing.data, table)
        elif table.is_file() and _is_of(picture, run_id):
            picture.unlink()
            table.unlink()
    return paths


def _is_of(picture: Path, run_id: str) -> bool:
    """Whether a report on this run drew the picture; all other files may be a user's, and stay."""
    try:
        with Image.open(picture) as image:
            return bool(image.info.get("Source") == run_id)
    except (FileNotFoundError, UnidentifiedImageError):
        return False


def figures(data: Analysis) -> list[Drawing]:
    """The figures of ``draw``, not yet saved."""
    if data.run.tables.trials.empty:
        return []
    figure_data = FigureData(data)
    with matplotlib.style.context(list(style.BASE)):
        found = [drawing for maker in MAKERS.values() for drawing in maker(figure_data)]
        for drawing in found:
            canvas.freeze(drawing.figure)
    if data.hides_times:
        return found
    # Every cell against the baseline's, but those that run once, as their matrix wants it.
    once = data.run.manifest.once
    rows = [row for row in data.verdicts if row.b.world.times_communication and row.b.cell_id not in once]
    report = Report(
        a=data.baseline,
        b="each other backend",
        rows=rows,
        num_runs=len(data.pool.runs),
        control_n=data.control.a.accumulate if data.control else None,
    )
    return found + forest.draw(report, RATIOS, figure_data.figure_words("", timed=True, ratios=True))
