"""What every part of a report is made of: the run, its verdicts, one row of facts per cell, and words for both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from bench.formatting import plural
from bench.judge.baseline import AgainstBaseline, against_baselines
from bench.judge.frames import cells_frame
from bench.judge.loading import Run
from bench.judge.next_steps import TimesUnavailable, times_unavailable
from bench.judge.pairs import ComparedPair
from bench.judge.quotes import Quotes
from bench.judge.tables import rows_of
from bench.judge.verdicts import Verdict
from bench.plan.cell import REFERENCES, Status, Sync

SCALES = ((1e9, " G"), (1e6, " M"), (1e3, " k"))


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """What a report is made of."""

    run: Run
    folder: Path = Path()
    """Where the run is."""

    @cached_property
    def against_baselines(self) -> dict[str, AgainstBaseline]:
        """The verdicts with each backend as the baseline, the run's own first."""
        return against_baselines(self.run)

    @cached_property
    def quotes(self) -> Quotes:
        """What may be said of each cell."""
        return Quotes(self.run, self.against_baselines)

    @property
    def against_baseline(self) -> AgainstBaseline:
        """Against the run's own baseline."""
        return next(iter(self.against_baselines.values()))

    @cached_property
    def pairs(self) -> dict[str, ComparedPair]:
        """Each cell against the baseline's, by id."""
        return self.against_baseline.by_cell

    def compared(self, cell: Mapping[str, Any], base: Mapping[str, Any]) -> ComparedPair | None:
        """A row of cells against another one, as any sentence, table or title has it; None if they are not compared."""
        against = self.against_baselines.get(base["backend"])
        found = None if against is None else against.by_cell.get(cell["cell_id"])
        return found if found is not None and found.pair.a.cell_id == base["cell_id"] else None

    def not_slower(self, cells: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The cells, beside the one with the shortest step time, that have no verdict of being slower than it."""
        pairs = [(cell, self.compared(cell, best)) for cell in cells if cell["cell_id"] != best["cell_id"]]
        return [cell for cell, pair in pairs if pair is None or pair.judgement.verdict is not Verdict.SLOWER]

    @cached_property
    def times_unavailable(self) -> TimesUnavailable | None:
        """What keeps all times from being compared."""
        return times_unavailable(self.run, self.against_baseline, self.folder)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """``bench.load(RUN).cells`` by ``cell_id``, without A/A twins, which only serve to check the instrument."""
        found = cells_frame(self.quotes, self.against_baseline).set_index("cell_id", drop=False).rename_axis(None)
        return found[found["twin"].fillna("") == ""]

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
