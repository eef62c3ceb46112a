"""Six figures of a run, each as PNG and SVG with the plotted data beside it as CSV. Failed cells stay visible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.style

from bench.report import style
from bench.report.against_n import draw_peak_memory, draw_step_time
from bench.report.curves import draw_loss_curves
from bench.report.panels import Drawing, Run
from bench.report.rows import draw_optimizer_steps, draw_speed_up
from bench.report.scatter import draw_memory_vs_time
from bench.tables import Tables


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
        makers = (
            draw_step_time,
            draw_peak_memory,
            draw_memory_vs_time,
            draw_loss_curves,
            draw_optimizer_steps,
            draw_speed_up,
        )
        return [drawing for maker in makers for drawing in maker(run)]
