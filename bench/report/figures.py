"""The figures of a run, each as PNG and SVG with the plotted data beside it as CSV. Failed cells stay visible.

Figures that an earlier report drew and this one does not are removed: they would show cells that are gone.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import matplotlib.style

from bench.judge.pairs import ComparedPair
from bench.judge.standing import Standing
from bench.judge.statistics import MARGIN, MIN_TRIALS
from bench.judge.tables import Tables
from bench.judge.verdicts import Reason, Verdict
from bench.report import forest, sheet, style
from bench.report.bars import draw_memory_categories, draw_traffic
from bench.report.comparison import Report
from bench.report.figure_data import FigureData
from bench.report.formats import guarded, write_frame
from bench.report.lines import draw_loss_curves, draw_step_time
from bench.report.rows import draw_held_gradients, draw_noise, draw_optimizer_steps
from bench.report.scatter import draw_memory_vs_time
from bench.report.sheet import Drawing

KINDS = (
    "memory_vs_time",
    "step_time_ratio",
    "step_time",
    "noise",
    "memory_categories",
    "communication",
    "loss_curves",
    "optimizer_steps",
    "held_gradients",
)
"""All figures that a run may have."""
FORMER = ("peak_memory", "speed_up")
"""Figures that earlier versions drew; they also drew several of a kind, with a number after the name."""


def draw(tables: Tables, manifest: dict[str, Any], folder: Path, standing: Standing | None = None) -> list[Path]:
    """Write the figures of a judged run into the folder; returns the paths. Figures without data are not drawn.

    With its standing, also the ratios of step times to the baseline, and a banner where times cannot be compared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with matplotlib.style.context(list(style.BASE)):
        for drawing in figures(tables, manifest, standing):
            paths += sheet.save(drawing.figure, folder / drawing.stem, drawing.words)
            paths.append(folder / f"{drawing.stem}.csv")
            write_frame(drawing.data, paths[-1])
    remove_leftovers(folder, str(manifest.get("run_id")), {*KINDS, *FORMER}, paths)
    return paths


def figures(tables: Tables, manifest: dict[str, Any], standing: Standing | None = None) -> list[Drawing]:
    """The figures of ``draw``, not yet saved."""
    if tables.trials.empty:
        return []
    remarks, floor = ((), None) if standing is None else (standing.remarks, standing.floor)
    run = FigureData(tables, manifest, remarks, "" if standing is None else obstacle(standing))
    makers = (
        draw_memory_vs_time,
        draw_step_time,
        draw_memory_categories,
        draw_traffic,
        draw_loss_curves,
        draw_optimizer_steps,
        draw_held_gradients,
    )
    with matplotlib.style.context(list(style.BASE)):
        found = [drawing for maker in makers for drawing in maker(run)]
        found += draw_noise(run, None if floor is None else floor.interval)
    return found if run.obstacle or standing is None else found + ratios(standing)


def obstacle(standing: Standing) -> str:
    """Why no two times of a run can be compared; empty if there is a ratio with an interval, or nothing to compare."""
    rows = _timed(standing)
    comparable = (row for row in rows if row.judgement.verdict is not Verdict.NOT_COMPARABLE)
    if any(row.time is not None and row.time.low is not None for row in comparable):
        return ""
    reasons = Counter(row.judgement.reason for row in rows)
    few = dict.fromkeys((Reason.FEW_TRIALS, Reason.NO_FLOOR), f"fewer than {MIN_TRIALS} good trials of a cell")
    return "; ".join(few.get(reason, str(reason)) for reason, _ in reasons.most_common(3))


def _timed(standing: Standing) -> list[ComparedPair]:
    """The comparisons of cells that have times; not that of the baseline with itself."""
    return [row for row in standing.rows if row.pair.b.world.times_communication]


def ratios(standing: Standing) -> list[Drawing]:
    """Every cell against the baseline's: ratios of step times with intervals, and the noise floor."""
    report = Report(
        a=standing.baseline,
        b="each other backend",
        rows=_timed(standing),
        differences=(),
        remarks=standing.remarks,
        notes=(),
        margin=MARGIN,
    )
    return forest.draw(report, "step_time_ratio")


SUFFIXES = (".png", ".svg", ".csv")
"""Endings of the files of one figure; the last file has its data."""


def remove_leftovers(folder: Path, run_id: str, kinds: Collection[str], drawn: Collection[Path]) -> list[Path]:
    """Remove the figures of this run and of these kinds that are not among the files drawn; returns their paths.

    A figure is three files, the last of which names the run or its cells. All other files may be a user's, and stay.
    Raises OSError if a file cannot be read or removed.
    """
    removed = []
    for data in sorted(folder.glob("*" + SUFFIXES[-1])):
        files = [data.with_suffix(suffix) for suffix in SUFFIXES]
        if re.sub(r"-\d+$", "", data.stem) not in kinds or not set(files).isdisjoint(drawn):
            continue
        if all(map(Path.is_file, files)) and _is_of(data, run_id):
            for path in files:
                path.unlink()
            removed += files
    return removed


def _is_of(data: Path, run_id: str) -> bool:
    """Whether the first row belongs to the run; a row of ratios names no run but its two cells."""
    try:
        with data.open(encoding="utf-8", errors="replace", newline="") as lines:
            first = next(csv.DictReader(lines), {})
    except csv.Error:
        return False
    return first.get("run_id") == guarded(run_id) or {"cell_id_a", "cell_id_b"} <= set(first)
