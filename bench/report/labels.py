"""Words beside points: each where no marker, no line and no other words are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from bench.report import style
from bench.report.style import TINY, safe
from bench.warmup import Array

HEIGHT = 9.0
"""Of a line of words, in points."""
NEAR, FAR, STEP = 7, 100, 3
"""Distances from the point that are tried, in points."""
LEADER_FROM = 10
"""Distance from which a thin line leads from the words to the point."""
DIRECTIONS = 16
LEADER_STEPS = 12
"""Squares that a leader counts as; the first three are its own marker's place."""


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


def place(axes: Axes, labels: Sequence[Label], obstacles: Obstacles) -> list[tuple[Label, Spot]]:
    """A place for each label, in their order; one for which there is none is left out.

    The axes must be laid out and have their final limits. Boxes are rows of left, bottom, right and top, in points.
    """
    point = axes.figure.dpi / 72
    frame = np.array(axes.get_window_extent().extents) / point
    taken = _boxes(axes, obstacles, point)
    words = np.empty((0, 4))
    found = []
    for label in labels:
        centre = axes.transData.transform((label.x, label.y)) / point
        boxes = _word_boxes(centre, style.text_width(label.text, TINY) * 72 + 1)
        inside = (boxes[:, :2] > frame[:2]).all(axis=1) & (boxes[:, 2:] < frame[2:]).all(axis=1)
        possible = np.flatnonzero(inside)
        blocked = _overlap(boxes[possible], np.vstack([taken, words])).any(axis=1)
        for chosen in possible[~blocked]:
            spot = SPOTS[chosen]
            leader = _leader(centre, spot) if spot.leads else np.empty((0, 4))
            if not _overlap(leader, words).any():
                taken, words = np.vstack([taken, leader]), np.vstack([words, boxes[chosen]])
                found.append((label, spot))
                break
    return found


def write(axes: Axes, placed: Sequence[tuple[Label, Spot]]) -> None:
    """Draw them."""
    for label, spot in placed:
        line = {"arrowstyle": "-", "linewidth": 0.3, "color": label.colour, "shrinkA": 0, "shrinkB": 1}
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


def _word_boxes(centre: Array, width: float) -> Array:
    """The box of words of that width at each of the SPOTS."""
    start = {"left": 0.0, "center": -width / 2, "right": -width}
    corners = np.array([(spot.across + start[spot.side], spot.up - HEIGHT / 2) for spot in SPOTS]) + centre
    return np.hstack([corners, corners + np.array([width, HEIGHT])])


def _overlap(boxes: Array, others: Array) -> NDArray[np.bool_]:
    """Whether each box has something in common with each of the others: a row per box, a column per other."""
    low, high = (np.asarray(one)[:, None, :] for one in (boxes[:, :2], boxes[:, 2:]))
    return np.asarray(((low < others[None, :, 2:]) & (high > others[None, :, :2])).all(axis=2))


def _leader(centre: Array, spot: Spot) -> Array:
    """The line from the point to the words."""
    shares = np.arange(3, LEADER_STEPS)[:, None] / LEADER_STEPS
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
