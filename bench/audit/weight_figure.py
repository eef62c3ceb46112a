"""The figure of a scenario's weight maps: a strip for each distinct map.

Updates go downwards, samples to the right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from bench.audit.conformance import TOLERANCE, summary
from bench.audit.decoded_scenario import UpdateRecord
from bench.audit.diagnosis import Observation
from bench.audit.scenario import Fault, Scenario
from bench.formatting import some
from bench.grouping import grouped
from bench.report import style
from bench.report.canvas import FULL, FigureWords, new_figure
from bench.report.style import SMALL, TINY, Key

Place = tuple[int, int]
"""Epoch and sample, each from 0."""
SampleInUpdate = tuple[int, int, int]
"""Update, epoch and sample, each from 0."""
MAX_UPDATES, MIN_UPDATES = 16, 3
"""Updates drawn in each map: at most, and at least even if many maps share the page."""
MAX_COLUMNS, MAX_EPOCHS = 120, 10
"""Samples and epochs drawn side by side; two epochs are drawn even if they have more samples."""
MAX_MAPS = 12
ROW, LINE, BAR, MAPS_HEIGHT = 0.135, 0.125, 0.75, 6.9
"""Inches: of an update, of a line of words, of the colour bar with its words, and of all maps
together."""
COLOUR_LIMIT = 8.0
"""Weights below 1/8 and above 8 times the right one have the outermost colours."""
SCALE, RIGHT_COLOUR = LogNorm(1 / COLOUR_LIMIT, COLOUR_LIMIT), "#3a3a3a"
BELOW = [(0.0, "#c3daee"), (0.2, "#8fc1e3"), (0.497, "#1f6cb0")]
ABOVE = [(0.503, "#fd8d3c"), (0.82, "#d7301f"), (1.0, "#67000d")]
SHADES = [*BELOW, (0.4975, RIGHT_COLOUR), (0.5025, RIGHT_COLOUR), *ABOVE]
COLOURS = LinearSegmentedColormap.from_list("weights", SHADES, N=1025)
"""Dark grey where a weight is right (within 1 %), blue and paler below, orange to deep red above.
"""
LOST, LEFT_OPEN, NOT_COMPUTED = "lost", "left_open", "not computed"


class Sign(NamedTuple):
    """A mark below a map for samples that are in no update."""

    look: dict[str, Any]
    """Arguments of matplotlib's ``plot``."""
    meaning: str


SIGNS = {
    LOST: Sign(
        {"marker": "x", "color": "#D55E00"},
        "in no update, although updates or a checkpoint followed",
    ),
    LEFT_OPEN: Sign(
        {"marker": "o", "color": "#0072B2"},
        "in no update at the end of training: left open",
    ),
    NOT_COMPUTED: Sign(
        {"marker": ".", "color": "#888888"},
        "no loss computed: dropped, not reached, or raised",
    ),
}
"""By what became of the samples."""
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
    def known(self) -> set[Place]:
        """The samples of which a loss was computed."""
        found = _places(self.first["lost"]) | _places(self.first["left_open"])
        for _, epoch, sample in self.weights:
            found.add((epoch, sample))
        return found

    @property
    def epochs(self) -> int:
        """Epochs in which a loss was computed."""
        return 1 + max(epoch for epoch, _ in self.known)

    @cached_property
    def in_no_update(self) -> dict[str, set[Place]]:
        """The samples that are in no update, by what became of them."""
        every = itertools.product(range(self.epochs), range(self.first["scenario"]["samples"]))
        return {
            LOST: _places(self.first["lost"]),
            LEFT_OPEN: _places(self.first["left_open"]),
            NOT_COMPUTED: set(every) - self.known,
        }

    def drawn(self, most: int, epochs: int) -> range:
        """Updates that are drawn, of those with samples of these epochs: the first in a row.

        If all of these are right and later ones are not, the first of the most wrong in a row.
        """
        worst: dict[int, float] = {}
        for (update, epoch, _), weight in self.weights.items():
            if epoch < epochs:
                worst[update] = max(worst.get(update, 0.0), abs(weight - 1))
        off = np.zeros(1 + max(worst, default=0))
        for update, wrong in worst.items():
            off[update] = wrong
        length = min(most, len(off))
        sums = np.convolve(off, np.ones(length), "valid").round(2)
        first = 0
        if not sums[0]:
            first = int(np.flatnonzero(sums == sums.max())[0])
        return range(first, first + length)

    def image(self, updates: int, epochs: int) -> NDArray[np.float64]:
        """The weights by update and by sample of each epoch in turn.

        NaN where a sample is not in the update.
        """
        samples = self.first["scenario"]["samples"]
        drawn = self.drawn(updates, epochs)
        values = np.full((len(drawn), epochs * samples), np.nan)
        for (update, epoch, sample), weight in self.weights.items():
            if update in drawn and epoch < epochs:
                values[drawn.index(update), epoch * samples + sample] = weight
        return values


def distinct_maps(observations: Sequence[Observation]) -> list[WeightMap]:
    """The distinct maps in the order of their first backends.

    Observations without an update are left out.
    """
    maps: list[WeightMap] = []
    for observation in observations:
        for known in maps:
            if _alike(known.first, observation):
                known.observations.append(observation)
                break
        else:
            if observation["updates"]:
                maps.append(WeightMap([observation]))
    return maps


def _alike(first: Observation, other: Observation) -> bool:
    if first["lost"] != other["lost"] or first["left_open"] != other["left_open"]:
        return False
    a, b = _by_sample(first, "by_epoch"), _by_sample(other, "by_epoch")
    if a.keys() != b.keys():
        return False
    return np.allclose(list(a.values()), [b[place] for place in a], rtol=TOLERANCE, atol=0)


def _by_sample(
    observation: Observation, key: Literal["relative", "by_epoch"]
) -> dict[SampleInUpdate, float]:
    found = {}
    for number, update in enumerate(observation["updates"]):
        for epoch, samples in update[key].items():
            for sample, value in samples.items():
                found[number, int(epoch), int(sample)] = value
    return found


def _places(by_epoch: Mapping[str, Sequence[int]]) -> set[Place]:
    found: set[Place] = set()
    for epoch, samples in by_epoch.items():
        found.update(itertools.product([int(epoch)], samples))
    return found


def weight_figure(
    observations: Sequence[Observation], *, footer: str = ""
) -> tuple[Figure, FigureWords] | None:
    """All weight maps of one scenario, with the words around them.

    None if no backend made an update.
    """
    every = distinct_maps(observations)
    if not every:
        return None
    maps, scenario = every[:MAX_MAPS], Scenario.from_dict(every[0].first["scenario"])
    setting = f"{scenario.name}: {scenario.setting}"
    words = FigureWords(scenario.heading, setting, footer, _notes(observations, every[MAX_MAPS:]))
    updates, epochs = _drawn_extent(maps, scenario.samples)
    with matplotlib.style.context(list(style.BASE)):
        height = _total_height(maps, updates, epochs) + BAR
        figure = new_figure(words, _legend_keys(maps, epochs), height)
        rows = [_num_rows(found, updates, epochs) for found in maps]
        every_axes = figure.subplots(len(maps), squeeze=False, height_ratios=rows)[:, 0]
        for axes, found in zip(every_axes, maps, strict=True):
            _draw(axes, found, updates, epochs)
        _number_samples(every_axes[-1], scenario.samples, epochs)
        bar = figure.colorbar(
            ScalarMappable(SCALE, COLOURS),
            ax=every_axes,
            location="bottom",
            aspect=60,
            shrink=0.8,
        )
        labels = ["≤ 1/8", "1/4", "1/2", "1: right", "2", "4", "≥ 8"]
        bar.set_ticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], labels=labels)
        bar.minorticks_off()
        words_of_bar = "weight of a sample / its weight in a full batch of the same samples"
        bar.set_label(words_of_bar, size=SMALL)
    return figure, words


def _notes(observations: Sequence[Observation], undrawn: Sequence[WeightMap]) -> list[str]:
    """What stands below the figure."""
    left_out: list[Observation] = []
    for found in undrawn:
        left_out += found.observations
    without = [observation for observation in observations if not observation["updates"]]
    notes = [
        "A row is an update, and a column a sample. At the right: the sum of the update's "
        "coefficients."
    ]
    for what, some_of_them in (("Not drawn", left_out), ("Without an update", without)):
        for outcome, names in _outcomes(some_of_them):
            notes.append(f"{what}: {names} ({outcome}).")
    if observations[0]["scenario"]["fault"] == Fault.EXCEPTION:
        notes.append("The epoch that raises is trained again as the next one.")
    return notes


def _outcomes(observations: Sequence[Observation]) -> list[tuple[str, str]]:
    """What happened, as a summary of findings, and under which backends."""
    pairs = []
    for seen in observations:
        pairs.append((some(summary(seen)), style.clean(seen["backend"])))
    return [(outcome, ", ".join(names)) for outcome, names in grouped(pairs).items()]


def _drawn_extent(maps: Sequence[WeightMap], samples: int) -> tuple[int, int]:
    """Updates of each map, and epochs of all, that fit into the figure."""
    epochs = min(MAX_EPOCHS, max(2, MAX_COLUMNS // samples), max(found.epochs for found in maps))
    updates = MAX_UPDATES
    while updates > MIN_UPDATES and _total_height(maps, updates, epochs) > MAPS_HEIGHT:
        updates -= 1
    return updates, epochs


def _total_height(maps: Sequence[WeightMap], updates: int, epochs: int) -> float:
    """Inches of all maps with their words."""
    total = 0.0
    for found in maps:
        lines = len(_title(found, updates, epochs)) + 1
        total += _num_rows(found, updates, epochs) * ROW + lines * LINE
    return total


def _num_rows(found: WeightMap, updates: int, epochs: int) -> int:
    """The updates that are drawn, and one row for the marks if there are any."""
    rows = len(found.drawn(updates, epochs))
    if any(_marks(found, epochs).values()):
        rows += 1
    return rows


def _title(found: WeightMap, updates: int, epochs: int) -> list[str]:
    """What happened under which backends, and what is not drawn, in lines."""
    texts = [f"{outcome}: {names}" for outcome, names in _outcomes(found.observations)]
    every, drawn = found.first["updates"], found.drawn(updates, epochs)
    if len(drawn) < len(every):
        others = sorted(
            (*every[: drawn.start], *every[drawn.stop :]), key=lambda update: float(update["sum"])
        )
        ends = " to ".join(dict.fromkeys(map(_sum_text, (others[0], others[-1]))))
        texts.append(
            f"updates {drawn[0] + 1} to {drawn[-1] + 1} of {len(every)}; sums of the others: {ends}"
        )
    elif found.epochs > epochs:
        texts.append(f"first {epochs} of {found.epochs} epochs")
    lines: list[str] = []
    for text in texts:
        lines += style.wrap(text, FULL - 0.9, TINY)
    return lines


def _marks(found: WeightMap, epochs: int) -> dict[str, list[int]]:
    """Columns of the samples that are in no update, by what became of them."""
    samples = found.first["scenario"]["samples"]
    marks: dict[str, list[int]] = {}
    for name, places in found.in_no_update.items():
        marks[name] = []
        for epoch, sample in sorted(places):
            if epoch < epochs:
                marks[name].append(epoch * samples + sample)
    return marks


def _draw(axes: Axes, found: WeightMap, updates: int, epochs: int) -> None:
    samples = found.first["scenario"]["samples"]
    values = found.image(updates, epochs)
    last, right = len(values), values.shape[1] - 0.5
    _draw_weights(axes, values)
    drawn = found.drawn(updates, epochs)
    names = [str(number + 1) for number in drawn]
    marks = _marks(found, epochs)
    if any(marks.values()):
        names.append("in none")
    edges = samples * np.arange(epochs + 1) - 0.5
    axes.vlines(edges, 0.5, len(names) + 0.5, color="black", linewidth=0.8)
    if found.epochs < epochs:
        axes.fill_between([found.epochs * samples - 0.5, right], 0.5, last + 0.5, **ENDED)
    for line, update in enumerate(found.first["updates"][drawn.start : drawn.stop], start=1):
        axes.text(right, line, f" {_sum_text(update)}", size=TINY, va="center", ha="left")
    size = min(4.0, 0.8 * 72 * FULL * 0.85 / values.shape[1])
    for name, columns in marks.items():
        rows = [last + 1] * len(columns)
        axes.plot(columns, rows, linestyle="none", markersize=size, **SIGNS[name].look)
    axes.set_yticks(range(1, len(names) + 1), names, size=TINY)
    axes.set(xticks=[], xlim=(-0.5, right), ylim=(len(names) + 0.5, 0.5))
    axes.tick_params(length=0, pad=2)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    title = "\n".join(map(style.safe, _title(found, updates, epochs)))
    axes.set_title(title, loc="left", size=TINY, pad=2, linespacing=1.15)


def _draw_weights(axes: Axes, values: NDArray[np.float64]) -> None:
    """The weights as colours, with a line between two updates."""
    last, right = len(values), values.shape[1] - 0.5
    lowest = 1 / COLOUR_LIMIT
    clipped = np.where(values > 0, np.clip(values, lowest, COLOUR_LIMIT), lowest)
    axes.imshow(
        np.ma.masked_where(np.isnan(values), clipped),
        cmap=COLOURS,
        norm=SCALE,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, right, last + 0.5, 0.5),
    )
    axes.hlines(np.arange(last + 1) + 0.5, -0.5, right, color="#cccccc", linewidth=0.5, zorder=2)


def _sum_text(update: UpdateRecord) -> str:
    """Sum of the coefficients, and the right one if that is not 1."""
    if math.isclose(update["right_sum"], 1, rel_tol=TOLERANCE):
        return _digits(update["sum"])
    return f"{_digits(update['sum'])} of {_digits(update['right_sum'])}"


def _digits(value: float) -> str:
    """With two decimals, or with three digits where two decimals are not enough."""
    if math.isclose(value, round(value, 2), rel_tol=TOLERANCE):
        return f"{value:.2f}"
    return f"{value:.3g}"


def _number_samples(axes: Axes, samples: int, epochs: int) -> None:
    """Below the last map: the samples of each epoch."""
    step = _tick_step(samples, most=max(1, 20 // epochs))
    columns, labels = [], []
    for epoch in range(epochs):
        for sample in range(0, samples, step):
            if sample == 0:
                label = f"0\nepoch {epoch + 1}"
            elif sample + step / 2 <= samples:
                label = str(sample)
            else:  # too close to the next epoch
                continue
            columns.append(epoch * samples + sample)
            labels.append(label)
    axes.set_xticks(columns, labels, size=TINY)
    axes.set_xlabel("sample", size=TINY)


def _tick_step(samples: int, *, most: int) -> int:
    """The smallest of 1, 2, 5, 10, 20 ... with which there are at most so many ticks."""
    unit = 1
    while True:
        for step in (unit, 2 * unit, 5 * unit):
            if step * most >= samples:
                return step
        unit *= 10


def _legend_keys(maps: Sequence[WeightMap], epochs: int) -> list[Key]:
    keys: list[Key] = [
        (Patch(facecolor=RIGHT_COLOUR), "the right weight, within 1 %; blank: not in the update")
    ]
    for name, sign in SIGNS.items():
        if any(_marks(found, epochs)[name] for found in maps):
            mark = Line2D([], [], linestyle="none", markersize=4.5, **sign.look)
            keys.append((mark, sign.meaning))
    if any(found.epochs < epochs for found in maps):
        keys.append((Patch(**ENDED), "training had ended"))
    return keys
