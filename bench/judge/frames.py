"""A run as pandas frames: the result of ``bench.load``, and the one frame of cells that all reports read.

A cell is ``ok`` if all its trials are. One with good and failed trials is shown with its failure and with the number of
its good trials, of which its numbers are: ``CellEvidence.outcome``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from bench.judge.baseline import AgainstBaseline, against_baseline
from bench.judge.loading import Run, load
from bench.judge.pairs import ComparedPair, record
from bench.judge.quotes import Quotes, place_of
from bench.judge.tables import frame_of, good_trials
from bench.plan.cell import Status
from bench.plan.column import Over
from bench.plan.columns import COLUMNS, FRAMES


class Frames(Mapping[str, pd.DataFrame]):
    """The frames of one run, as attributes and by name; columns, dtypes and units: ``bench.plan.columns.COLUMNS``.

    ``manifest`` is run.json. Frames are built from the journal, not from the parquet files, and judged by the gates.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.run_id = run.name
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
        """One row per cell and baseline."""
        return frame_of("ratios", [record(row) for row in self._against_baseline.rows])

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per cell."""
        return cells_frame(Quotes(self.run), self._against_baseline)

    @cached_property
    def _against_baseline(self) -> AgainstBaseline:
        return against_baseline(self.run)


def read(folder: str | Path) -> Frames:
    """The frames of a run's folder. Raises InputError if it is no run, or its journal was truncated or edited."""
    path = Path(folder)
    return Frames(load(path), path)


def cells_frame(quotes: Quotes, against: AgainstBaseline) -> pd.DataFrame:
    """The frame: what may be said of each cell, its ratio to the baseline of ``against``, and facts of its trials."""
    run, trials = quotes.run, quotes.run.tables.trials
    rows = pd.DataFrame([_row(quotes, cell_id, against.by_cell.get(cell_id)) for cell_id in run.cells])
    found = rows.set_index("cell_id", drop=False).join(_over_trials(trials))
    # A cell whose step time may not be cited shows no times at all.
    found.loc[found["step_time_s"].isna(), ["fastest_s", "slowest_s"]] = None
    tokens = (trials["tokens_per_s"] * trials["step_time_s"]).groupby(trials["cell_id"]).first().round()
    found["tokens_per_s"] = tokens / found["step_time_s"].astype("Float64")
    return frame_of("cells", found.reset_index(drop=True))


def _over_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """The columns that cells have from their trials, by cell_id."""
    names = {over: [name for name, column in COLUMNS["trials"].items() if column.aggregation is over] for over in Over}
    every, good = trials.groupby("cell_id"), good_trials(trials).groupby("cell_id")
    sound = trials[trials["status"] == Status.OK].groupby("cell_id")["step_time_s"]
    others = 100 * (trials["foreign_cores"] + trials["stolen_cores"]) / trials["num_cpus"]
    return pd.concat(
        [
            every[names[Over.FIRST]].first(),
            good[names[Over.MEDIAN]].median(),
            every[names[Over.MAX]].max(),
            sound.min().rename("fastest_s"),
            sound.max().rename("slowest_s"),
            others.groupby(trials["cell_id"]).median().rename("others_percent"),
        ],
        axis=1,
    )


def _row(quotes: Quotes, cell_id: str, pair: ComparedPair | None) -> dict[str, Any]:
    quote, run = quotes.cell(cell_id), quotes.run
    side, time = run.evidence.of(quote.cell), quote.time
    row = {
        "cell_id": cell_id,
        "label": run.labels[cell_id],
        "status": side.status,
        "reason": side.reason,
        "outcome": side.outcome,
        "comparable": not quote.barred and side.num_ok > 0,
        "num_ok": side.num_ok,
        "num_trials": side.num_trials,
        "step_time_s": None if time is None else time.seconds,
        "step_time_low_s": None if time is None else time.low,
        "step_time_high_s": None if time is None else time.high,
        "peak_memory_bytes": quote.peak_memory_bytes,
        "peak_memory_source": quote.peak_memory_source or None,
        "caveats": "; ".join(quote.caveats),
        "citation": place_of(run.name, cell_id),
    }
    if pair is None:
        return row
    ratio = pair.time
    return row | {
        "baseline": pair.pair.a.backend,
        "ratio": None if ratio is None else ratio.ratio,
        "ratio_low": None if ratio is None else ratio.low,
        "ratio_high": None if ratio is None else ratio.high,
        "verdict": str(pair.judgement.verdict),
        "verdict_reason": str(pair.judgement.reason),
    }
