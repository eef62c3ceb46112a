"""The figure of a scenario's weight maps: one strip for each distinct map, updates downwards, samples to the right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.audit.conformance import TOLERANCE, Observation, summary
from bench.audit.scenario import Fault, Scenario
from bench.formatting import some
from bench.grouping import grouped
from bench.report import style
from bench.report.canvas import FULL, FigureWords, new_figure
from bench.report.style import SMALL, TINY, Key

SampleInUpdate = tuple[int, int, int]
"""Update, epoch and sample, each from 0."""
MAX_UPDATES, MIN_UPDATES = 16, 3
"""Updates drawn in each map: at most, and at least even if many maps share the page."""
MAX_COLUMNS, MAX_EPOCHS = 120, 10
"""Samples and epochs drawn side by side; two epochs are drawn even if they have more samples."""
MAX_MAPS = 12
ROW, LINE, BAR, MAPS_HEIGHT = 0.135, 0.125, 0.75, 6.3
"""Inches: of an update, of a line of words, of the colour bar with its words, and of all maps together."""
COLOUR_LIMIT = 8.0
"""Weights below 1/8 and above 8 times the right one have the outermost colours."""
SCALE, RIGHT_COLOUR = LogNorm(1 / COLOUR_LIMIT, COLOUR_LIMIT), "#3a3a3a"
BELOW = [(0.0, "#c3daee"), (0.2, "#8fc1e3"), (0.497, "#1f6cb0")]
ABOVE = [(0.503, "#fd8d3c"), (0.82, "#d7301f"), (1.0, "#67000d")]
SHADES = [*BELOW, (0.4975, RIGHT_COLOUR), (0.5025, RIGHT_COLOUR), *ABOVE]
COLOURS = LinearSegmentedColormap.from_list("weights", SHADES, N=1025)
"""Dark grey where a weight is right (within 1 %), blue and paler below, orange to deep red above."""
LOST, LEFT_OPEN, NOT_COMPUTED = "lost", "left_open", "not computed"
SIGNS: dict[str, tuple[dict[str, Any], str]] = {
    LOST: ({"marker": "x", "color": "#D55E00"}, "in no update, although updates or a checkpoint followed"),
    LEFT_OPEN: ({"marker": "o", "color": "#0072B2"}, "in no update at the end of training: left open"),
    NOT_COMPUTED: ({"marker": ".", "color": "#888888"}, "no loss computed: dropped, not reached, or raised"),
}
"""Marks below a map for the samples that are in no update, and what they mean."""
ENDED: dict[str, Any] = {"facecolor": "#f0f0f0", "edgecolor": "#cccccc", "hatch": "////", "lw": 0}
"""Where one training had ended while another went on."""


@dataclass(frozen=True)
class WeightMap:
    """The updates of one or more backends that gave the same weights."""

    observations: list[Observation]

    @property
    def first(self) -> Observation:
        return self.observations[0]

    @cached_property
    def weights(self) -> dict[SampleInUpdate, float]:
        """The weight of each sample in each update, divided by the right one."""
        return _by_sample(self.first, "relative")

    @cached_property
    def in_no_update(self) -> dict[str, set[tuple[int, int]]]:
        """Epoch and sample of those that are in no update, by what became of them."""
        found = {
            name: {(int(epoch), sample) for epoch, samples in self.first[name].items() for sample in samples}
            for name in (LOST, LEFT_OPEN)
        }
        known = {(epoch, sample) for _, epoch, sample in self.weights}.union(*found.values())
        epochs, samples = 1 + max(epoch for epoch, _ in known), self.first["scenario"]["samples"]
        found[NOT_COMPUTED] = {(epoch, sample) for epoch in range(epochs) for sample in range(samples)} - known
        return found

    @property
    def epochs(self) -> int:
        """Epochs in which a loss was computed."""
        marked = [epoch for places in self.in_no_update.values() for epoch, _ in places]
        return 1 + max([*marked, *(epoch for _, epoch, _ in self.weights)])

    def drawn(self, most: int, epochs: int) -> range:
        """Updates that are drawn: of those with samples of these epochs, the last of the most wrong in a row."""
        places = [(update, abs(weight - 1)) for (update, epoch, _), weight in self.weights.items() if epoch < epochs]
        off = np.zeros(1 + max((update for update, _ in places), default=0))
        for update, wrong in places:
            off[update] = max(off[update], wrong)
        length = min(most, len(off))
        sums = np.convolve(off, np.ones(length), "valid").round(2)
        first = int(np.flatnonzero(sums == sums.max())[-1])
        return range(first, first + length)

    def image(self, updates: int, epochs: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The weights by update and by sample of each epoch in turn; NaN where a sample is not in the update."""
        samples = self.first["scenario"]["samples"]
        drawn = self.drawn(updates, epochs)
        values = np.full((len(drawn), epochs * samples), np.nan)
        for (update, epoch, sample), weight in self.weights.items():
            if update in drawn and epoch < epochs:
                values[drawn.index(update), epoch * samples + sample] = weight
        return values


def distinct_maps(observations: Sequence[Observation]) -> list[WeightMap]:
    """The distinct maps in the order of their first backends; observations without an update are left out."""
    maps: list[WeightMap] = []
    for observation in observations:
        known = next((known for known in maps if _alike(known.first, observation)), None)
        if known is not None:
            known.observations.append(observation)
        elif observation["updates"]:
            maps.append(WeightMap([observation]))
    return maps


def _alike(first: Observation, other: Observation) -> bool:
    a, b = _by_sample(first, "by_epoch"), _by_sample(other, "by_epoch")
    same_samples = a.keys() == b.keys() and all(first[key] == other[key] for key in (LOST, LEFT_OPEN))
    return same_samples and np.allclose(list(a.values()), [b[place] for place in a], rtol=TOLERANCE, atol=0)


def _by_sample(observation: Observation, key: str) -> dict[SampleInUpdate, float]:
    return {
        (number, int(epoch), int(sample)): value
        for number, update in enumerate(observation["updates"])
        for epoch, samples in update[key].items()
        for sample, value in samples.items()
    }


def weight_figure(observations: Sequence[Observation], *, footer: str = "") -> tuple[Figure, FigureWords] | None:
    """All weight maps of one scenario, with the words around them; None if no backend made an update."""
    every = distinct_maps(observations)
    if not every:
        return None
    maps, scenario = every[:MAX_MAPS], every[0].first["scenario"]
    undrawn = [observation for found in every[MAX_MAPS:] for observation in found.observations]
    without = [observation for observation in observations if not observation["updates"]]
    notes = ["A row is an update, and a column a sample. At the right: the sum of the update's coefficients."]
    notes += [f"Not drawn: {names} ({outcome})." for outcome, names in _outcomes(undrawn)]
    notes += [f"Without an update: {names} ({outcome})." for outcome, names in _outcomes(without)]
    notes += ["The epoch that raises is trained again as the next one."] * (scenario["fault"] == Fault.EXCEPTION)
    setting = f"{scenario['name']}: {Scenario.from_dict(scenario).setting}"
    words = FigureWords(scenario["title"] or scenario["name"], setting, footer, notes)
    updates, epochs = _drawn_extent(maps, scenario["samples"])
    with matplotlib.style.context(list(style.BASE)):
        heights = [_height(found, updates, epochs) for found in maps]
        figure = new_figure(words, _legend_keys(maps, epochs), sum(heights) + BAR)
        rows = [len(found.drawn(updates, epochs)) + any(_marks(found, epochs).values()) for found in maps]
        every_axes = figure.subplots(len(maps), squeeze=False, height_ratios=rows)[:, 0]
        for axes, found in zip(every_axes, maps, strict=True):
            _draw(axes, found, updates, epochs)
        _number_samples(every_axes[-1], scenario["samples"], epochs)
        bar = figure.colorbar(ScalarMappable(SCALE, COLOURS), ax=every_axes, location="bottom", aspect=60, shrink=0.8)
        bar.set_ticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], labels=["≤ 1/8", "1/4", "1/2", "1: right", "2", "4", "≥ 8"])
        bar.minorticks_off()
        bar.set_label("weight of a sample / its weight in a full batch of the same samples", size=SMALL)
    return figure, words


def _outcomes(observations: Sequence[Observation]) -> list[tuple[str, str]]:
    """What happened, as two findings with their numbers and the number of others, and under which backends."""
    pairs = ((some(summary(seen)), style.clean(seen["backend"])) for seen in observations)
    return [(outcome, ", ".join(names)) for outcome, names in grouped(pairs).items()]


def _drawn_extent(maps: Sequence[WeightMap], samples: int) -> tuple[int, int]:
    """Updates of each map, and epochs of all, that fit into the figure."""
    epochs = min(MAX_EPOCHS, max(2, MAX_COLUMNS // samples), max(found.epochs for found in maps))
    updates = MAX_UPDATES
    while updates > MIN_UPDATES and sum(_height(found, updates, epochs) for found in maps) > MAPS_HEIGHT:
        updates -= 1
    return updates, epochs


def _title(found: WeightMap, updates: int, epochs: int) -> list[str]:
    """What happened under which backends, and what is not drawn, in lines."""
    texts = [f"{outcome}: {names}" for outcome, names in _outcomes(found.observations)]
    every, drawn = found.first["updates"], found.drawn(updates, epochs)
    if len(drawn) < len(every):
        others = sorted((*every[: drawn.start], *every[drawn.stop :]), key=lambda update: float(update["sum"]))
        ends = " to ".join(dict.fromkeys(map(_sum_text, (others[0], others[-1]))))
        texts.append(f"updates {drawn[0] + 1} to {drawn[-1] + 1} of {len(every)}; sums of the others: {ends}")
    elif found.epochs > epochs:
        texts.append(f"first {epochs} of {found.epochs} epochs")
    return [line for text in texts for line in style.wrap(text, FULL - 0.9, TINY)]


def _height(found: WeightMap, updates: int, epochs: int) -> float:
    """Inches of a map with its words."""
    rows = len(found.drawn(updates, epochs)) + any(_marks(found, epochs).values())
    return rows * ROW + (len(_title(found, updates, epochs)) + 1) * LINE


def _marks(found: WeightMap, epochs: int) -> dict[str, list[int]]:
    """Columns of the samples that are in no update, by what became of them."""
    samples = found.first["scenario"]["samples"]
    return {
        name: sorted(epoch * samples + sample for epoch, sample in places if epoch < epochs)
        for name, places in found.in_no_update.items()
    }


def _draw(axes: Axes, found: WeightMap, updates: int, epochs: int) -> None:
    values, marks, samples = found.image(updates, epochs), _marks(found, epochs), found.first["scenario"]["samples"]
    last, right, is_marked = len(values), values.shape[1] - 0.5, any(marks.values())
    clipped = np.where(values > 0, np.clip(values, 1 / COLOUR_LIMIT, COLOUR_LIMIT), 1 / COLOUR_LIMIT)
    shown = np.ma.masked_where(np.isnan(values), clipped)
    extent = (-0.5, right, last + 0.5, 0.5)
    axes.imshow(shown, cmap=COLOURS, norm=SCALE, aspect="auto", interpolation="nearest", extent=extent)
    axes.hlines([line + 0.5 for line in range(last + 1)], -0.5, right, color="#cccccc", linewidth=0.5, zorder=2)
    edges = [epoch * samples - 0.5 for epoch in range(epochs + 1)]
    axes.vlines(edges, 0.5, last + 0.5 + is_marked, color="black", linewidth=0.8)
    if found.epochs < epochs:
        axes.fill_between([found.epochs * samples - 0.5, right], 0.5, last + 0.5, **ENDED)
    drawn = found.drawn(updates, epochs)
    for line, update in enumerate(found.first["updates"][drawn.start : drawn.stop], start=1):
        axes.text(right, line, f" {_sum_text(update)}", size=TINY, va="center", ha="left")
    size = min(4.0, 0.8 * 72 * FULL * 0.85 / values.shape[1])
    for name, columns in marks.items():
        axes.plot(columns, [last + 1] * len(columns), linestyle="none", markersize=size, **SIGNS[name][0])
    names = [str(number + 1) for number in drawn] + ["in none"] * is_marked
    axes.set_yticks(range(1, len(names) + 1), names, size=TINY)
    axes.set(xticks=[], xlim=(-0.5, right), ylim=(len(names) + 0.5, 0.5))
    axes.tick_params(length=0, pad=2)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    title = "\n".join(map(style.safe, _title(found, updates, epochs)))
    axes.set_title(title, loc="left", size=TINY, pad=2, linespacing=1.15)


def _sum_text(update: Mapping[str, Any]) -> str:
    """Sum of the coefficients, and the right one if that is not 1."""
    right = float(update["right_sum"])
    return _digits(update["sum"]) + ("" if math.isclose(right, 1, rel_tol=TOLERANCE) else f" of {_digits(right)}")


def _digits(value: float) -> str:
    """With two decimals, or with three digits where two decimals are not enough."""
    return f"{value:.2f}" if math.isclose(value, round(value, 2), rel_tol=TOLERANCE) else f"{value:.3g}"


def _number_samples(axes: Axes, samples: int, epochs: int) -> None:
    """Below the last map: the samples of each epoch."""
    most = max(1, 20 // epochs)
    step = next(digit * 10**power for power in range(7) for digit in (1, 2, 5) if digit * 10**power * most >= samples)
    inner = [sample for sample in range(0, samples, step) if sample == 0 or sample + step / 2 <= samples]
    places = [(epoch, sample) for epoch in range(epochs) for sample in inner]
    labels = [str(sample) if sample else f"0\nepoch {epoch + 1}" for epoch, sample in places]
    axes.set_xticks([epoch * samples + sample for epoch, sample in places], labels, size=TINY)
    axes.set_xlabel("sample", size=TINY)


def _legend_keys(maps: Sequence[WeightMap], epochs: int) -> list[Key]:
    keys: list[Key] = [(Patch(facecolor=RIGHT_COLOUR), "the right weight, within 1 %; blank: not in the update")]
    for name, (look, label) in SIGNS.items():
        if any(_marks(found, epochs)[name] for found in maps):
            keys.append((Line2D([], [], linestyle="none", markersize=4.5, **look), label))
    if any(found.epochs < epochs for found in maps):
        keys.append((Patch(**ENDED), "training had ended"))
    return keys
