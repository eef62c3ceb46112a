"""Compares the losses of trials with those of their references, step by step, as far as a reference was trained."""

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
"""A run with this many optimizer steps is long: rounding alone makes its losses diverge in the end."""
COMPARED_STEPS = 50
"""Number of first losses compared in a long run: correct backends differed by up to 2e-4 nats after 60 steps."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Absolute differences between a trial's losses and the reference's, in nats per token."""

    first: float
    """At the first step."""
    largest: float
    """Over the compared steps; NaN if any loss is not finite."""
    num_steps: int
    """Number of compared first steps; at most as many as the reference has."""


class Losses:
    """The losses of a run."""

    def __init__(self, tables: Tables) -> None:
        self._of: dict[Any, Any] = {
            key: group.to_numpy(dtype=float, na_value=math.nan)
            for key, group in tables.losses.sort_values("step").groupby(["cell_id", "repeat"])["loss"]
        }
        """By cell id and repeat."""
        self._references: dict[tuple[Any, ...], Sequence[float]] = {}
        """Losses of the reference trained for most steps, from its first good trial."""
        good = tables.trials[tables.trials["backend"].isin(REFERENCES) & (tables.trials["status"] == Status.OK)]
        for _, row in good.sort_values("repeat").iterrows():
            key = self._key(row, row["backend"], row["world_size"])
            if len(self._complete(row)) > len(self._references.get(key, ())):
                self._references[key] = self._complete(row)

    def deviation(self, row: Any) -> Deviation | None:
        """The deviation of a row of the trials table; None if it has not one loss per step, or no reference."""
        reference = cell_of(row.to_dict()).reference()
        own = self._complete(row)
        expected = self._references.get(self._key(row, reference.backend, reference.world_size), ())
        apart = [float(abs(a - b)) for a, b in zip(own, expected, strict=False)]
        if not apart:
            return None
        compared = apart if len(own) < LONG_STEPS else apart[:COMPARED_STEPS]
        finite = all(map(math.isfinite, [*own, *apart]))
        return Deviation(apart[0], max(compared) if finite else math.nan, len(compared))

    def _complete(self, row: Any) -> Sequence[float]:
        """The losses of a trial; empty if any is missing."""
        found = self._of.get((row["cell_id"], row["repeat"]), ())
        return found if len(found) == row["optimizer_steps_expected"] else ()

    @staticmethod
    def _key(row: Any, backend: str, world_size: int) -> tuple[Any, ...]:
        """Identifies a reference and its work."""
        return (backend, world_size, *(row[name] for name in WORK))


def extent(tables: Tables) -> str:
    """A sentence on how many steps of losses were compared; empty if all were."""
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
