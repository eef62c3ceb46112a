"""The figure of a scenario's weight maps: one panel for each distinct map, updates downwards, samples to the right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bench.audit.weight_maps import (
    LEFT_OPEN,
    LOST,
    NOT_COMPUTED,
    TOLERANCE,
    Extent,
    Observation,
    WeightMap,
    distinct,
)
from bench.report import sheet, style
from bench.report.sheet import FigureWords
from bench.report.style import GREY, SMALL, TINY, Key
from bench.words import plural

MAX_UPDATES, MIN_UPDATES = 16, 3
"""Updates drawn in each map: at most, and at least even if many maps share the page."""
MAX_COLUMNS, MAX_EPOCHS = 120, 10
"""Samples and epochs drawn side by side; two epochs are drawn even if they have more samples."""
MAX_MAPS = 12
COLOUR_LIMIT = 8.0
"""Weights below 1/8 and above 8 times the right one have the outermost colours."""
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
"""Dark grey where a weight is right (within 1 %), blue and paler below, orange to deep red above."""
SIGNS: dict[str, dict[str, Any]] = {
    LOST: {"marker": "x", "color": "#D55E00", "markeredgewidth": 0.9},
    LEFT_OPEN: {"marker": "o", "color": "#0072B2", "markerfacecolor": "white", "markeredgewidth": 0.7},
    NOT_COMPUTED: {"marker": ".", "color": "#888888", "markeredgewidth": 0},
}
"""Marks below a map for the samples that are in no update."""
SIGN_LABELS = {
    LOST: "in no update, although updates or a checkpoint followed: lost",
    LEFT_OPEN: "in no update at the end of training: left open",
    NOT_COMPUTED: "no loss computed: dropped, not reached, or raised",
}
ENDED: dict[str, Any] = {"facecolor": "#f0f0f0", "edgecolor": "#cccccc", "hatch": "////", "lw": 0}
"""Where one training had ended while another went on."""


def weight_figure(observations: Sequence[Observation], *, footer: str = "") -> tuple[Figure, FigureWords] | None:
    """All weight maps of one scenario, with the words around them; None if no backend made an update."""
    maps = distinct(observations)
    if not maps:
        return None
    scenario = maps[0].first["scenario"]
    with matplotlib.style.context(list(style.BASE)):
        columns, extent = _shape(maps[:MAX_MAPS], int(scenario["samples"]))
        width = (style.WIDTH - 0.3) / columns - 0.3
        words = FigureWords(
            f"Weight of each sample in each update: {scenario['name']}",
            "; ".join(part for part in (scenario["title"], _setting(scenario)) if part),
            footer,
            _notes(observations, maps, width),
        )
        return _figure(maps[:MAX_MAPS], extent, columns, width, words), words


def _setting(scenario: Mapping[str, Any]) -> str:
    n = ", ".join(map(str, scenario["accumulate"]))
    ranks = plural(scenario["world_size"], "rank")
    parts = [plural(scenario["samples"], "sample"), ranks, f"micro-batches of {scenario['batch_size']}", f"N = {n}"]
    if scenario["max_steps"] is not None:
        parts.append(f"max_steps = {scenario['max_steps']}")
    if scenario["epochs"] is not None:
        parts.append(plural(scenario["epochs"], "epoch"))
    return ", ".join(parts)


def _notes(observations: Sequence[Observation], maps: Sequence[WeightMap], width: float) -> list[str]:
    """The backends of each map whose title does not tell them and their verdicts, and those without a map."""
    drawn, not_drawn = maps[:MAX_MAPS], maps[MAX_MAPS:]
    untold = [m for m in drawn if _num_named(m, width) < len(m.observations) or len(_verdicts(m)) > 1]
    notes = [f"same map: {_by_verdict(found.observations)}" for found in untold]
    notes += [f"not drawn: {_by_verdict(found.observations)}" for found in not_drawn]
    without = [observation for observation in observations if not observation["updates"]]
    return [*notes, f"no update: {_by_verdict(without)}"] if without else notes


def _by_verdict(observations: Sequence[Observation]) -> str:
    verdicts: dict[str, list[str]] = {}
    for observation in observations:
        verdicts.setdefault(observation["verdict"], []).append(observation["backend"])
    return "; ".join(f"{', '.join(backends)} ({word})" for word, backends in verdicts.items())


def _shape(maps: Sequence[WeightMap], samples: int) -> tuple[int, Extent]:
    """Columns of panels, and the part of the maps that fits into them."""
    most = min(MAX_EPOCHS, max(2, MAX_COLUMNS // samples))
    epochs = min(most, max(found.epochs for found in maps))
    columns = 1 if len(maps) == 1 or samples * epochs > MAX_COLUMNS else 2 if len(maps) <= 8 else 3
    updates = MAX_UPDATES
    while updates > MIN_UPDATES and _height(maps, columns, Extent(samples, epochs, updates)) > MAPS_HEIGHT:
        updates -= 1
    drawn = {id(found): found.num_drawn(Extent(samples, epochs, updates)) for found in maps}
    if any(drawn[id(found)] < len(found.updates) for found in maps):
        epochs = min(epochs, 1 + max(e for found in maps for u, e, _ in found.weights if u < drawn[id(found)]))
    return columns, Extent(samples, epochs, updates)


def _rows(maps: Sequence[WeightMap], columns: int, extent: Extent) -> list[tuple[Sequence[WeightMap], int]]:
    """The maps row by row, and the lines of each row: updates, and one for the samples that are in none."""
    rows = [maps[start : start + columns] for start in range(0, len(maps), columns)]
    return [(row, max(m.num_drawn(extent) + any(m.in_no_update(extent).values()) for m in row)) for row in rows]


def _height(maps: Sequence[WeightMap], columns: int, extent: Extent) -> float:
    return sum((lines + 1.2) * ROW + AROUND for _, lines in _rows(maps, columns, extent))


def _figure(maps: Sequence[WeightMap], extent: Extent, columns: int, width: float, words: FigureWords) -> Figure:
    rows = _rows(maps, columns, extent)
    inches = _height(maps, columns, extent) + BAR + BAR_WORDS
    figure = sheet.sheet(words, [_keys(maps, extent)], inches, inches)
    heights = [(lines + 1.2) * ROW for _, lines in rows]
    grid = figure.add_gridspec(len(rows) + 1, columns, height_ratios=[*heights, BAR])
    for number, (row, lines) in enumerate(rows):
        for column, found in enumerate(row):
            axes = figure.add_subplot(grid[number, column])
            _draw_map(axes, found, extent, lines, (style.WIDTH - 0.6) / columns)
            axes.set_title(_title(found, extent, width), loc="left")
            if column == 0:
                axes.set_ylabel("update")
            if (number + 1) * columns + column >= len(maps):
                axes.set_xlabel("sample")
    figure.align_ylabels()
    _colour_bar(figure, figure.add_subplot(grid[len(rows), :]))
    return figure


def _title(found: WeightMap, extent: Extent, width: float) -> str:
    """As many backends as fit on a line; then verdict, mean weight, and what is not drawn."""
    drawn, updates = found.num_drawn(extent), len(found.updates)
    about = f"{' / '.join(_verdicts(found))}; mean weight {_number(found.first['weight_ratio'])}"
    if drawn < updates:
        about += f"; first {drawn} of {updates} updates"
    elif found.epochs > extent.epochs:
        about += f"; first {extent.epochs} of {found.epochs} epochs"
    size = style.RC["axes.titlesize"]
    lines = [
        line for text in (_named(found, _num_named(found, width)), about) for line in style.wrap(text, width, size)
    ]
    return "\n".join(line.replace("$", r"\$") for line in lines)


def _verdicts(found: WeightMap) -> list[str]:
    return list(dict.fromkeys(str(observation["verdict"]) for observation in found.observations))


def _num_named(found: WeightMap, width: float) -> int:
    """How many of the backends fit on one line of a title, at least 1."""
    counts = range(len(found.observations), 1, -1)
    size = style.RC["axes.titlesize"]
    return next((count for count in counts if style.text_width(_named(found, count), size) <= width), 1)


def _named(found: WeightMap, count: int) -> str:
    names = [style.clean(observation["backend"]) for observation in found.observations]
    return ", ".join(names[:count]) + (f" +{len(names) - count}" if count < len(names) else "")


def _number(value: float) -> str:
    """With two decimals, or with three digits where two decimals are not enough."""
    return f"{value:.2f}" if math.isclose(value, round(value, 2), rel_tol=TOLERANCE) else f"{value:.3g}"


def _draw_map(axes: Axes, found: WeightMap, extent: Extent, lines: int, inches: float) -> None:
    """One panel: a line of words, the updates, and the samples that are in none, with room for ``lines`` lines."""
    values = found.image(extent)
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
    axes.hlines([line + 0.5 for line in range(last + 1)], -0.5, right, color="#cccccc", linewidth=0.5, zorder=2)
    marked = found.in_no_update(extent)
    bottom = last + 0.5 + any(marked.values())
    ran = min(found.epochs, extent.epochs)
    for epoch in range(ran + 1):
        axes.plot([epoch * extent.samples - 0.5] * 2, [0.5, bottom], color="black", linewidth=0.8, zorder=3)
    if ran < extent.epochs:
        axes.fill_between([ran * extent.samples - 0.5, right], 0.5, last + 0.5, **ENDED)
    for number, update in enumerate(found.updates[:last], start=1):
        axes.text(right, number, f" {_sum(update)}", size=TINY, va="center", ha="left")
    axes.text(right, 0, " sum", size=TINY, va="center", ha="left", color=GREY)
    width = 0.85 * inches / extent.epochs
    word = "epoch " if style.text_width(f"epoch {extent.epochs}", TINY) + 0.05 < width else ""
    for epoch in range(extent.epochs):
        middle = (epoch + 0.5) * extent.samples - 0.5
        axes.text(middle, 0, f"{word}{epoch + 1}", size=TINY, va="center", ha="center", color=GREY)
    points = min(4.0, 0.8 * 72 * 0.85 * inches / extent.columns)
    for name, columns in marked.items():
        axes.plot(columns, [last + 1] * len(columns), linestyle="none", markersize=points, **SIGNS[name])
    _ticks(axes, extent, last, any(marked.values()), width)
    axes.set_xlim(-0.5, right)
    axes.set_ylim(lines + 0.6, -0.6)


def _sum(update: Mapping[str, Any]) -> str:
    """Sum of the coefficients, and the right one if that is not 1."""
    right = float(update["right_sum"])
    return _number(update["sum"]) + ("" if math.isclose(right, 1, rel_tol=TOLERANCE) else f" of {_number(right)}")


def _ticks(axes: Axes, extent: Extent, last: int, marked: bool, width: float) -> None:
    """Numbers of the samples in each epoch of so many inches, and of the updates."""
    room = max(1, int(width / (style.text_width(str(extent.samples), SMALL) + 0.09)))
    ticks = MaxNLocator(room, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1).tick_values(0, extent.samples)
    step = max(1, int(ticks[1] - ticks[0]))
    inner = [sample for sample in range(0, extent.samples, step) if sample == 0 or sample + step / 2 <= extent.samples]
    places = [epoch * extent.samples + sample for epoch in range(extent.epochs) for sample in inner]
    axes.set_xticks(places, [str(place % extent.samples) for place in places])
    numbers = list(range(1, last + 1 + marked))
    axes.set_yticks(numbers, [str(number) if number <= last else "in none" for number in numbers])
    axes.tick_params(length=0, pad=2)
    axes.tick_params(axis="x", length=2)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _keys(maps: Sequence[WeightMap], extent: Extent) -> list[Key]:
    """What the signs in these maps mean."""
    present = {name for found in maps for name, columns in found.in_no_update(extent).items() if columns}
    keys: list[Key] = [(Patch(facecolor=RIGHT_COLOUR), "right, within 1 %")]
    keys += [
        (Line2D([], [], linestyle="none", markersize=4.5, **SIGNS[name]), label)
        for name, label in SIGN_LABELS.items()
        if name in present
    ]
    if any(found.epochs < extent.epochs for found in maps):
        keys.append((Patch(**ENDED), "training had ended"))
    return keys


def _colour_bar(figure: Figure, axes: Axes) -> None:
    ticks = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
    mappable = ScalarMappable(LogNorm(1 / COLOUR_LIMIT, COLOUR_LIMIT), COLOURS)
    bar = figure.colorbar(mappable, cax=axes, orientation="horizontal", extend="both", extendfrac=0.02)
    bar.set_ticks(ticks, labels=["1/8", "1/4", "1/2", "1: right", "2", "4", "8"], minor=False)
    bar.minorticks_off()
    bar.set_label("coefficient divided by its value in a full batch of the same samples; blank: not in the update")
    axes.grid(visible=False)
