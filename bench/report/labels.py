"""Words beside points: each where no marker, no line and no other words are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from bench.judge.statistics import Array
from bench.report import style
from bench.report.style import TINY, safe

HEIGHT = 9.0
"""Of a line of words, in points."""
NEAR, FAR, STEP = 7, 160, 3
"""Distances from the point that are tried, in points."""
LEADER_FROM = 10
"""Distance from which a thin line leads from the words to the point."""
DIRECTIONS = 24
SIDES = {"left": 0.0, "center": 0.5, "right": 1.0}
"""Where the anchor is, of the words' width."""
LEADER_STEP = 3.0
"""Points between the squares that a leader counts as."""
MARKER = 8.0
"""Side of the square around another label's point through which no leader goes, in points."""
ALIKE = 0.5
"""Distances that differ by less, in points, are equal."""
TRIES = 4
"""Orders in which labels are placed: those for which there was no room come first in the next."""


@dataclass(frozen=True, slots=True)
class Label:
    """Words that are to stand beside a point."""

    x: float
    y: float
    text: str
    colour: str = "black"
    """Of the line that leads to it; words are black, since not every colour can be read."""


@dataclass
class Obstacles:
    """What is drawn in some axes, in its units: words keep away from it."""

    points: list[tuple[float, float, float]] = field(default_factory=list)
    """Place, and size in points."""
    lines: list[tuple[tuple[float, float], tuple[float, float]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Spot:
    """A place beside a point."""

    across: float
    up: float
    """Of the words' anchor from the point, in points."""
    side: str
    """Which end of the words the anchor is: ``left``, ``right`` or ``center``."""
    leads: bool
    """Whether a line leads from the point to them."""


def _spots() -> list[Spot]:
    """The nearest first and, of equally near ones, those at the right."""
    turns = sorted(range(DIRECTIONS), key=lambda turn: min(turn, DIRECTIONS - turn))
    found = []
    for radius in range(NEAR, FAR, STEP):
        for turn in turns:
            across = math.cos(2 * math.pi * turn / DIRECTIONS)
            side = "left" if across > 0.3 else "right" if across < -0.3 else "center"
            up = radius * math.sin(2 * math.pi * turn / DIRECTIONS)
            found.append(Spot(radius * across, up, side, radius >= LEADER_FROM))
    return found


SPOTS = _spots()


def place(axes: Axes, labels: Sequence[Label], obstacles: Obstacles, far: float = FAR) -> list[tuple[Label, Spot]]:
    """A place for each label, at most so many points away; one for which there is none is left out.

    The axes must be laid out and have their final limits.
    """
    order, best = list(labels), list[tuple[Label, Spot]]()
    for _ in range(TRIES):
        found = _place(axes, order, obstacles, [spot for spot in SPOTS if math.hypot(spot.across, spot.up) <= far])
        best = max(best, found, key=len)
        placed = {label for label, _ in found}
        if len(placed) == len(order):
            break
        order = [label for label in order if label not in placed] + [label for label in order if label in placed]
    return best


def _place(
    axes: Axes, labels: Sequence[Label], obstacles: Obstacles, spots: Sequence[Spot]
) -> list[tuple[Label, Spot]]:
    """The first free spot for each label, in their order. Boxes are rows of left, bottom, right and top, in points.

    Words that are nearer to another label's point would be read as that one's: they take such a place last, and only
    with a line that leads to their own.
    """
    point = axes.figure.dpi / 72
    frame = np.array(axes.get_window_extent().extents) / point
    taken = _boxes(axes, obstacles, point)
    words = np.empty((0, 4))
    leads = np.array([spot.leads for spot in spots], dtype=bool)
    centres = axes.transData.transform([(label.x, label.y) for label in labels]) / point if labels else np.empty((0, 2))
    found = []
    for label, centre in zip(labels, centres, strict=True):
        boxes = _word_boxes(centre, style.text_width(label.text, TINY) * 72 + 1, spots)
        inside = (boxes[:, :2] > frame[:2]).all(axis=1) & (boxes[:, 2:] < frame[2:]).all(axis=1)
        possible = np.flatnonzero(inside)
        blocked = _overlap(boxes[possible], np.vstack([taken, words])).any(axis=1)
        free = possible[~blocked]
        own = _distances(boxes[free], centre[None])[:, 0] <= _distances(boxes[free], centres).min(axis=1) + ALIKE
        others = _squares(centres[np.linalg.norm(centres - centre, axis=1) > NEAR], MARKER)
        for chosen in [*free[own], *free[~own & leads[free]]]:
            spot = spots[chosen]
            leader = _leader(centre, spot) if spot.leads else np.empty((0, 4))
            if not _overlap(leader, np.vstack([words, others])).any():
                taken, words = np.vstack([taken, leader]), np.vstack([words, boxes[chosen]])
                found.append((label, spot))
                break
    return found


def write(axes: Axes, placed: Sequence[tuple[Label, Spot]]) -> None:
    """Draw them."""
    for label, spot in placed:
        line: dict[str, Any] = {"arrowstyle": "-", "linewidth": 0.3, "color": label.colour, "shrinkA": 0, "shrinkB": 1}
        line["relpos"] = (SIDES[spot.side], 0.5)  # it leads to the end of the words that is nearest
        axes.annotate(
            safe(label.text),
            (label.x, label.y),
            (spot.across, spot.up),
            textcoords="offset points",
            size=TINY,
            ha=spot.side,
            va="center_baseline",
            arrowprops=line if spot.leads else None,
        )


def _word_boxes(centre: Array, width: float, spots: Sequence[Spot]) -> Array:
    """The box of words of that width at each of the spots."""
    corners = np.array([(spot.across - SIDES[spot.side] * width, spot.up - HEIGHT / 2) for spot in spots]) + centre
    return np.hstack([corners, corners + np.array([width, HEIGHT])])


def _overlap(boxes: Array, others: Array) -> NDArray[np.bool_]:
    """Whether each box has something in common with each of the others: a row per box, a column per other."""
    low, high = (np.asarray(one)[:, None, :] for one in (boxes[:, :2], boxes[:, 2:]))
    return np.asarray(((low < others[None, :, 2:]) & (high > others[None, :, :2])).all(axis=2))


def _distances(boxes: Array, points: Array) -> Array:
    """How far each box is from each point: a row per box, a column per point."""
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    return np.asarray(np.linalg.norm(np.maximum(np.maximum(low - points, points - high), 0.0), axis=2))


def _leader(centre: Array, spot: Spot) -> Array:
    """The line from the point's marker to the words."""
    length = math.hypot(spot.across, spot.up)
    shares = np.arange(NEAR, length, LEADER_STEP)[:, None] / length
    return _squares(centre + shares * np.array([spot.across, spot.up]), 1.0)


def _boxes(axes: Axes, obstacles: Obstacles, point: float) -> Array:
    """What is there already."""
    found = [np.empty((0, 4))]
    for x, y, size in obstacles.points:
        found.append(_squares(axes.transData.transform((x, y))[None] / point, size))
    for line in obstacles.lines:
        tail, head = axes.transData.transform(line) / point
        steps = max(1, math.ceil(float(np.linalg.norm(head - tail)) / 3))
        found.append(_squares(tail + np.linspace(0, 1, steps + 1)[:, None] * (head - tail), 2.0))
    return np.vstack(found)


def _squares(centres: Array, size: float) -> Array:
    return np.hstack([centres - size / 2, centres + size / 2])
