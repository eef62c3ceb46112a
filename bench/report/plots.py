"""The figures of a run, each as PNG and SVG with the plotted data beside it as CSV. Failed cells stay visible."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.style

from bench.analysis.baseline import Standing
from bench.analysis.statistics import MARGIN
from bench.report import forest, style
from bench.report.against_n import draw_peak_memory, draw_step_time
from bench.report.comparison import Report
from bench.report.curves import draw_loss_curves
from bench.report.leftovers import remove_leftovers
from bench.report.memory import draw_held_gradients, draw_memory_categories
from bench.report.noise import draw_noise
from bench.report.panels import MOST_PAGES, Drawing, Run
from bench.report.rows import draw_optimizer_steps, draw_speed_up
from bench.report.scatter import draw_memory_vs_time
from bench.report.spreadsheet import write_csv
from bench.report.traffic import draw_traffic
from bench.tables import Tables

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
            paths += style.save(drawing.figure, folder / drawing.stem, drawing.words)
            paths.append(folder / f"{drawing.stem}.csv")
            if written is None:
                write_csv(drawing.data, paths[-1])
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
        return draw_noise(Run(tables, manifest), floor)


def figures(tables: Tables, manifest: dict[str, Any], remarks: Sequence[str] = ()) -> list[Drawing]:
    """The figures of ``draw`` that need no verdicts, not yet saved, with these remarks below them."""
    if tables.trials.empty:
        return []
    run = Run(tables, manifest, remarks)
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
