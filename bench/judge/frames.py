"""A run as pandas frames: the result of ``bench.load``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from bench.judge.analysis import Analysis
from bench.judge.loading import Run, load
from bench.judge.pairs import record
from bench.judge.tables import frame_of
from bench.plan.columns import FRAMES


class Frames(Mapping[str, pd.DataFrame]):
    """The frames of one run, as attributes and by name; columns, dtypes and units: ``bench.plan.columns.COLUMNS``.

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
        """One row per cell and baseline."""
        return frame_of("ratios", [record(row) for row in self._analysis.verdicts])

    @property
    def cells(self) -> pd.DataFrame:
        """One row per cell."""
        return self._analysis.frame


def read(folder: str | Path) -> Frames:
    """The frames of a run's folder. Raises InputError if it is no run, or its journal was truncated or edited."""
    path = Path(folder)
    return Frames(load(path), path)
