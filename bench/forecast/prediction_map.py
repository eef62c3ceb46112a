"""The map of ``predict``: the best backend at each N and speed of the link, one strip per N, one colour per backend."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from bench.errors import InputError
from bench.forecast.best import Question, Stretch
from bench.forecast.prediction_text import About, markdown, named
from bench.report import canvas, style
from bench.report.canvas import Drawing, FigureWords
from bench.report.formats import write_frame
from bench.report.style import SMALL, Key, safe
from bench.words import rate

COLOURS = (
    *("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#0072B2", "#D55E00"),
    *("#882255", "#999933", "#44AA99"),
)
"""Okabe and Ito's palette, the pale ones first, and three of Paul Tol's muted one."""
UNDECIDED = "//"
"""Hatch of where another backend may be faster."""
NOTHING = "#e4e4e4"
NOTHING_NAME = "nothing fits"
STRIP, FRAME = 0.36, 0.75
"""Inches of one strip, and of the axis below."""
AXIS = 6.3
"""Least inches of the axis of speeds."""
STEM = "predict"


def write_files(folder: Path, about: About, rows: Sequence[Mapping[str, Any]], question: Question | None) -> None:
    """Write the page and, if there are bounds, the map. Raises InputError if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "predict.md").write_text(markdown(about, rows), encoding="utf-8")
        if question is not None:
            drawing = draw(about, question)
            canvas.save(drawing.figure, folder / drawing.stem, drawing.words)
            write_frame(drawing.data, folder / f"{drawing.stem}.csv")
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be written ({error.strerror}); name a folder that can") from error


def draw(about: About, question: Question) -> Drawing:
    """The map, with a star at the N and the link that were asked for."""
    assert about.link is not None
    strips = question.rows_of_map(about.link)
    data = table(about, question, strips)
    names = list(dict.fromkeys(stretch.choice.best for row in strips.values() for stretch in row))
    words = FigureWords(
        "Predicted best backend by N and speed of the link"
        + ", with activation checkpointing" * about.cell.activation_checkpointing,
        f"{about.work}; {about.ranks}; {about.limits}, at N = {about.cell.accumulate}",
        f"Plain: no other backend that fits can be more than {100 * about.margin:g} % faster, whatever communication "
        "is hidden; of equally fast ones the one with the least memory. Hatched: undecided; the colour is that of the "
        "smallest upper bound (nothing hidden). Activations are estimated, wire bytes those of ring algorithms. The "
        "micro-batch is fixed, and compute in proportion to N.",
    )
    with matplotlib.style.context(list(style.BASE)):
        inches = STRIP * len(strips) + FRAME
        figure = canvas.new_figure(words, _keys(names, strips), inches)
        axes = figure.subplots()
        _strips(axes, strips, names, data, " between nodes" * about.two_levels)
        _point(axes, about, list(strips))
    return Drawing(STEM, figure, data, words)


def table(about: About, question: Question, strips: Mapping[int, Sequence[Stretch]]) -> pd.DataFrame:
    """One row per N and stretch of speeds, with the speed from which its best could hide all communication."""
    assert about.link is not None
    known = {one.name: one for one in question.predictions}
    rows = []
    for n, stretches in strips.items():
        for one in stretches:
            best = known.get(one.choice.best)
            hidden = math.nan if best is None else question.hidden_from(best, n, about.link)
            rows.append(
                {
                    "accumulate": n,
                    "link_low_bytes_per_s": one.low,
                    "link_high_bytes_per_s": one.high,
                    "best": one.choice.best,
                    "undecided": one.choice.undecided,
                    "equal": " ".join(one.choice.equal),
                    "peak_memory_bytes": None if best is None else best.memory(n).peak,
                    "compute_s": question.compute(n),
                    "hidden_from_bytes_per_s": hidden,
                }
            )
    return pd.DataFrame(rows).astype({"peak_memory_bytes": "Int64"})


def _look(name: str, names: Sequence[str], *, undecided: bool = False) -> dict[str, Any]:
    """The fill of a backend's area."""
    colour = COLOURS[[other for other in names if other].index(name) % len(COLOURS)] if name else NOTHING
    return {"facecolor": colour, "hatch": UNDECIDED * undecided, "edgecolor": "#ffffff", "linewidth": 0}


def _keys(names: Sequence[str], strips: Mapping[int, Sequence[Stretch]]) -> list[Key]:
    equal: dict[str, set[str]] = {}
    for row in strips.values():
        for one in row:
            certain = dataclasses.replace(one.choice, undecided=False)
            equal.setdefault(one.choice.best, set()).add(named(certain))
    keys: list[Key] = [
        # Backends that are as good at some N only are in the table.
        (Patch(**_look(name, names)), NOTHING_NAME if not name else min(equal[name], key=len))
        for name in names
    ]
    bar = Line2D([], [], color="black", linewidth=1.6, marker="|", linestyle="none", markersize=9, markeredgewidth=1.6)
    if any(one.choice.undecided for row in strips.values() for one in row):
        keys.append((Patch(facecolor="#888888", hatch=UNDECIDED, edgecolor="#ffffff", linewidth=0), "undecided"))
    return [*keys, (bar, "all communication could be hidden right of this"), (_star(), "as asked")]


def _star() -> Line2D:
    return Line2D([], [], color="black", marker="*", markersize=9, linestyle="none", markeredgecolor="white")


def _strips(
    axes: Axes, strips: Mapping[int, Sequence[Stretch]], names: Sequence[str], data: pd.DataFrame, between: str
) -> None:
    """One strip per N, the smallest at the bottom; ``between``: which of two links is swept."""
    for y, stretches in enumerate(strips.values()):
        for one in stretches:
            corner = (one.low, y - 0.5)
            look = _look(one.choice.best, names, undecided=one.choice.undecided)
            axes.add_patch(Rectangle(corner, one.high - one.low, 1, **look))
    low = min(stretches[0].low for stretches in strips.values())
    high = max(stretches[-1].high for stretches in strips.values())
    order = {n: y for y, n in enumerate(strips)}
    for row in data.to_dict("records"):
        speed = row["hidden_from_bytes_per_s"]
        if row["link_low_bytes_per_s"] <= speed <= row["link_high_bytes_per_s"]:
            y = order[row["accumulate"]]
            axes.plot([speed, speed], [y - 0.5, y + 0.5], color="black", linewidth=1.6, solid_capstyle="butt")
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(-0.5, len(strips) - 0.5)
    ticks = [10.0**e for e in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]
    axes.set_xticks(ticks, [rate(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(strips)), [str(n) for n in strips])
    axes.set_xlabel("speed of the link per rank" + between)
    axes.set_ylabel("N, micro-batches per optimizer step")
    axes.grid(visible=False)
    for name in names:
        _label(axes, name, strips, math.log10(high / low))


def _label(axes: Axes, name: str, strips: Mapping[int, Sequence[Stretch]], decades: float) -> None:
    """The backend's name in the middle of its area, if one of its strips is wide enough; the legend has all."""
    said = name or NOTHING_NAME
    need = (style.text_width(said, SMALL) + 0.15) * decades / AXIS
    wide = [
        (y, one)
        for y, stretches in enumerate(strips.values())
        for one in stretches
        if one.choice.best == name and math.log10(one.high / one.low) >= need
    ]
    if not wide:
        return
    y, one = wide[len(wide) // 2]
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.2}
    axes.text(math.sqrt(one.low * one.high), y, safe(said), ha="center", va="center", size=SMALL, bbox=box, zorder=3)


def _point(axes: Axes, about: About, powers: Sequence[int]) -> None:
    """The star at the N and the link that were asked for."""
    assert about.link is not None
    y = math.log2(about.cell.accumulate)
    axes.add_line(_star())
    star = axes.lines[-1]
    star.set_data([about.link.bytes_per_s], [min(y, len(powers) - 0.5)])
    star.set_zorder(4)
