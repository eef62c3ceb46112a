"""The axes of a matrix: the fields that distinguish cells, and how titles and labels name cells by them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.plan.column import Axis
from bench.plan.columns import COLUMNS

AXES = {name: about for name, about in COLUMNS["trials"].items() if about.axis is not None}
"""The fields that distinguish cells."""


def axes(*kinds: Axis) -> tuple[str, ...]:
    """The names of the axes of these kinds, kind by kind."""
    return tuple(name for kind in kinds for name, about in AXES.items() if about.axis is kind)


WORK, WAYS = axes(Axis.WORK), axes(Axis.WORK, Axis.WAY)
"""Axes that are equal if two cells do the same work in a step; and axes shown where cells differ in them."""


FOLLOWS = {"learning_rate": "optimizer", "replicate": "backend"}
"""Axes that usually follow another: a rate for each optimizer, replicas for HSDP alone."""


def differing(cells: Iterable[Any], names: Iterable[str] = WAYS) -> list[str]:
    """The axes in which cells (or table rows with one attribute per column) differ.

    An axis that only follows another one is left out: FOLLOWS.
    """
    rows = list(cells)
    found = [name for name in names if len({getattr(row, name) for row in rows}) > 1]
    for name in FOLLOWS.keys() & set(found):
        pairs = {(getattr(row, FOLLOWS[name]), getattr(row, name)) for row in rows}
        if len(pairs) == len({leader for leader, _ in pairs}):
            found.remove(name)
    return found


def labels(cells: Iterable[Any]) -> dict[Any, str]:
    """A unique label for each cell: its own, plus the axes in which cells with the same label differ."""
    alike: dict[str, list[Any]] = {}
    for cell in cells:
        alike.setdefault(cell.label, []).append(cell)
    return {cell: " ".join([label, *phrases(cell, differing(some))]) for label, some in alike.items() for cell in some}


def phrases(cell: Any, names: Iterable[str]) -> list[str]:
    """The values of these axes, as sentences show them."""
    return [AXES[name].phrase(getattr(cell, name)) for name in names]
