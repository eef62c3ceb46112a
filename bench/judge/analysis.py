"""A run with all that follows from it, each made once: verdicts, findings, the frame of cells.

``read`` returns its frames alone: the result of ``bench.load``.
"""

from __future__ import annotations

import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from bench.errors import InputError
from bench.findings import Finding
from bench.judge.baseline import baseline_of, control_of, pairs_with_baseline
from bench.judge.caveats import (
    against_the_copy,
    caveats,
    limits,
    remarks,
    suspect,
    ways_of_bf16,
)
from bench.judge.columns import COLUMNS, FRAMES
from bench.judge.gates import known_defect
from bench.judge.loading import Run, load
from bench.judge.next_steps import times_unavailable
from bench.judge.pairs import ComparedPair, Pair, judge_pairs, record
from bench.judge.pool import Pool
from bench.judge.samples import Estimate, estimate, estimate_over_runs
from bench.judge.tables import (
    RowValues,
    Value,
    count_in,
    frame_of,
    good_trials,
    number_in,
    required_count,
    required_text,
    rows_of,
    text_in,
)
from bench.judge.trial_columns import Over
from bench.judge.verdicts import Verdict
from bench.plan.cell import REFERENCES, Cell, Status
from bench.run.manifest import Manifest

SCHEME = "accumulation-bench"
"""Prefix of the ids by which numbers are cited."""


RESERVED = "cuda_reserved"
"""Category of the table of memory: the peak of what the CUDA allocator took from the device."""
DIGITS = 12
"""Of a run's hash in an id."""


def permanent_id(pool: Pool, name: str) -> str:
    """The id by which a part of a run is cited: ``accumulation-bench:RUN:HASH/NAME``."""
    return f"{SCHEME}:{quoted(pool.first.name)}:{hashes_of(pool)}/{name}"


def hashes_of(pool: Pool) -> str:
    """The beginning of the hash that pins each run of a pool, with ``+`` between them."""
    return _beginnings(pool.pins)


def older_hashes_of(pool: Pool) -> str:
    """The same of the journals alone, as older ids have it."""
    return _beginnings(pool.digests)


def _beginnings(hashes: Iterable[str]) -> str:
    joined = "+".join(each[:DIGITS] for each in hashes)
    if not joined:
        return "none"
    return joined


def quoted(name: str) -> str:
    """A name as part of an id: percent-encoded, but for letters, digits, ``-``, ``.`` and ``_``."""
    return urllib.parse.quote(name, safe="").replace("~", "%7E")


@dataclass(frozen=True, kw_only=True)
class CellRow:
    """A row of the frame of cells; None is unknown."""

    cell: Cell
    label: str
    status: str
    reason: str
    outcome: str
    num_ok: int
    num_trials: int
    step_time_s: float | None
    step_time_low_s: float | None
    step_time_high_s: float | None
    tokens_per_s: float | None
    peak_memory_bytes: int | None
    peak_memory_source: str | None
    tokens_per_s_per_rank: float | None
    mfu: float | None
    peak_reserved_bytes: int | None
    num_parameters: int | None
    failed_gates: str | None
    update_causes: str | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    verdict: str | None
    verdict_reason: str | None
    caveats: str
    citation: str
    values: Mapping[str, Value]
    """Of every column, by name."""

    @property
    def cell_id(self) -> str:
        return self.cell.cell_id

    @property
    def backend(self) -> str:
        return self.cell.backend

    @classmethod
    def of(cls, cell: Cell, values: RowValues) -> CellRow:
        """The row of a cell from the values of the frame."""
        return cls(
            cell=cell,
            label=required_text(values, "label"),
            status=required_text(values, "status"),
            reason=required_text(values, "reason"),
            outcome=required_text(values, "outcome"),
            num_ok=required_count(values, "num_ok"),
            num_trials=required_count(values, "num_trials"),
            step_time_s=number_in(values, "step_time_s"),
            step_time_low_s=number_in(values, "step_time_low_s"),
            step_time_high_s=number_in(values, "step_time_high_s"),
            tokens_per_s=number_in(values, "tokens_per_s"),
            peak_memory_bytes=count_in(values, "peak_memory_bytes"),
            peak_memory_source=text_in(values, "peak_memory_source"),
            tokens_per_s_per_rank=number_in(values, "tokens_per_s_per_rank"),
            mfu=number_in(values, "mfu"),
            peak_reserved_bytes=count_in(values, "peak_reserved_bytes"),
            num_parameters=count_in(values, "num_parameters"),
            failed_gates=text_in(values, "failed_gates"),
            update_causes=text_in(values, "update_causes"),
            ratio=number_in(values, "ratio"),
            ratio_low=number_in(values, "ratio_low"),
            ratio_high=number_in(values, "ratio_high"),
            verdict=text_in(values, "verdict"),
            verdict_reason=text_in(values, "verdict_reason"),
            caveats=required_text(values, "caveats"),
            citation=required_text(values, "citation"),
            values=values,
        )


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What is said of a run or a pool: ratios and times of all its runs, the rest of the first."""

    run: Run
    others: tuple[Run, ...] = ()
    """The other runs of the pool."""
    folder: Path = Path()
    """Where the run is."""

    @classmethod
    def of(cls, pool: Pool, folder: Path) -> Analysis:
        """Of a pool whose first run is in the folder."""
        return cls(run=pool.first, others=pool.runs[1:], folder=folder)

    @cached_property
    def pool(self) -> Pool:
        return Pool(runs=(self.run, *self.others))

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
        return control_of(self.pool)

    @cached_property
    def _against(self) -> dict[str, dict[str, ComparedPair]]:
        return {}

    def against(self, baseline: str) -> Mapping[str, ComparedPair]:
        """The verdicts against a backend, by the id of the cell that is compared.

        They depend on the ratio of the A/A pair. Holm's correction counts the comparisons with one
        baseline, not the baselines that could have been chosen.
        """
        if baseline not in self._against:
            pairs = pairs_with_baseline(self.pool, baseline)
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
        """A cell against another one, as shown everywhere; None if no report compares the two."""
        found = self.against(self.run.cells[other_id].backend).get(cell_id)
        if found is None or found.a.cell_id != other_id:
            return None
        return found

    def ratio(self, cell_id: str, other_id: str) -> ComparedPair:
        """A cell against any other one.

        No report compares cells that differ otherwise than in the backend (in N, for example):
        Holm's correction then covers the run's own comparisons and this one. Raises InputError if
        the two are one.
        """
        cell, other = self.run.cells[cell_id], self.run.cells[other_id]
        if cell_id == other_id:
            raise InputError(
                f"{self.run.labels[cell_id]}: is given twice; give two different cells, or one"
            )
        if found := self.compared(cell_id, other_id):
            return found
        pairs = [*pairs_with_baseline(self.pool, self.baseline), Pair(a=other, b=cell)]
        return self._judged(pairs)[-1]

    def _judged(self, pairs: Sequence[Pair]) -> list[ComparedPair]:
        measured = None
        if self.control is not None:
            measured = self.control.time
        return judge_pairs(self.pool, self.pool, pairs, control=measured)

    @cached_property
    def payloads(self) -> Mapping[str, int]:
        """Bytes that a rank of a cell hands to collectives in a step, by id; most of all repeats.

        Only of cells of which collectives were counted and no gate found something wrong.
        """
        handed = Counter[tuple[str, int]]()
        for row in self.run.tables.collective_rows:
            handed[row.cell_id, row.repeat] += row.payload_bytes
        found: dict[str, int] = {}
        for (cell_id, _), payload in handed.items():
            if not self.run.evidence.of(self.run.cells[cell_id]).is_wrong:
                found[cell_id] = max(payload, found.get(cell_id, 0))
        return found

    def not_slower(self, ids: Iterable[str], best: str) -> list[str]:
        """The cells, beside the one with the shortest step time, that are not called slower."""
        found: list[str] = []
        for cell_id in ids:
            if cell_id == best:
                continue
            pair = self.compared(cell_id, best)
            if pair is None or pair.verdict is not Verdict.SLOWER:
                found.append(cell_id)
        return found

    @cached_property
    def findings(self) -> list[Finding]:
        """What limits the numbers of the run."""
        return limits(self.pool, self.control, self.verdicts, self._doubts)

    def caveats(self, *ids: str) -> list[str]:
        """The caveats of the numbers of one cell, or of one against another."""
        baseline_first = reversed(ids)
        cells = [(self.run.manifest, self.run.cells[cell_id]) for cell_id in baseline_first]
        return [*caveats(self.findings, *ids), *ways_of_bf16(cells)]

    @property
    def remarks(self) -> list[str]:
        """What stands beside all numbers."""
        return self.suspicion + self.doubts + self.remarks_on_cells

    @cached_property
    def suspicion(self) -> list[str]:
        """That all times are suspect, if the A/A pair is off."""
        if self.control is None or self.control.time is None:
            return []
        return suspect(self.control.a, self.control.time)

    @property
    def doubts(self) -> list[str]:
        """Verdicts that are other ones beside the copy of the A/A pair."""
        return [found.text for found in self._doubts]

    @cached_property
    def _doubts(self) -> list[Finding]:
        return list(against_the_copy(self.pool, self.control, self.verdicts))

    @cached_property
    def remarks_on_cells(self) -> list[str]:
        return remarks(
            (self.run.manifest, cell) for cell in self.run.cells.values() if not cell.twin
        )

    @cached_property
    def times_unavailable(self) -> Finding | None:
        """What keeps all times from being compared."""
        return times_unavailable(self.run, self.verdicts, self.folder)

    @property
    def hides_times(self) -> bool:
        """Whether no figure may show times.

        Of a single backend there is nothing to compare, and its times are good.
        """
        return self.times_unavailable is not None and any(not row.b.twin for row in self.verdicts)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The frame of cells: what may be said of each, its ratio, and facts of its trials."""
        rows = pd.DataFrame([self._row(cell_id) for cell_id in self.run.cells])
        trials = self.run.tables.trials
        found = rows.set_index("cell_id", drop=False).join(_over_trials(trials))
        # A cell whose step time may not be cited shows no times at all.
        found.loc[found["step_time_s"].isna(), ["fastest_s", "slowest_s"]] = None
        tokens = trials["tokens_per_s"] * trials["step_time_s"]
        tokens = tokens.groupby(trials["cell_id"]).first().round()
        found["tokens_per_s"] = tokens / found["step_time_s"].astype("Float64")
        found["tokens_per_s_per_rank"] = found["tokens_per_s"] / found["world_size"]
        memory = self.run.tables.memory
        reserved = memory[memory["category"] == RESERVED].groupby("cell_id")["bytes"].max()
        found["peak_reserved_bytes"] = reserved.reindex(found.index)
        found.loc[found["peak_memory_bytes"].isna(), "peak_reserved_bytes"] = None
        return frame_of("cells", found.reset_index(drop=True))

    def _row(self, cell_id: str) -> dict[str, object]:
        """The columns of a cell that do not come from its trials' columns.

        A cell is ``ok`` if all its trials are. One with good and failed trials is shown with its
        failure and with the number of its good trials, of which its numbers are.
        """
        cell, pair = self.run.cells[cell_id], self.pairs.get(cell_id)
        evidence = self.run.evidence.of(cell)
        row: dict[str, object] = {
            "cell_id": cell_id,
            "label": self.run.labels[cell_id],
            "status": evidence.status,
            "reason": evidence.reason,
            "outcome": evidence.outcome,
            "comparable": not self.is_barred(cell) and evidence.num_ok > 0,
            "num_ok": evidence.num_ok,
            "num_trials": evidence.num_trials,
            "step_time_s": None,
            "step_time_low_s": None,
            "step_time_high_s": None,
            "peak_memory_bytes": None,
            "peak_memory_source": None,
            "caveats": "; ".join(self.caveats(cell_id)),
            "citation": permanent_id(self.pool, cell_id),
        }
        if (time := self._step_time(cell)) is not None:
            row["step_time_s"] = time.seconds
            row["step_time_low_s"] = time.low
            row["step_time_high_s"] = time.high
        if evidence.num_ok and not evidence.is_wrong:  # a busy machine takes time, and no memory
            row["peak_memory_bytes"] = evidence.peak_memory_bytes
            row["peak_memory_source"] = min(evidence.peak_memory_sources, default=None)
        if pair is None:
            return row
        if pair.time is not None:
            row["ratio"] = pair.time.ratio
            row["ratio_low"] = pair.time.low
            row["ratio_high"] = pair.time.high
        row["baseline"] = pair.a.backend
        row["verdict"] = str(pair.verdict)
        row["verdict_reason"] = str(pair.reason)
        return row

    def is_barred(self, cell: Cell) -> bool:
        """Whether a run of the pool says that no time of the cell may be cited."""
        return any(
            run.evidence.of(cell).barred for run in self.pool.runs if cell.cell_id in run.cells
        )

    def _step_time(self, cell: Cell) -> Estimate | None:
        """The step time of a cell over all runs; None if one of them has none that may be cited."""
        if self.is_barred(cell) or not self.pool.has(cell):
            return None
        runs = [run.evidence.of(cell).sample.trials for run in self.pool.runs]
        if not all(runs):
            return None
        if self.pool.is_single:
            return estimate(runs[0])
        return estimate_over_runs(runs)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """``frame`` by ``cell_id``, without A/A twins, which only serve to check the instrument."""
        found = self.frame.set_index("cell_id", drop=False).rename_axis(None)
        return found[found["twin"].fillna("") == ""]

    @cached_property
    def every_row(self) -> dict[str, CellRow]:
        """The rows of ``frame``, by id."""
        found: dict[str, CellRow] = {}
        for cell, values in zip(self.run.cells.values(), rows_of(self.frame), strict=True):
            found[cell.cell_id] = CellRow.of(cell, values)
        return found

    @cached_property
    def rows(self) -> dict[str, CellRow]:
        """The same of ``cells``."""
        return {cell_id: self.every_row[cell_id] for cell_id in self.cells.index}

    @property
    def contestants(self) -> pd.DataFrame:
        """The rows of all but the reference; all if there is nothing else."""
        found = self.cells[~self.cells["backend"].isin(REFERENCES)]
        if found.empty:
            return self.cells
        return found

    @property
    def bad_rows(self) -> list[CellRow]:
        """The rows of cells without a valid result."""
        return [row for row in self.rows.values() if row.status != Status.OK]


def defect_of_cell(manifest: Manifest, row: CellRow) -> str:
    """The documented defect of the backend, if it alone makes the cell invalid; empty otherwise."""
    return known_defect(manifest, row.backend, row.status, row.failed_gates, row.update_causes)


def _over_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """The columns that cells have from their trials, by cell_id."""
    names: dict[Over, list[str]] = defaultdict(list)
    for name, column in COLUMNS["trials"].items():
        if column.aggregation is not None:
            names[column.aggregation].append(name)
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
    """The frames of one run, as attributes and by name.

    ``bench.judge.columns.COLUMNS`` has their columns, dtypes and units. ``manifest`` is run.json.
    Frames are built from the journal, not from the parquet files, and judged by the gates.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.run_id = run.name
        self._analysis = Analysis(run=run, folder=folder)
        self.manifest = run.manifest.to_dict()
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

    @property
    def rows(self) -> Sequence[CellRow]:
        """The rows of ``cells``, typed."""
        return list(self._analysis.every_row.values())


def read(folder: str | Path) -> Frames:
    """The frames of a run's folder.

    Raises InputError if it is no run, or its journal was truncated or edited.
    """
    path = Path(folder)
    return Frames(load(path), path)
