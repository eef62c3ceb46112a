"""The figures of a run, each as PNG with the plotted data beside it as CSV. Failed cells stay visible.

Figures that an earlier report drew and this one does not are removed: they would show cells that are gone.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.style
from PIL import Image, UnidentifiedImageError

from bench.report import canvas, forest, style
from bench.report.bars import draw_memory_categories, draw_traffic
from bench.report.canvas import Drawing
from bench.report.comparison import Report
from bench.report.curves import draw_loss_curves, draw_step_time
from bench.report.deviations import draw_held_gradients, draw_noise, draw_optimizer_steps
from bench.report.figure_data import FigureData
from bench.report.formats import write_frame
from bench.report.report_data import ReportData
from bench.report.scatter import draw_memory_vs_time

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


def draw(data: ReportData, folder: Path, obstacle: str = "") -> list[Path]:
    """Write the figures of a judged run into the folder; returns the paths. Figures without data are not drawn.

    ``obstacle`` is why times cannot be compared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths, run_id = [], data.run.name
    drawings = {drawing.stem: drawing for drawing in figures(data, obstacle)}
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
