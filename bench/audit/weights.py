"""Weight maps: which sample is in which update of a scenario, and with what part of the weight that it should have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.audit.grids import (
    LEFT_OPEN,
    LOST,
    NOT_COMPUTED,
    TOLERANCE,
    Extent,
    Map,
    Observation,
    data,
    drawn,
    group,
    in_no_update,
    relative,
)
from bench.report import sheet, style
from bench.report.panels import Drawing
from bench.report.sheet import FigureWords
from bench.report.style import GREY, SMALL, TINY, Key, Ruler
from bench.words import plural

MAX_UPDATES, MIN_UPDATES = 16, 3
"""Updates of a map that are drawn: at most, and at least even if many maps share the page."""
MAX_COLUMNS = 120
"""Samples of all epochs that are drawn side by side; two epochs are, even if they have more."""
MAX_MAPS = 12
COLOUR_LIMIT = 8.0
"""Parts of the right weight beyond 1/8 and 8 have the outermost colours."""
ROW, AROUND, MAPS_HEIGHT = 0.135, 0.62, 6.0
"""Inches: of an update, of the words around a map, and of all maps together."""
BAR, BAR_WORDS = 0.1, 0.45
"""Inches of the colour bar and of its words."""
RIGHT_COLOUR = "#3a3a3a"
COLOURS = LinearSegmentedColormap.from_list(
    "weights",
    [
        (0.0, "#c3daee"),
        (0.2, "#8fc1e3"),
        (0.497, "#1f6cb0"),
        (0.4975, RIGHT_COLOUR),
        (0.5025, RIGHT_COLOUR),
        (0.503, "#fd8d3c"),
        (0.82, "#d7301f"),
        (1.0, "#67000d"),
    ],
    N=1025,
).with_extremes(bad="white")
"""Dark grey where a weight is right (within 1 %), blue and ever paler below, orange to deep red above."""
SIGNS: dict[str, dict[str, Any]] = {
    LOST: {"marker": "x", "color": "#D55E00", "markeredgewidth": 0.9},
    LEFT_OPEN: {"marker": "o", "color": "#0072B2", "markerfacecolor": "white", "markeredgewidth": 0.7},
    NOT_COMPUTED: {"marker": ".", "color": "#888888", "markeredgewidth": 0},
}
"""How a sample that is in no update is marked below its map."""
SIGN_LABELS = {
    LOST: "in no update, though updates or a checkpoint followed: lost",
    LEFT_OPEN: "in no update at the end of training: left open",
    NOT_COMPUTED: "no loss computed: dropped, not reached, or raised",
}


@dataclass(frozen=True)
class Title:
    """Of a panel, in lines that fit."""

    text: str
    short: bool
    """Whether it does not say which backend has which verdict."""


def draw_weight_map(observations: Sequence[Observation], folder: Path, *, footer: str = "") -> Path | None:
    """Write ``weights-<scenario>`` as PNG and SVG into the folder, of all observations of one scenario.

    Returns the PNG's path; None, and nothing is written, if no backend made an update.
    """
    drawing = weight_map(observations, footer=footer)
    if drawing is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.style.context(list(style.BASE)):
        return sheet.save(drawing.figure, folder / drawing.stem, drawing.words)[0]


def weight_map(observations: Sequence[Observation], *, footer: str = "") -> Drawing | None:
    """The figure of ``draw_weight_map``, not yet saved; its data has a row per backend, update, epoch and sample."""
    maps = group(observations)
    if not maps:
        return None
    scenario = maps[0].first["scenario"]
    with matplotlib.style.context(list(style.BASE)):
        columns, extent = _shape(maps[:MAX_MAPS], int(scenario["samples"]))
        titles = _titles(maps[:MAX_MAPS], extent, (style.WIDTH - 0.3) / columns - 0.3)
        words = FigureWords(
            f"Weight of each sample in each update: {scenario['name']}",
            "; ".join(part for part in (scenario["title"], _setting(scenario)) if part),
            footer,
            _notes(observations, maps, titles),
        )
        figure = _figure(maps[:MAX_MAPS], extent, columns, titles, words)
    return Drawing(f"weights-{scenario['name']}", figure, data(observations), words)


def _setting(scenario: Mapping[str, Any]) -> str:
    n = ", ".join(map(str, scenario["accumulate"]))
    ranks = plural(scenario["world_size"], "rank")
    parts = [plural(scenario["samples"], "sample"), ranks, f"micro-batches of {scenario['batch_size']}", f"N = {n}"]
    if scenario["max_steps"] is not None:
        parts.append(f"max_steps = {scenario['max_steps']}")
    if scenario["epochs"] is not None:
        parts.append(f"{scenario['epochs']} epoch{'s' if scenario['epochs'] > 1 else ''}")
    return ", ".join(parts)


def _notes(observations: Sequence[Observation], maps: Sequence[Map], titles: Sequence[Title]) -> list[str]:
    """Who is in which map, where its title cannot say it, and who has none."""
    notes = [f"same map: {_by_verdict(found.observations)}" for found, t in zip(maps, titles, strict=False) if t.short]
    notes += [f"not drawn: {_by_verdict(found.observations)}" for found in maps[MAX_MAPS:]]
    without = [observation for observation in observations if not observation["updates"]]
    return [*notes, f"no update: {_by_verdict(without)}"] if without else notes


def _by_verdict(observations: Sequence[Observation]) -> str:
    """The backends of the observations, those of one verdict together."""
    verdicts: dict[str, list[str]] = {}
    for observation in observations:
        verdicts.setdefault(observation["verdict"], []).append(observation["backend"])
    return "; ".join(f"{', '.join(backends)} ({word})" for word, backends in verdicts.items())


def _shape(maps: Sequence[Map], samples: int) -> tuple[int, Extent]:
    """Columns of panels, and what of the maps fits into them."""
    most = max(2, MAX_COLUMNS // samples)
    epochs = min(most, max(found.epochs for found in maps))
    columns = 1 if len(maps) == 1 or samples * epochs > MAX_COLUMNS else 2 if len(maps) <= 8 else 3
    updates = MAX_UPDATES
    while updates > MIN_UPDATES and _height(maps, columns, Extent(samples, epochs, updates)) > MAPS_HEIGHT:
        updates -= 1
    extent = Extent(samples, epochs, updates)
    reached = 1 + max(
        int(epoch) for found in maps for update in found.updates[: drawn(found, extent)] for epoch in update["relative"]
    )
    if any(drawn(found, extent) < len(found.updates) for found in maps):
        epochs = min(epochs, reached)
    return columns, Extent(samples, epochs, updates)


def _rows(maps: Sequence[Map], columns: int, extent: Extent) -> list[tuple[Sequence[Map], float]]:
    """The maps row by row, and the lines that each row needs: of updates and of samples that are in none."""
    rows = [maps[start : start + columns] for start in range(0, len(maps), columns)]
    return [
        (row, max(drawn(found, extent) + any(in_no_update(found, extent).values()) for found in row)) for row in rows
    ]


def _height(maps: Sequence[Map], columns: int, extent: Extent) -> float:
    return sum((lines + 1.2) * ROW + AROUND for _, lines in _rows(maps, columns, extent))


def _figure(maps: Sequence[Map], extent: Extent, columns: int, titles: Sequence[Title], words: FigureWords) -> Figure:
    rows = _rows(maps, columns, extent)
    inches = _height(maps, columns, extent) + BAR + BAR_WORDS
    figure = sheet.sheet(words, [_keys(maps, extent)], inches, inches)
    heights = [(lines + 1.2) * ROW for _, lines in rows]
    grid = figure.add_gridspec(len(rows) + 1, columns, height_ratios=[*heights, BAR])
    for number, (row, lines) in enumerate(rows):
        for column, found in enumerate(row):
            place = number * columns + column
            axes = figure.add_subplot(grid[number, column])
            _draw_map(axes, found, extent, lines, (style.WIDTH - 0.6) / columns)
            axes.set_title(titles[place].text, loc="left")
            if column == 0:
                axes.set_ylabel("update")
            if place + columns >= len(maps):
                axes.set_xlabel("sample")
    figure.align_ylabels()
    _colour_bar(figure, figure.add_subplot(grid[len(rows), :]))
    return figure


def _titles(maps: Sequence[Map], extent: Extent, width: float) -> list[Title]:
    """Backends as far as they fit on a line; then verdict, mean weight and what is not shown."""
    ruler, size = Ruler(FigureCanvasAgg(Figure(figsize=(1, 1)))), style.RC["axes.titlesize"]
    titles = []
    for found in maps:
        names = [style.clean(name) for name in found.backends]
        shown = len(names)
        while shown > 1 and ruler.width(_some(names, shown), size) > width:
            shown -= 1
        verdicts = list(dict.fromkeys(str(observation["verdict"]) for observation in found.observations))
        about = f"{' / '.join(verdicts)}; mean weight {_number(found.first['weight_ratio'])}"
        if drawn(found, extent) < len(found.updates):
            about += f"; first {drawn(found, extent)} of {len(found.updates)} updates"
        elif found.epochs > extent.epochs:
            about += f"; first {extent.epochs} of {found.epochs} epochs"
        lines = [*ruler.wrap(_some(names, shown), width, size), *ruler.wrap(about, width, size)]
        short = shown < len(names) or len(verdicts) > 1
        titles.append(Title("\n".join(line.replace("$", r"\$") for line in lines), short))
    return titles


def _some(names: Sequence[str], count: int) -> str:
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" +{rest}" if rest else "")


def _number(value: float) -> str:
    """With two decimals, or with three digits where those are not enough."""
    return f"{value:.2f}" if math.isclose(value, round(value, 2), rel_tol=TOLERANCE) else f"{value:.3g}"


def _draw_map(axes: Axes, found: Map, extent: Extent, lines: float, inches: float) -> None:
    """One panel: a line of words, the updates, the samples that are in none; in a room of so many lines."""
    values = relative(found, extent)
    last, right = len(values), extent.columns - 0.5
    clipped = np.where(values > 0, np.clip(values, 1 / COLOUR_LIMIT, COLOUR_LIMIT), 1 / COLOUR_LIMIT)
    axes.imshow(
        np.ma.masked_where(np.isnan(values), clipped),
        cmap=COLOURS,
        norm=LogNorm(1 / COLOUR_LIMIT, COLOUR_LIMIT),
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, right, last + 0.5, 0.5),
    )
    for line in range(last + 1):
        axes.plot([-0.5, right], [line + 0.5] * 2, color="#cccccc", linewidth=0.5, zorder=2)
    marked = in_no_update(found, extent)
    bottom = last + 0.5 + any(marked.values())
    ran = min(found.epochs, extent.epochs)
    for epoch in range(ran + 1):
        axes.plot([epoch * extent.samples - 0.5] * 2, [0.5, bottom], color="black", linewidth=0.8, zorder=3)
    if ran < extent.epochs:
        box = [ran * extent.samples - 0.5, right, right, ran * extent.samples - 0.5]
        axes.fill(box, [0.5, 0.5, last + 0.5, last + 0.5], facecolor="#f0f0f0", edgecolor="#cccccc", hatch="////", lw=0)
    for number, update in enumerate(found.updates[:last], start=1):
        axes.text(right, number, f" {_sum(update)}", size=TINY, va="center", ha="left")
    axes.text(right, 0, " sum", size=TINY, va="center", ha="left", color=GREY)
    width = inches / extent.epochs
    each = style.text_width(f"epoch {extent.epochs}", TINY) + 0.05 < width * 0.85
    for epoch in range(extent.epochs):
        name = f"epoch {epoch + 1}" if each else str(epoch + 1)
        if each or style.text_width(str(extent.epochs), TINY) + 0.05 < width * 0.85:
            axes.text((epoch + 0.5) * extent.samples - 0.5, 0, name, size=TINY, va="center", ha="center", color=GREY)
    points = min(4.0, 0.8 * 72 * 0.85 * inches / extent.columns)
    for name, columns in marked.items():
        axes.plot(columns, [last + 1] * len(columns), linestyle="none", markersize=points, **SIGNS[name])
    _ticks(axes, extent, last, any(marked.values()), width)
    axes.set_xlim(-0.5, right)
    axes.set_ylim(lines + 0.6, -0.6)


def _sum(update: Mapping[str, Any]) -> str:
    """The sum of the coefficients, and what it should be if that is not 1."""
    right = float(update["right_sum"])
    return _number(update["sum"]) + ("" if math.isclose(right, 1, rel_tol=TOLERANCE) else f" of {_number(right)}")


def _ticks(axes: Axes, extent: Extent, last: int, marked: bool, width: float) -> None:
    """Numbers of samples along each epoch, and of updates."""
    label = style.text_width(str(extent.samples), SMALL) + 0.09
    room = max(1, int(width * 0.85 / label))
    step = next(
        step
        for power in range(8)
        for step in (10**power, 2 * 10**power, 5 * 10**power)
        if extent.samples / step <= room
    )
    inner = [sample for sample in range(0, extent.samples, step) if sample == 0 or sample + step / 2 <= extent.samples]
    places = [epoch * extent.samples + sample for epoch in range(extent.epochs) for sample in inner]
    axes.set_xticks(places, [str(place % extent.samples) for place in places])
    every = 1 if last <= MAX_UPDATES else math.ceil(last / MAX_UPDATES)
    numbers = list(range(1, last + 1, every))
    names = [str(number) for number in numbers]
    axes.set_yticks([*numbers, last + 1] if marked else numbers, [*names, "in none"] if marked else names)
    axes.tick_params(length=0, pad=2)
    axes.tick_params(axis="x", length=2)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _keys(maps: Sequence[Map], extent: Extent) -> list[Key]:
    """What the signs mean that occur in these maps."""
    present = [in_no_update(found, extent) for found in maps]
    keys: list[Key] = [(Patch(facecolor=RIGHT_COLOUR), "right, within 1 %")]
    keys += [
        (Line2D([], [], linestyle="none", markersize=4.5, **SIGNS[name]), label)
        for name, label in SIGN_LABELS.items()
        if any(marked[name] for marked in present)
    ]
    if any(found.epochs < extent.epochs for found in maps):
        keys.append((Patch(facecolor="#f0f0f0", edgecolor="#cccccc", hatch="////", lw=0), "training had ended"))
    return keys


def _colour_bar(figure: Figure, axes: Axes) -> None:
    ticks = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
    mappable = ScalarMappable(LogNorm(1 / COLOUR_LIMIT, COLOUR_LIMIT), COLOURS)
    bar = figure.colorbar(mappable, cax=axes, orientation="horizontal", extend="both", extendfrac=0.02)
    bar.set_ticks(ticks, labels=["1/8", "1/4", "1/2", "1: right", "2", "4", "8"], minor=False)
    bar.minorticks_off()
    bar.set_label("coefficient over the one that the big batch of the same samples gives it; blank: not in the update")
    axes.grid(visible=False)
