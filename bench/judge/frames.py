"""A run as pandas frames, for notebooks: the result of ``bench.load``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from bench.judge.loading import Run, hashed, load
from bench.judge.pairs import record
from bench.judge.quoting import Quotes, place_of
from bench.judge.samples import tokens_per_step
from bench.judge.standing import Standing, standing
from bench.judge.tables import frame_of
from bench.plan.cell import Status
from bench.plan.columns import COLUMNS, FRAMES


class Frames(Mapping[str, pd.DataFrame]):
    """The frames of one run, as attributes and by name; columns, dtypes and units: ``bench.plan.columns.COLUMNS``.

    ``manifest`` is run.json. Frames are built from the journal, not from the parquet files, and judged by the gates.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.run_id = run.name
        self.manifest: Mapping[str, Any] = run.manifest
        self.trials = run.tables.trials
        """One row per trial."""
        self.steps = run.tables.steps
        """One row per trial and timed optimizer step."""
        self.losses = run.tables.losses
        """One row per trial and optimizer step."""
        self.collectives = run.tables.collectives
        """One row per trial, operation and dtype."""
        self.memory = run.tables.memory
        """One row per trial and category."""

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
        return frame_of("ratios", [record(row) for row in self._standing.rows])

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per cell."""
        return cells_frame(Quotes(self.run), self._standing)

    @cached_property
    def _standing(self) -> Standing:
        return standing(self.run)


def read(folder: str | Path) -> Frames:
    """The frames of a run's folder. Raises InputError if it is no run, or its journal was truncated or edited."""
    path = Path(folder)
    return Frames(hashed(load(path), path), path)


def cells_frame(quotes: Quotes, against: Standing) -> pd.DataFrame:
    """One row per cell: its quotable numbers, and its ratio to the baseline of ``against``."""
    rows, tokens = against.by_cell, tokens_per_step(quotes.run.tables.trials)
    cells = quotes.run.cells
    return frame_of("cells", [_cell_row(quotes, cell_id, rows.get(cell_id), tokens[cell_id]) for cell_id in cells])


def _cell_row(quotes: Quotes, cell_id: str, row: Any, tokens: Any) -> dict[str, Any]:
    quote = quotes.cell(cell_id)
    first = next((trial for trial in quotes.trials(cell_id) if trial["status"] != Status.OK), quote.trial)
    time, ratio = quote.time, None if row is None else row.time
    values = {name: quote.trial[name] for name in COLUMNS["cells"] if name in quote.trial}
    values |= {
        "label": quotes.run.labels[cell_id],
        "status": first["status"],
        "reason": first["reason"],
        "comparable": not quote.barred and quote.num_ok > 0,
        "num_ok": quote.num_ok,
        "num_trials": quote.num_trials,
        "step_time_s": None if time is None else time.seconds,
        "step_time_low_s": None if time is None else time.low,
        "step_time_high_s": None if time is None else time.high,
        "tokens_per_s": None if time is None else tokens / time.seconds,
        "peak_memory_bytes": quote.peak_memory_bytes,
        "peak_memory_source": quote.peak_memory_source or None,
        "caveats": "; ".join(quote.caveats),
        "citation": place_of(quotes.run.name, cell_id),
    }
    if row is not None:
        values |= {
            "baseline": row.pair.a.backend,
            "ratio": None if ratio is None else ratio.ratio,
            "ratio_low": None if ratio is None else ratio.low,
            "ratio_high": None if ratio is None else ratio.high,
            "verdict": str(row.judgement.verdict),
            "verdict_reason": str(row.judgement.reason),
        }
    return values
