"""The figure of a scenario's weight maps: one strip for each distinct map, updates downwards, samples to the right."""

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

from bench.audit.conformance import FURTHER, summary
from bench.audit.scenario import Scenario
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
from bench.report import style
from bench.report.canvas import FigureWords, new_figure
from bench.report.style import GREY, SMALL, TINY, Key

MAX_UPDATES, MIN_UPDATES = 16, 3
"""Updates drawn in each map: at most, and at least even if many maps share the page."""
MAX_COLUMNS, MAX_EPOCHS = 120, 10
"""Samples and epochs drawn side by side; two epochs are drawn even if they have more samples."""
MAX_MAPS = 12
COLOUR_LIMIT = 8.0
"""Weights below 1/8 and above 8 times the right one have the outermost colours."""
ROW, BETWEEN, MAPS_HEIGHT = 0.135, 0.1, 6.0
"""Inches: of an update, between two strips, and of all strips together."""
NAMES, MAP = 2.35, style.WIDTH - 2 * style.MARGIN - 2.35
"""Inches: of the words beside a map, and of the map with its numbers."""
LINE = 1.34
"""Height of a line of text, in font sizes."""
BAR, BAR_WORDS = 0.1, 0.4
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
SCALE = LogNorm(1 / COLOUR_LIMIT, COLOUR_LIMIT)
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
    words = FigureWords(
        scenario["title"] or scenario["name"],
        f"{scenario['name']}: {Scenario.from_dict(scenario).setting}",
        footer,
        _notes(observations, maps[MAX_MAPS:]),
    )
    with matplotlib.style.context(list(style.BASE)):
        return _figure(maps[:MAX_MAPS], _extent(maps[:MAX_MAPS]), words), words


def _notes(observations: Sequence[Observation], not_drawn: Sequence[WeightMap]) -> list[str]:
    """The backends that have no strip."""
    untold = [observation for found in not_drawn for observation in found.observations]
    without = [observation for observation in observations if not observation["updates"]]
    return [
        f"{reason}: {outcome} under {_names(those)}"
        for reason, some in (("not drawn", untold), ("no update", without))
        for outcome, those in _outcomes(some).items()
    ]


def _names(observations: Sequence[Observation]) -> str:
    return ", ".join(style.clean(observation["backend"]) for observation in observations)


def _outcomes(observations: Sequence[Observation]) -> dict[str, list[Observation]]:
    """What happened, as the verdict and one more finding with their numbers, and the backends under which it did."""
    found: dict[str, list[Observation]] = {}
    for observation in observations:
        found.setdefault(", ".join(summary(observation)[: 1 + FURTHER]), []).append(observation)
    return found


def _extent(maps: Sequence[WeightMap]) -> Extent:
    """The part of the maps that fits into the figure."""
    samples = int(maps[0].first["scenario"]["samples"])
    epochs = min(MAX_EPOCHS, max(2, MAX_COLUMNS // samples), max(found.epochs for found in maps))
    updates = MAX_UPDATES
    while updates > MIN_UPDATES and sum(_heights(maps, Extent(samples, epochs, updates))) > MAPS_HEIGHT:
        updates -= 1
    drawn = {id(found): found.num_drawn(Extent(samples, epochs, updates)) for found in maps}
    if any(drawn[id(found)] < len(found.updates) for found in maps):
        epochs = min(epochs, 1 + max(e for found in maps for u, e, _ in found.weights if u < drawn[id(found)]))
    return Extent(samples, epochs, updates)


def _heights(maps: Sequence[WeightMap], extent: Extent) -> list[float]:
    """Inches of each strip: those of its map or of the words beside it; the first one has a heading."""
    return [
        max(_lines(found, extent) * ROW, sum(_block_height(lines, size) for lines, size, _ in _words(found, extent)))
        + BETWEEN
        + (ROW if number == 0 else 0)
        for number, found in enumerate(maps)
    ]


def _lines(found: WeightMap, extent: Extent) -> int:
    """Lines of a map: updates, and one for the samples that are in none."""
    return found.num_drawn(extent) + any(found.in_no_update(extent).values())


def _words(found: WeightMap, extent: Extent) -> list[tuple[list[str], float, str]]:
    """The words beside a map, as lines with their size and weight: what happened, under which backends."""
    drawn, updates = found.num_drawn(extent), len(found.updates)
    blocks = []
    for outcome, observations in _outcomes(found.observations).items():
        blocks.append((style.wrap(outcome, NAMES - 0.1, SMALL, "bold"), SMALL, "bold"))
        blocks.append((style.wrap(_names(observations), NAMES - 0.1, TINY), TINY, "normal"))
    if drawn < updates:
        blocks.append(([f"first {drawn} of {updates} updates"], TINY, "normal"))
    elif found.epochs > extent.epochs:
        blocks.append(([f"first {extent.epochs} of {found.epochs} epochs"], TINY, "normal"))
    return blocks


def _block_height(lines: Sequence[str], size: float) -> float:
    return len(lines) * size * LINE / 72


def _figure(maps: Sequence[WeightMap], extent: Extent, words: FigureWords) -> Figure:
    low, high = _used(maps, extent)
    bar = [BAR] if low < high else []
    heights = _heights(maps, extent)
    inches = sum(heights) + 0.25 + (BAR + BAR_WORDS if bar else 0)
    figure = new_figure(words, _keys(maps, extent), inches)
    grid = figure.add_gridspec(len(maps) + len(bar), 2, width_ratios=[NAMES, MAP], height_ratios=[*heights, *bar])
    for number, (found, height) in enumerate(zip(maps, heights, strict=True)):
        _draw_words(figure.add_subplot(grid[number, 0]), found, extent, height, is_first=number == 0)
        axes = figure.add_subplot(grid[number, 1])
        _draw_map(axes, found, extent, height / ROW, is_first=number == 0, is_last=number == len(maps) - 1)
    if bar:
        _colour_bar(figure, figure.add_subplot(grid[len(maps), 1]), low, high)
    return figure


def _draw_words(axes: Axes, found: WeightMap, extent: Extent, height: float, *, is_first: bool) -> None:
    axes.set(xlim=(0, 1), ylim=(height, 0))
    axes.axis("off")
    top = (ROW if is_first else 0.0) + 0.02
    for lines, size, weight in _words(found, extent):
        text = "\n".join(line.replace("$", r"\$") for line in lines)
        axes.text(0, top, text, size=size, weight=weight, va="top", ha="left", linespacing=1.15)
        top += _block_height(lines, size)


def _number(value: float) -> str:
    """With two decimals, or with three digits where two decimals are not enough."""
    return f"{value:.2f}" if math.isclose(value, round(value, 2), rel_tol=TOLERANCE) else f"{value:.3g}"


def _draw_map(axes: Axes, found: WeightMap, extent: Extent, lines: float, *, is_first: bool, is_last: bool) -> None:
    """One map in a strip of so many lines: the updates, and the samples that are in none."""
    values = found.image(extent)
    last, right = len(values), extent.columns - 0.5
    clipped = np.where(values > 0, np.clip(values, 1 / COLOUR_LIMIT, COLOUR_LIMIT), 1 / COLOUR_LIMIT)
    axes.imshow(
        np.ma.masked_where(np.isnan(values), clipped),
        cmap=COLOURS,
        norm=SCALE,
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
    points = min(4.0, 0.8 * 72 * 0.85 * MAP / extent.columns)
    for name, columns in marked.items():
        axes.plot(columns, [last + 1] * len(columns), linestyle="none", markersize=points, **SIGNS[name])
    if is_first:
        _heading(axes, extent)
    _ticks(axes, extent, last, is_marked=any(marked.values()), has_samples=is_last)
    axes.set_xlim(-0.5, right)
    top = -0.5 if is_first else 0.5
    axes.set_ylim(top + lines, top)


def _heading(axes: Axes, extent: Extent) -> None:
    """The line above the first map: update, epochs, and sum."""
    look: dict[str, Any] = {"size": TINY, "va": "center", "color": GREY}
    axes.text(-0.5, 0, "update ", ha="right", **look)
    axes.text(extent.columns - 0.5, 0, " sum", ha="left", **look)
    room = 0.85 * MAP / extent.epochs
    word = "epoch " if style.text_width(f"epoch {extent.epochs}", TINY) + 0.05 < room else ""
    for epoch in range(extent.epochs):
        axes.text((epoch + 0.5) * extent.samples - 0.5, 0, f"{word}{epoch + 1}", ha="center", **look)


def _sum(update: Mapping[str, Any]) -> str:
    """Sum of the coefficients, and the right one if that is not 1."""
    right = float(update["right_sum"])
    return _number(update["sum"]) + ("" if math.isclose(right, 1, rel_tol=TOLERANCE) else f" of {_number(right)}")


def _ticks(axes: Axes, extent: Extent, last: int, *, is_marked: bool, has_samples: bool) -> None:
    """Numbers of the updates, and below the last map those of the samples in each epoch."""
    width = 0.85 * MAP / extent.epochs
    room = max(1, int(width / (style.text_width(str(extent.samples), SMALL) + 0.09)))
    ticks = MaxNLocator(room, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1).tick_values(0, extent.samples)
    step = max(1, int(ticks[1] - ticks[0]))
    inner = [sample for sample in range(0, extent.samples, step) if sample == 0 or sample + step / 2 <= extent.samples]
    places = [epoch * extent.samples + sample for epoch in range(extent.epochs) for sample in inner]
    axes.set_xticks(places if has_samples else [], [str(place % extent.samples) for place in places if has_samples])
    numbers = list(range(1, last + 1 + is_marked))
    axes.set_yticks(numbers, [str(number) if number <= last else "in none" for number in numbers])
    axes.tick_params(length=0, pad=2)
    axes.tick_params(axis="x", length=2)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    if has_samples:
        axes.set_xlabel("sample", labelpad=1)


def _keys(maps: Sequence[WeightMap], extent: Extent) -> list[Key]:
    """What the signs in these maps mean."""
    present = {name for found in maps for name, columns in found.in_no_update(extent).items() if columns}
    keys: list[Key] = [(Patch(facecolor=RIGHT_COLOUR), "the right weight, within 1 %; blank: not in the update")]
    keys += [
        (Line2D([], [], linestyle="none", markersize=4.5, **SIGNS[name]), label)
        for name, label in SIGN_LABELS.items()
        if name in present
    ]
    if any(found.epochs < extent.epochs for found in maps):
        keys.append((Patch(**ENDED), "training had ended"))
    return keys


def _used(maps: Sequence[WeightMap], extent: Extent) -> tuple[float, float]:
    """The part of the scale that these maps use, from one power of two to another; (1, 1) if all weights are right."""
    drawn = np.concatenate([values[~np.isnan(values)] for values in (found.image(extent) for found in maps)])
    wrong = [float(value) for value in drawn if not math.isclose(value, 1, rel_tol=0.01)]
    ends = [2.0 ** (math.floor if value < 1 else math.ceil)(math.log2(value)) for value in wrong if value > 0]
    ends += [1 / COLOUR_LIMIT for value in wrong if value <= 0]
    return max(1 / COLOUR_LIMIT, min([1.0, *ends])), min(COLOUR_LIMIT, max([1.0, *ends]))


def _colour_bar(figure: Figure, axes: Axes, low: float, high: float) -> None:
    part = COLOURS(np.linspace(float(SCALE(low)), float(SCALE(high)), 513))
    mappable = ScalarMappable(LogNorm(low, high), LinearSegmentedColormap.from_list("used", list(part), N=513))
    bar = figure.colorbar(mappable, cax=axes, orientation="horizontal")
    labels = {1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1.0: "1: right", 2.0: "2", 4.0: "4", 8.0: "8"}
    shown = [tick for tick in labels if low <= tick <= high]
    bar.set_ticks(shown, labels=[labels[tick] for tick in shown], minor=False)
    bar.minorticks_off()
    bar.set_label("weight of a sample / its weight in a full batch of the same samples")
    axes.grid(visible=False)
