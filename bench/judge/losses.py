"""The losses of trials beside their references': step by step, as far as a reference was trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.judge.expected import cell_of
from bench.judge.tables import Tables
from bench.plan.cell import REFERENCES, Status
from bench.plan.columns import WORK

LONG_STEPS = 200
"""Optimizer steps from which a run is long: rounding alone takes its losses apart in the end."""
COMPARED_STEPS = 50
"""How many of a long run's first losses are compared: sound backends came 2e-4 nats apart in 60 steps."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far the losses of a trial are from the reference's, in nats per token."""

    first: float
    """At the first step."""
    largest: float
    """NaN if a loss is not finite."""
    num_steps: int
    """Of how many first steps it is the largest: no more than the reference has."""


class Losses:
    """The losses of a run."""

    def __init__(self, tables: Tables) -> None:
        self._of: dict[Any, Any] = {
            key: group.to_numpy(dtype=float, na_value=math.nan)
            for key, group in tables.losses.sort_values("step").groupby(["cell_id", "repeat"])["loss"]
        }
        """By cell id and repeat."""
        self._truths: dict[tuple[Any, ...], Sequence[float]] = {}
        """Of the first good trial of those references that trained most steps."""
        good = tables.trials[tables.trials["backend"].isin(REFERENCES) & (tables.trials["status"] == Status.OK)]
        for _, row in good.sort_values("repeat").iterrows():
            key = self._key(row, row["backend"], row["world_size"])
            if len(self._whole(row)) > len(self._truths.get(key, ())):
                self._truths[key] = self._whole(row)

    def deviation(self, row: Any) -> Deviation | None:
        """Of a trial, a row of the trials table; None without losses, one for each step, or a reference's."""
        reference = cell_of(row.to_dict()).reference()
        mine, truth = self._whole(row), self._truths.get(self._key(row, reference.backend, reference.world_size), ())
        apart = [float(abs(a - b)) for a, b in zip(mine, truth, strict=False)]
        if not apart:
            return None
        compared = apart if len(mine) < LONG_STEPS else apart[:COMPARED_STEPS]
        finite = all(map(math.isfinite, [*mine, *apart]))
        return Deviation(apart[0], max(compared) if finite else math.nan, len(compared))

    def _whole(self, row: Any) -> Sequence[float]:
        """The losses of a trial; none if one is missing."""
        found = self._of.get((row["cell_id"], row["repeat"]), ())
        return found if len(found) == row["optimizer_steps_expected"] else ()

    @staticmethod
    def _key(row: Any, backend: str, world_size: int) -> tuple[Any, ...]:
        """Which reference, and of which work."""
        return (backend, world_size, *(row[name] for name in WORK))


def extent(tables: Tables) -> str:
    """Over how many steps losses were compared, in a sentence; empty if over all that cells have."""
    losses = Losses(tables)
    compared = tables.trials[tables.trials["max_loss_deviation"].notna()]
    short: set[int] = set()
    for _, row in compared.drop_duplicates("cell_id").iterrows():
        found = losses.deviation(row)
        short |= {found.num_steps} if found and found.num_steps < row["optimizer_steps_expected"] else set()
    if not short:
        return ""
    steps = " or ".join(map(str, sorted(short)))
    return f"Losses of longer trainings were compared over the first {steps} steps alone."
