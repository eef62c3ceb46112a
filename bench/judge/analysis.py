"""A run with all that follows from it, each calculated once: verdicts, findings, and the frame of cells.

``read`` returns its frames alone: the result of ``bench.load``.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from bench.errors import InputError
from bench.findings import Finding
from bench.judge.baseline import baseline_of, control_of, pairs_with_baseline
from bench.judge.caveats import caveats, limits, remarks, ways_of_bf16, widened
from bench.judge.columns import COLUMNS, FRAMES
from bench.judge.loading import Run, load
from bench.judge.next_steps import times_unavailable
from bench.judge.pairs import ComparedPair, Pair, judge_pairs, record
from bench.judge.samples import estimate
from bench.judge.tables import frame_of, good_trials, rows_of
from bench.judge.trial_columns import Over
from bench.judge.verdicts import Verdict
from bench.plan.cell import REFERENCES, Status

SCHEME = "accumulation-bench"
"""Prefix of the ids by which numbers are cited."""


def permanent_id(run_id: str, name: str) -> str:
    """The id by which a part of a run is cited: ``accumulation-bench:RUN/NAME``."""
    return f"{SCHEME}:{quoted(run_id)}/{name}"


def quoted(name: str) -> str:
    """A name as part of an id: letters, digits, ``-``, ``.`` and ``_`` stay, the rest is percent-encoded."""
    return urllib.parse.quote(name, safe="").replace("~", "%7E")


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What is said of a run."""

    run: Run
    folder: Path = Path()
    """Where the run is."""

    @cached_property
    def baseline(self) -> str:
        """The backend that all others are compared with."""
        return baseline_of(self.run.manifest)

    @cached_property
    def baselines(self) -> list[str]:
        """The backends that could be the baseline, the run's own first."""
        others = (cell.backend for cell in self.run.cells.values() if not cell.is_reference)
        return list(dict.fromkeys([self.baseline, *others]))

    @cached_property
    def control(self) -> ComparedPair | None:
        """The A/A pair; None if the run has none."""
        return control_of(self.run)

    @cached_property
    def _against(self) -> dict[str, dict[str, ComparedPair]]:
        return {}

    def against(self, baseline: str) -> Mapping[str, ComparedPair]:
        """The verdicts against a backend, by the id of the cell that is compared and the ratio of the A/A pair.

        Holm's correction counts the comparisons with one baseline, not the baselines that could have been chosen.
        """
        if baseline not in self._against:
            pairs = pairs_with_baseline(self.run, baseline)
            self._against[baseline] = {row.b.cell_id: row for row in self._judged(pairs)}
        return self._against[baseline]

    @property
    def pairs(self) -> Mapping[str, ComparedPair]:
        """Each cell against the run's own baseline, by id."""
        return self.against(self.baseline)

    @property
    def verdicts(self) -> list[ComparedPair]:
        """The same as a list."""
        return list(self.pairs.values())

    def compared(self, cell_id: str, other_id: str) -> ComparedPair | None:
        """A cell against another one, as any sentence, table or title has it; None if no report compares them."""
        found = self.against(self.run.cells[other_id].backend).get(cell_id)
        return found if found is not None and found.a.cell_id == other_id else None

    def ratio(self, cell_id: str, other_id: str) -> ComparedPair:
        """A cell against any other one.

        No report compares cells that differ otherwise than in the backend (in N, for example): Holm's correction then
        covers the run's own comparisons and this one. Raises InputError if the two are one.
        """
        cell, other = self.run.cells[cell_id], self.run.cells[other_id]
        if cell_id == other_id:
            raise InputError(f"{self.run.labels[cell_id]}: is given twice; give two different cells, or one")
        if found := self.compared(cell_id, other_id):
            return found
        pairs = [*pairs_with_baseline(self.run), Pair(a=other, b=cell)]
        return self._judged(pairs)[-1]

    def _judged(self, pairs: Sequence[Pair]) -> list[ComparedPair]:
        return judge_pairs(self.run, self.run, pairs, control=self.control.time if self.control else None)

    def not_slower(self, cells: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The cells, beside the one with the shortest step time, that have no verdict of being slower than it."""
        pairs = [(cell, self.compared(cell["cell_id"], best["cell_id"])) for cell in cells if cell is not best]
        return [cell for cell, pair in pairs if pair is None or pair.verdict is not Verdict.SLOWER]

    @cached_property
    def findings(self) -> list[Finding]:
        """What limits the numbers of the run."""
        return limits(self.run, self.control, self.verdicts)

    def caveats(self, *ids: str) -> list[str]:
        """The caveats of the numbers of one cell, or of one against another."""
        cells = [(self.run.manifest, self.run.cells[cell_id]) for cell_id in reversed(ids)]  # the baseline first
        return [*caveats(self.findings, *ids), *ways_of_bf16(cells)]

    @cached_property
    def remarks(self) -> list[str]:
        control = self.control
        found = [] if control is None or control.time is None else widened(control.a, control.time)
        return found + remarks((self.run.manifest, cell) for cell in self.run.cells.values() if not cell.twin)

    @cached_property
    def times_unavailable(self) -> Finding | None:
        """What keeps all times from being compared."""
        return times_unavailable(self.run, self.verdicts, self.folder)

    @property
    def hides_times(self) -> bool:
        """Whether no figure may show times. Of a single backend there is nothing to compare, and its times are good."""
        return self.times_unavailable is not None and any(not row.b.twin for row in self.verdicts)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The frame of cells: what may be said of each, its ratio to the baseline, and facts of its trials."""
        rows = pd.DataFrame([self._row(cell_id) for cell_id in self.run.cells])
        trials = self.run.tables.trials
        found = rows.set_index("cell_id", drop=False).join(_over_trials(trials))
        # A cell whose step time may not be cited shows no times at all.
        found.loc[found["step_time_s"].isna(), ["fastest_s", "slowest_s"]] = None
        tokens = (trials["tokens_per_s"] * trials["step_time_s"]).groupby(trials["cell_id"]).first().round()
        found["tokens_per_s"] = tokens / found["step_time_s"].astype("Float64")
        return frame_of("cells", found.reset_index(drop=True))

    def _row(self, cell_id: str) -> dict[str, Any]:
        """The columns of a cell that do not come from its trials' columns.

        A cell is ``ok`` if all its trials are. One with good and failed trials is shown with its failure and with the
        number of its good trials, of which its numbers are.
        """
        evidence, pair = self.run.evidence.of(self.run.cells[cell_id]), self.pairs.get(cell_id)
        has_time = evidence.sample.trials and evidence.num_ok and not evidence.barred
        time = estimate(evidence.sample.trials) if has_time else None
        # A busy machine takes time, and no memory.
        has_memory = evidence.num_ok and not evidence.is_wrong
        row = {
            "cell_id": cell_id,
            "label": self.run.labels[cell_id],
            "status": evidence.status,
            "reason": evidence.reason,
            "outcome": evidence.outcome,
            "comparable": not evidence.barred and evidence.num_ok > 0,
            "num_ok": evidence.num_ok,
            "num_trials": evidence.num_trials,
            "step_time_s": time and time.seconds,
            "step_time_low_s": time and time.low,
            "step_time_high_s": time and time.high,
            "peak_memory_bytes": evidence.peak_memory_bytes if has_memory else None,
            "peak_memory_source": min(evidence.peak_memory_sources, default=None) if has_memory else None,
            "caveats": "; ".join(self.caveats(cell_id)),
            "citation": permanent_id(self.run.name, cell_id),
        }
        if pair is None:
            return row
        return row | {
            "baseline": pair.a.backend,
            "ratio": pair.time and pair.time.ratio,
            "ratio_low": pair.time and pair.time.low,
            "ratio_high": pair.time and pair.time.high,
            "verdict": str(pair.verdict),
            "verdict_reason": str(pair.reason),
        }

    @cached_property
    def cells(self) -> pd.DataFrame:
        """``frame`` by ``cell_id``, without A/A twins, which only serve to check the instrument."""
        found = self.frame.set_index("cell_id", drop=False).rename_axis(None)
        return found[found["twin"].fillna("") == ""]

    @cached_property
    def every_row(self) -> dict[str, dict[str, Any]]:
        """The rows of ``frame`` as plain values, by id."""
        return {row["cell_id"]: row for row in rows_of(self.frame)}

    @cached_property
    def rows(self) -> dict[str, dict[str, Any]]:
        """The same of ``cells``."""
        return {cell_id: self.every_row[cell_id] for cell_id in self.cells.index}

    @property
    def contestants(self) -> pd.DataFrame:
        """The rows of all but the reference; all if there is nothing else."""
        found = self.cells[~self.cells["backend"].isin(REFERENCES)]
        return self.cells if found.empty else found

    @property
    def bad(self) -> pd.DataFrame:
        """The rows of cells without a valid result."""
        return self.cells[self.cells["status"] != Status.OK]


def _over_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """The columns that cells have from their trials, by cell_id."""
    names = {over: [name for name, column in COLUMNS["trials"].items() if column.aggregation is over] for over in Over}
    every, fine = trials.groupby("cell_id"), good_trials(trials).groupby("cell_id")
    sound = trials[trials["status"] == Status.OK].groupby("cell_id")["step_time_s"]
    others = 100 * (trials["foreign_cores"] + trials["stolen_cores"]) / trials["num_cpus"]
    return pd.concat(
        [
            every[names[Over.FIRST]].first(),
            fine[names[Over.MEDIAN]].median(),
            every[names[Over.MAX]].max(),
            sound.min().rename("fastest_s"),
            sound.max().rename("slowest_s"),
            others.groupby(trials["cell_id"]).median().rename("others_percent"),
        ],
        axis=1,
    )


class Frames(Mapping[str, pd.DataFrame]):
    """The frames of one run, as attributes and by name; columns, dtypes and units: ``bench.judge.columns.COLUMNS``.

    ``manifest`` is run.json. Frames are built from the journal, not from the parquet files, and judged by the gates.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.run_id = run.name
        self._analysis = Analysis(run=run, folder=folder)
        self.manifest: Mapping[str, Any] = run.manifest
        tables = run.tables
        self.trials, self.steps, self.losses = tables.trials, tables.steps, tables.losses
        self.collectives, self.memory = tables.collectives, tables.memory

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in FRAMES:
            raise KeyError(f"{name!r} is no frame; they are {', '.join(FRAMES)}")
        frame: pd.DataFrame = getattr(self, name)
        return frame

    def __iter__(self) -> Iterator[str]:
        return iter(FRAMES)

    def __len__(self) -> int:
        return len(FRAMES)

    def __repr__(self) -> str:
        return f"<Frames of the run {self.run_id}: {', '.join(FRAMES)}>"

    @cached_property
    def ratios(self) -> pd.DataFrame:
        return frame_of("ratios", [record(row) for row in self._analysis.verdicts])

    @property
    def cells(self) -> pd.DataFrame:
        return self._analysis.frame


def read(folder: str | Path) -> Frames:
    """The frames of a run's folder. Raises InputError if it is no run, or its journal was truncated or edited."""
    path = Path(folder)
    return Frames(load(path), path)
