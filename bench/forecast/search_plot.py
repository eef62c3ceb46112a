"""The picture of ``predict --batch``: steps against peak memory, and the front by name."""

from __future__ import annotations

from pathlib import Path

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D

from bench.files import writing
from bench.forecast.choice import Question
from bench.forecast.search import Combination, Search
from bench.forecast.search_text import NOTES
from bench.formatting import plural
from bench.report.canvas import (
    DIAGONAL,
    FigureWords,
    PointName,
    freeze,
    name_points,
    new_figure,
    save,
)
from bench.report.style import (
    BASE,
    FRAMEWORK_COLOURS,
    GREY,
    INTERVAL,
    OTHER_MARKER,
    SYNC_MARKERS,
    Key,
)

GIB = 2**30
HEIGHT = 3.8
"""Of the panel, in inches."""
FAINT = 0.25
"""Opacity of what is not on the front."""
BEYOND = 1.5
"""The axis of memory ends at so many times the limit, or the largest peak of the front."""


def draw(question: Question, found: Search, path: Path) -> None:
    """Draw all combinations into a PNG: lines from overlapped to serial steps, where markers are.

    Raises InputError if the file cannot be written.
    """
    limit = max((each.peak for each in found.front), default=0)
    if question.memory_bytes is not None:
        limit = question.memory_bytes
    shown = [each for each in found.combinations if each.peak <= BEYOND * limit]
    num_beyond = len(found.combinations) - len(shown)
    with matplotlib.style.context(list(BASE)):
        words = _words(question, found, num_beyond)
        figure = new_figure(words, _keys(shown), HEIGHT)
        axes = figure.subplots()
        for combination in shown:
            _point(axes, combination, is_on_front=combination in found.front)
        if question.memory_bytes is not None:
            axes.axvline(question.memory_bytes / GIB, color=GREY, linestyle=":")
        axes.set(xlabel="predicted peak of a rank (GiB)", ylabel="predicted optimizer step (s)")
        axes.set_xlim(left=0)
        freeze(figure)
        names = []
        for each in found.front:
            point = (each.peak / GIB, each.step.serial)
            names.append(PointName(_name(each), point, _colour(each)))
        name_points(axes, names, DIAGONAL)
        with writing(f"--plot {path}", "name a file that can"):
            save(figure, path.with_suffix(""), words)


def _words(question: Question, found: Search, num_beyond: int) -> FigureWords:
    cell = question.cell
    notes = [NOTES]
    if num_beyond:
        notes.append(f"{plural(num_beyond, 'combination')} with more memory are not drawn.")
    if question.memory_bytes is not None:
        notes.append(
            "Dotted: the memory of a device, of which a part is kept free; only what fits is on "
            "the front."
        )
    title = "Nothing fits"
    if not found.combinations:
        title = "Nothing is predicted"
    if found.front:
        title = f"{plural(len(found.front), 'combination')} on the front of time against memory"
    return FigureWords(
        title=title,
        subtitle=(
            f"By prediction: {cell.model}, B = {cell.global_batch_size} samples of "
            f"{cell.sequence_length} tokens, W = {cell.world_size}, {cell.precision}. A line is "
            "from the overlapped to the serial step; lower left is better. At the front: "
            "micro-batch x N, and what is checkpointed."
        ),
        footer="",
        notes=notes,
    )


def _name(combination: Combination) -> str:
    cell = combination.cell
    text = f"{combination.prediction.name}, {cell.micro_batch_size} x {cell.accumulate}"
    if combination.checkpointing != "none":
        text += f", {combination.checkpointing}"
    return text


def _colour(combination: Combination) -> str:
    return FRAMEWORK_COLOURS.get(combination.prediction.backend.framework, GREY)


def _point(axes: Axes, combination: Combination, *, is_on_front: bool) -> None:
    step, peak, alpha = combination.step, combination.peak / GIB, FAINT
    if is_on_front:
        alpha = 1.0
    marker = SYNC_MARKERS.get(combination.prediction.backend.sync, OTHER_MARKER)
    colour = to_rgba(_colour(combination), alpha)
    axes.plot([peak, peak], [step.overlapped, step.serial], linewidth=INTERVAL, color=colour)
    axes.plot(peak, step.serial, linestyle="none", marker=marker, markersize=5.5, color=colour)


def _keys(shown: list[Combination]) -> list[Key]:
    """Frameworks by colour and sync by marker."""
    frameworks, syncs = set(), set()
    for combination in shown:
        frameworks.add(combination.prediction.backend.framework)
        syncs.add(str(combination.prediction.backend.sync))
    keys: list[Key] = []
    for framework in sorted(frameworks):
        line = Line2D([], [], color=FRAMEWORK_COLOURS.get(framework, GREY))
        keys.append((line, framework))
    for sync in sorted(syncs):
        marker = SYNC_MARKERS.get(sync, OTHER_MARKER)
        keys.append((Line2D([], [], color=GREY, linestyle="none", marker=marker), sync))
    return keys
