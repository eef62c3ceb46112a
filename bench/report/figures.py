"""The figures of a run, each as PNG with the plotted data beside it as CSV.

Failed cells stay visible. Figures that an earlier report drew and this one does not are removed:
they would show cells that are gone.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.style
from PIL import Image

from bench.files import open_regular
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
PICTURE_BYTES = 64 * 2**20
"""Largest picture in which it is looked up which run it is of."""
RATIOS = "step_time_ratio"
KINDS = (*MAKERS, RATIOS)
"""All figures that a run may have."""


def draw(data: Analysis, folder: Path) -> list[Path]:
    """Write the figures of a judged run into the folder; those without data are not drawn.

    Returns the paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths, run_id = [], data.run.name
    drawings = {drawing.stem: drawing for drawing in figures(data)}
    for kind in KINDS:
        picture, table = folder / f"{kind}.png", folder / f"{kind}.csv"
        drawing = drawings.get(kind)
        if drawing is not None:
            canvas.save(drawing.figure, folder / kind, drawing.words, run_id)
            write_frame(drawing.data, table)
            paths += [picture, table]
        elif table.is_file() and _is_of(picture, run_id):
            picture.unlink()
            table.unlink()
    return paths


def _is_of(picture: Path, run_id: str) -> bool:
    """Whether a report on this run drew the picture; all other files may be a user's, and stay."""
    try:
        with open_regular(picture, PICTURE_BYTES) as file, Image.open(file) as image:
            return bool(image.info.get("Source") == run_id)
    except (
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
    ):  # no picture, of whatever kind
        return False


def figures(data: Analysis) -> list[Drawing]:
    """The figures of ``draw``, not yet saved."""
    if data.run.tables.trials.empty:
        return []
    figure_data = FigureData(data)
    found: list[Drawing] = []
    with matplotlib.style.context(list(style.BASE)):
        for maker in MAKERS.values():
            found += maker(figure_data)
        for drawing in found:
            canvas.freeze(drawing.figure)
    if data.hides_times:
        return found
    words = figure_data.figure_words("", timed=True, ratios=True)
    return found + forest.draw(_against_baseline(data), RATIOS, words)


def _against_baseline(data: Analysis) -> Report:
    """Every cell against the baseline's, but those that run once, as their matrix wants it."""
    once = data.run.manifest.once
    rows = []
    for pair in data.verdicts:
        if pair.b.world.times_communication and pair.b.cell_id not in once:
            rows.append(pair)
    control_n = None
    if data.control:
        control_n = data.control.a.accumulate
    return Report(
        a=data.baseline,
        b="each other backend",
        rows=rows,
        num_runs=len(data.pool.runs),
        control_n=control_n,
    )
