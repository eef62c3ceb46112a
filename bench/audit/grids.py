"""Which sample is in which update of a scenario, as plain arrays: what a weight map draws, without the drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

Observation = Mapping[str, Any]
"""One backend in one scenario (``bench.audit.diagnosis.observation``)."""

TOLERANCE = 1e-3
"""Relative: maps that differ by less are drawn as one."""
LOST, LEFT_OPEN, NOT_COMPUTED = "lost", "left open", "not computed"


@dataclass(frozen=True)
class Map:
    """Backends whose updates have the same weights."""

    observations: list[Observation]

    @property
    def first(self) -> Observation:
        return self.observations[0]

    @property
    def backends(self) -> list[str]:
        return [str(observation["backend"]) for observation in self.observations]

    @property
    def updates(self) -> list[dict[str, Any]]:
        return list(self.first["updates"])

    @property
    def epochs(self) -> int:
        """Epochs of which a loss was computed."""
        seen = [int(epoch) for update in self.updates for epoch in update["relative"]]
        return 1 + max([*seen, *(int(epoch) for key in ("lost", "left_open") for epoch in self.first[key])])


@dataclass(frozen=True)
class Extent:
    """What of the maps is drawn: the same for all of one figure."""

    samples: int
    epochs: int
    updates: int

    @property
    def columns(self) -> int:
        return self.samples * self.epochs


def group(observations: Sequence[Observation]) -> list[Map]:
    """The distinct maps in the order of their first backends; observations without an update are left out."""
    maps: list[Map] = []
    for observation in observations:
        if not observation["updates"]:
            continue
        known = next((known for known in maps if _alike(known.first, observation)), None)
        if known is None:
            maps.append(Map([observation]))
        else:
            known.observations.append(observation)
    return maps


def _alike(one: Observation, other: Observation) -> bool:
    """Whether two maps have the same samples in the same updates, with the same weights but for rounding."""
    if any(one[key] != other[key] for key in ("lost", "left_open")):
        return False
    if len(one["updates"]) != len(other["updates"]):
        return False
    for mine, theirs in zip(one["updates"], other["updates"], strict=True):
        a, b = (
            {(epoch, sample): value for epoch, of in update["by_epoch"].items() for sample, value in of.items()}
            for update in (mine, theirs)
        )
        if a.keys() != b.keys() or any(not math.isclose(a[key], b[key], rel_tol=TOLERANCE) for key in a):
            return False
    return True


def drawn(found: Map, extent: Extent) -> int:
    """How many of a map's updates are drawn: those up to the last one that has a sample in the epochs drawn."""
    inside = [
        number
        for number, update in enumerate(found.updates[: extent.updates], start=1)
        if any(int(epoch) < extent.epochs for epoch in update["relative"])
    ]
    return max(inside, default=1)


def relative(found: Map, extent: Extent) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Updates x columns: the weight of a sample over its right one, NaN where it is not in the update."""
    values = np.full((drawn(found, extent), extent.columns), np.nan)
    for row, update in zip(values, found.updates, strict=False):
        for epoch, of in update["relative"].items():
            for sample, value in of.items():
                if int(epoch) < extent.epochs:
                    row[int(epoch) * extent.samples + int(sample)] = value
    return values


def in_no_update(found: Map, extent: Extent) -> dict[str, list[int]]:
    """The columns of samples that are in no update, by what became of them; of the epochs that were begun."""
    marked = {
        name: [int(epoch) * extent.samples + sample for epoch, of in found.first[key].items() for sample in of]
        for name, key in ((LOST, "lost"), (LEFT_OPEN, "left_open"))
    }
    accounted = {column for columns in marked.values() for column in columns}
    accounted |= {
        int(epoch) * extent.samples + int(sample)
        for update in found.updates
        for epoch, of in update["relative"].items()
        for sample in of
    }
    marked[NOT_COMPUTED] = [column for column in range(found.epochs * extent.samples) if column not in accounted]
    return {name: [column for column in columns if column < extent.columns] for name, columns in marked.items()}


def data(observations: Sequence[Observation]) -> pd.DataFrame:
    """What the maps show: one row per backend, update, epoch and sample."""
    rows = [
        (observation["backend"], number, int(epoch), int(sample), update["by_epoch"][epoch][sample], relative)
        for observation in observations
        for number, update in enumerate(observation["updates"], start=1)
        for epoch, of in update["relative"].items()
        for sample, relative in of.items()
    ]
    return pd.DataFrame(rows, columns=["backend", "update", "epoch", "sample", "coefficient", "relative"])
