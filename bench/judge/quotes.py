"""What may be said of one cell of a run, or of one against another: numbers with their caveats, or why there are none.

A caveat is one sentence without its full stop. It comes from run.json and the verdicts, so no backend is imported.
"""

from __future__ import annotations

import difflib
import urllib.parse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from bench.errors import InputError
from bench.judge.baseline import AgainstBaseline, Control, against_baselines, control_of, pairs_with_baseline, widened
from bench.judge.caveats import link_words, remarks, transfer
from bench.judge.loading import Run
from bench.judge.pairs import ComparedPair, Pair, judge_pairs
from bench.judge.samples import Estimate, estimate
from bench.judge.tables import rows_of
from bench.plan.cell import Cell, Device, Status

SCHEME = "accumulation-bench"
"""Prefix of the ids by which numbers are cited."""
ENDS = ["cell_id", "status", "reason", "peak_memory_bytes", "peak_memory_source"]
"""Columns of trials in which the trials of a cell may differ, and of which a quote speaks."""
CHOICES = 6
"""Most cells that a message lists to choose from."""


def place_of(run_id: str, name: str) -> str:
    """The id by which a part of a run is cited: ``accumulation-bench:RUN/NAME``."""
    return f"{SCHEME}:{quoted(run_id)}/{name}"


def quoted(name: str) -> str:
    """A name as part of an id: letters, digits, ``-``, ``.`` and ``_`` stay, the rest is percent-encoded."""
    return urllib.parse.quote(name, safe="").replace("~", "%7E")


@dataclass(frozen=True, kw_only=True, slots=True)
class CellQuote:
    """What may be said of one cell."""

    cell: Cell
    time: Estimate | None
    """From its good trials; None if no time may be cited."""
    barred: str
    """Why the cell is not comparable; empty if it is."""
    num_ok: int
    num_trials: int
    peak_memory_bytes: int | None
    """The largest among its good trials."""
    peak_memory_source: str
    caveats: tuple[str, ...]
    """What must be said with the numbers, or instead of them."""
    trial: Any
    """A row of the trials table, for the values that all trials of the cell share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioQuote:
    """What may be said of one cell against another."""

    cell: Cell
    other: Cell
    """The baseline: a ratio above 1 says that the cell takes longer."""
    row: ComparedPair
    caveats: tuple[str, ...]
    trial: Any


class Quotes:
    """The quotes of one run. What several of them need is calculated once, or taken from ``against_baselines``."""

    def __init__(self, run: Run, against_baselines: Mapping[str, AgainstBaseline] | None = None) -> None:
        self.run = run
        trials = run.tables.trials
        self._shared = {row["cell_id"]: row for row in rows_of(trials.drop_duplicates("cell_id"))}
        self._trials: dict[str, list[Any]] = {}
        for row in rows_of(trials[ENDS]):
            self._trials.setdefault(row["cell_id"], []).append(row)
        self._against_baselines = dict(against_baselines or {})

    def cell(self, cell_id: str) -> CellQuote:
        """What may be said of a cell. Raises InputError if the run has none of that id."""
        cell, trials = self._known(cell_id), self._trials[cell_id]
        sound = [row for row in trials if row["status"] == Status.OK]
        found = self.run.evidence.of(cell)
        caveats = [*_failed(trials), *self._caveats(cell), *remarks([(self.run.manifest, cell)]), *self._of_run()]
        # A cell of a world that is timed has failed a gate if it has no time.
        barred = "" if not cell.world.is_timed else "; ".join(found.obstacles)
        medians = () if barred or not sound else tuple(found.sample.trials)
        wrong = barred and found.failed_gates  # a busy machine takes time, and no memory
        peaks = [] if wrong else [row["peak_memory_bytes"] for row in sound if pd.notna(row["peak_memory_bytes"])]
        sources = [row["peak_memory_source"] for row in sound if pd.notna(row["peak_memory_source"])]
        return CellQuote(
            cell=cell,
            time=estimate(medians) if medians else None,
            barred=barred,
            num_ok=len(medians) if medians else len(sound),
            num_trials=len(trials),
            peak_memory_bytes=max(peaks, default=None),
            peak_memory_source=sources[0] if peaks else "",
            caveats=(*([f"not comparable: {barred}"] if barred else []), *caveats),
            trial=self._shared[cell_id],
        )

    def ratio(self, cell_id: str, other_id: str) -> RatioQuote:
        """What may be said of a cell against another. Raises InputError if the run lacks one of them.

        The verdict is that of the run's report with the other's backend as the baseline. No report compares cells that
        differ otherwise (in N, for example): Holm's correction then covers the run's own comparisons and this one.
        """
        cell, other = self._known(cell_id), self._known(other_id)
        if cell_id == other_id:
            raise InputError(f"{self.run.labels[cell_id]}: is given twice; give two different cells, or one")
        row = self._row(cell, other)
        said = remarks((self.run.manifest, one) for one in (other, cell))
        caveats = [*self._caveats(cell, other), *said, *self._of_run()]
        for one_id in (cell_id, other_id):
            caveats += [f"{self.run.labels[one_id]}: {text}" for text in _failed(self._trials[one_id])]
        if row.judgement.comparison.blocked is not None:
            caveats.insert(0, f"{row.judgement.reason}: {row.judgement.detail}")
        control = self.control
        if control is None or control.interval is None or control.interval.low is None:
            caveats.append("the run has no A/A pair" if control is None else f"A/A pair: {control.reason}")
        else:
            caveats += widened(control.cell, control.interval)
        return RatioQuote(
            cell=cell,
            other=other,
            row=row,
            caveats=tuple(dict.fromkeys(caveats)),
            trial=self._shared[cell_id],
        )

    def trials(self, cell_id: str) -> Sequence[Any]:
        """The rows of a cell in the trials table, of which each has ENDS."""
        return self._trials[cell_id]

    @cached_property
    def control(self) -> Control | None:
        """The run's A/A pair."""
        return control_of(self.run)

    def _known(self, cell_id: str) -> Cell:
        if cell_id not in self.run.cells:
            raise InputError(f"{cell_id}: is not a cell of the run {self.run.name}")
        return self.run.cells[cell_id]

    def _row(self, cell: Cell, other: Cell) -> ComparedPair:
        if other.backend not in self._against_baselines:
            self._against_baselines |= against_baselines(self.run, [other.backend])
        row = self._against_baselines[other.backend].by_cell.get(cell.cell_id)
        if row is not None and row.pair.a == other:
            return row
        pairs = [*pairs_with_baseline(self.run), Pair(a=other, b=cell, name=f"{cell.label} against {other.label}")]
        control = self.control
        return judge_pairs(self.run, self.run, pairs, control=None if control is None else control.interval)[-1]

    def _caveats(self, *cells: Cell) -> list[str]:
        """The caveat of the first of these cells whose world has one; of times on CPUs, the link and what it limits."""
        if found := [cell.world.caveat for cell in cells if cell.world.caveat]:
            return found[:1]
        if not any(cell.device is Device.CPU and cell.world_size > 1 for cell in cells):
            return []
        size = self._shared[cells[0].cell_id]["num_parameters"]
        return [link_words(cells), *([] if size is None else [transfer(size)])]

    def _of_run(self) -> list[str]:
        return [] if "finished" in self.run.manifest else ["the run has not finished, so the hash will change"]


def _failed(trials: Sequence[Any]) -> list[str]:
    """What must be said of trials that failed, by status and reason."""
    bad = [row for row in trials if row["status"] not in {Status.OK, Status.INVALID}]
    ends = Counter((row["status"], "" if pd.isna(row["reason"]) else row["reason"]) for row in bad)
    return [
        f"{count} of {len(trials)} trials ended {status}: {reason or 'no reason was recorded'}"
        for (status, reason), count in ends.items()
    ]


def find_cell(run: Run, text: str) -> Cell:
    """The cell that a whole id, a label or the beginning of an id names. Raises InputError if none or several do."""
    if text in run.cells:
        return run.cells[text]
    by_label = {label: cell_id for cell_id, label in run.labels.items()}
    if text in by_label:
        return run.cells[by_label[text]]
    named = [key for key, cell in run.cells.items() if cell.label == text or (text and key.startswith(text))]
    if len(named) == 1:
        return run.cells[named[0]]
    if named:
        raise InputError(f"CELL '{text}': {len(named)} cells have this label; use an id: {_choices(run, named)}")
    near = difflib.get_close_matches(text, [*by_label, *run.cells], n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"use one of {_choices(run, list(run.cells))}"
    raise InputError(f"CELL '{text}': is not in the run {run.name}; {hint}")


def _choices(run: Run, ids: Sequence[str]) -> str:
    """The first of these cells, and how many more there are."""
    said = ", ".join(f"{cell_id} ({run.labels[cell_id]})" for cell_id in ids[:CHOICES])
    return said + (f" and {len(ids) - CHOICES} more" if len(ids) > CHOICES else "")
