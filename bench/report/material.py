"""What every part of a report is made of: the run, its verdicts, one row of facts per cell, and words for both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from bench.judge.advice import Obstacle, obstacle
from bench.judge.frames import cells_frame
from bench.judge.loading import Run
from bench.judge.pairs import ComparedPair
from bench.judge.quoting import Quotes
from bench.judge.standing import Standing
from bench.judge.tables import rows_of
from bench.plan.cell import REFERENCES, Status, Sync
from bench.words import plural

MEDIANS = (
    "mfu",
    "mfu_of_matmul",
    "energy_j_per_step",
    "energy_j_per_token",
    "cpu_s_per_micro_batch",
    "num_operators_per_micro_batch",
    "num_launches_per_micro_batch",
    "collective_s",
    "exposed_s",
    "final_loss",
    "update_scale",
)
"""Columns of trials: a cell has their median over its good trials, or over all if none is good."""
LARGEST = ("max_loss_deviation", "update_error", "num_warmup_steps")
"""A cell has the largest value of all its trials."""
FIRST = (
    "accumulated_in",
    "optimizer_steps_expected",
    "optimizer_steps_observed",
    "optimizer_steps_reported",
    "optimizer_steps_reported_by",
    "micro_batches_per_update",
    "ranks_agree",
)
"""All trials of a cell have the same value: the first that is known."""

SCALES = ((1e9, " G"), (1e6, " M"), (1e3, " k"))


@dataclass(frozen=True, kw_only=True)
class Material:
    """What a report is made of."""

    folder: Path
    """Where the run is."""
    run: Run
    standings: Mapping[str, Standing]
    """The verdicts with each backend as the baseline, the run's own first."""

    @cached_property
    def quotes(self) -> Quotes:
        """What may be said of each cell."""
        return Quotes(self.run, self.standings)

    @property
    def standing(self) -> Standing:
        """Against the run's own baseline."""
        return next(iter(self.standings.values()))

    @cached_property
    def pairs(self) -> dict[str, ComparedPair]:
        """Each cell against the baseline's, by id."""
        return self.standing.by_cell

    @cached_property
    def obstacle(self) -> Obstacle | None:
        """What keeps all times from being compared."""
        return obstacle(self.run, self.standing, self.folder)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per cell, by ``cell_id``: ``bench.load(RUN).cells`` and what sections need beside it.

        A/A twins have no row: they only serve to measure the noise floor.
        """
        found = cells_frame(self.quotes, self.standing).set_index("cell_id", drop=False)
        trials = self.run.tables.trials
        fine = trials["status"] == Status.OK
        good = trials[fine | ~fine.groupby(trials["cell_id"]).transform("any")].groupby("cell_id")
        every, sound = trials.groupby("cell_id"), trials[fine].groupby("cell_id")["step_time_s"]
        others = 100 * (trials["foreign_cores"] + trials["stolen_cores"]) / trials["num_cpus"]
        facts = pd.concat(
            [
                good[list(MEDIANS)].median(),
                every[list(LARGEST)].max(),
                every[list(FIRST)].first(),
                sound.min().rename("fastest_s"),
                sound.max().rename("slowest_s"),
                others.groupby(trials["cell_id"]).median().rename("others_percent"),
            ],
            axis=1,
        )
        # A cell whose step time may not be cited shows no times at all.
        times = ["fastest_s", "slowest_s"]
        facts[times] = facts[times].where(found["step_time_s"].notna().reindex(facts.index))
        return found[found["twin"].fillna("") == ""].join(facts)

    @cached_property
    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of ``cells`` as plain values, by id."""
        return {row["cell_id"]: row for row in rows_of(self.cells)}

    @property
    def contestants(self) -> pd.DataFrame:
        """The rows of all but the reference; all if there is nothing else."""
        found = self.cells[~self.cells["backend"].isin(REFERENCES)]
        return self.cells if found.empty else found

    @property
    def bad(self) -> pd.DataFrame:
        """The rows of cells without a valid result."""
        return self.cells[self.cells["status"] != Status.OK]


def eager_and_deferred(backends: Mapping[str, Mapping[Any, Any]], how: Sync = Sync.DEFERRED) -> list[tuple[str, str]]:
    """The eager and the deferred backend of each framework and sharding; of several, those named alike but for that."""
    alike: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, facts in backends.items():
        kind = str(facts.get("framework")), str(facts.get("sharding"))
        alike.setdefault(kind, {}).setdefault(str(facts.get("sync")), []).append(name)
    found = []
    for _, syncs in sorted(alike.items()):
        eager, deferred = syncs.get(Sync.EAGER, []), syncs.get(how, [])
        is_only = len(eager) == len(deferred) == 1
        found += [(a, b) for a in eager for b in deferred if is_only or b == a.replace(Sync.EAGER, how)]
    return found


def gpu_names(machine: Mapping[str, Any]) -> str:
    """The GPUs of a machine with their number, ``8 x NVIDIA H200``; empty without any."""
    counts = Counter(str(gpu.get("name", "GPU")) for gpu in machine.get("gpus") or [])
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def machine_words(manifest: Mapping[str, Any]) -> str:
    """The CPU, its cores and the GPUs."""
    machine = manifest.get("machine") or {}
    return ", ".join([cpu_name(machine), gpu_names(machine) or "no GPU"])


def cpu_name(machine: Mapping[str, Any]) -> str:
    """The CPU and its cores: ``AMD EPYC, 2 cores``."""
    cores = [plural(machine["cores"], "core")] if machine.get("cores") else []
    return ", ".join([str(machine.get("cpu") or "unknown CPU"), *cores])


def parameters(count: Any) -> str:
    """The number of a model's parameters: ``3.08 M parameters``."""
    if pd.isna(count):
        return "unknown number of parameters"
    value, unit = next(((count / scale, name) for scale, name in SCALES if count >= scale), (count, ""))
    return f"{value:.3g}{unit} parameters"
