"""Weight maps: which samples are in which update of a scenario, with what weight, and which are in none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Observation = Mapping[str, Any]
"""One backend in one scenario (``bench.audit.diagnosis.observation``)."""
Place = tuple[int, int, int]
"""Update, epoch and sample, each from 0."""

TOLERANCE = 1e-3
"""Relative: maps that differ by less are drawn as one."""
LOST, LEFT_OPEN, NOT_COMPUTED = "lost", "left open", "not computed"


@dataclass(frozen=True)
class Extent:
    """The part of the maps that is drawn, the same for all maps of a figure."""

    samples: int
    epochs: int
    updates: int

    @property
    def columns(self) -> int:
        """Samples of all epochs side by side."""
        return self.samples * self.epochs


@dataclass(frozen=True)
class WeightMap:
    """The updates of one or more backends that gave the same weights."""

    observations: list[Observation]

    @property
    def first(self) -> Observation:
        """The observation of the first of these backends."""
        return self.observations[0]

    @property
    def updates(self) -> list[dict[str, Any]]:
        """The updates as observed."""
        return list(self.first["updates"])

    @cached_property
    def weights(self) -> dict[Place, float]:
        """The weight of each sample in each update, divided by the right one."""
        return _places(self.first, "relative")

    @cached_property
    def without_update(self) -> dict[str, list[tuple[int, int]]]:
        """Epoch and sample of those that are in no update, by LOST and LEFT_OPEN."""
        return {
            name: [(int(epoch), sample) for epoch, samples in self.first[key].items() for sample in samples]
            for name, key in ((LOST, "lost"), (LEFT_OPEN, "left_open"))
        }

    @property
    def epochs(self) -> int:
        """Epochs in which a loss was computed."""
        uncovered = [epoch for places in self.without_update.values() for epoch, _ in places]
        return 1 + max([*uncovered, *(epoch for _, epoch, _ in self.weights)])

    def num_drawn(self, extent: Extent) -> int:
        """Updates that are drawn: up to the last one with a sample of the epochs that are drawn."""
        inside = [update for update, epoch, _ in self.weights if update < extent.updates and epoch < extent.epochs]
        return 1 + max(inside, default=0)

    def image(self, extent: Extent) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The weights as an array of shape [updates, columns]; NaN where a sample is not in the update."""
        values = np.full((self.num_drawn(extent), extent.columns), np.nan)
        for (update, epoch, sample), weight in self.weights.items():
            if update < len(values) and epoch < extent.epochs:
                values[update, epoch * extent.samples + sample] = weight
        return values

    def in_no_update(self, extent: Extent) -> dict[str, list[int]]:
        """Columns of the samples that are in no update, by what became of them."""
        found = {
            name: [epoch * extent.samples + sample for epoch, sample in places]
            for name, places in self.without_update.items()
        }
        known = {epoch * extent.samples + sample for _, epoch, sample in self.weights}.union(*found.values())
        found[NOT_COMPUTED] = [column for column in range(self.epochs * extent.samples) if column not in known]
        return {name: [column for column in columns if column < extent.columns] for name, columns in found.items()}


def distinct(observations: Sequence[Observation]) -> list[WeightMap]:
    """The distinct maps in the order of their first backends; observations without an update are left out."""
    maps: list[WeightMap] = []
    for observation in observations:
        known = next((known for known in maps if _alike(known.first, observation)), None)
        if known is not None:
            known.observations.append(observation)
        elif observation["updates"]:
            maps.append(WeightMap([observation]))
    return maps


def _alike(one: Observation, other: Observation) -> bool:
    a, b = _places(one, "by_epoch"), _places(other, "by_epoch")
    same_samples = a.keys() == b.keys() and all(one[key] == other[key] for key in ("lost", "left_open"))
    return same_samples and np.allclose(list(a.values()), [b[place] for place in a], rtol=TOLERANCE, atol=0)


def _places(observation: Observation, key: str) -> dict[Place, float]:
    return {
        (number, int(epoch), int(sample)): value
        for number, update in enumerate(observation["updates"])
        for epoch, samples in update[key].items()
        for sample, value in samples.items()
    }
