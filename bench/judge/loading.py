"""Loads a run's folder for the analyses, and reports a broken one in one line."""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.errors import InputError
from bench.judge import columns, gates, tables
from bench.judge.evidence import EvidenceByCell
from bench.judge.tables import Tables
from bench.plan.cell import Cell
from bench.run.journal import MANIFEST, Journal, read_manifest, run_sha256
from bench.run.manifest import Manifest
from bench.run.trial_record import TrialRecord, parse_records

CHOICES = 6
"""Most cells that a message lists to choose from."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The data of a run that comparisons need."""

    name: str
    tables: Tables
    """Judged by the gates."""
    cells: Mapping[str, Cell]
    """Cells with at least one trial, by id."""
    manifest: Manifest
    records: Sequence[TrialRecord] = ()
    """Of the journal, from which the tables are built."""
    digest: str = ""
    """SHA-256 of the journal as it is; the manifest has what it was when the run ended."""
    pin: str = ""
    """SHA-256 that pins run.json and the journal (``bench.run.journal.run_sha256``)."""

    @functools.cached_property
    def labels(self) -> Mapping[str, str]:
        """A label for each cell, by id, unique within the run."""
        named = columns.labels(self.cells.values())
        return {cell_id: named[cell] for cell_id, cell in self.cells.items()}

    @functools.cached_property
    def evidence(self) -> EvidenceByCell:
        """The sides of comparisons within the run, shared by verdicts, A/A pair and citations."""
        return EvidenceByCell(self.tables)

    def find(self, text: str) -> Cell:
        """The cell that an id, a label or the beginning of an id names.

        Raises InputError if none or several do.
        """
        by_label = {label: cell_id for cell_id, label in self.labels.items()}
        if found := self.cells.get(by_label.get(text, text)):
            return found
        named: list[str] = []
        for cell_id, cell in self.cells.items():
            if cell.label == text or (text and cell_id.startswith(text)):
                named.append(cell_id)
        if len(named) == 1:
            return self.cells[named[0]]
        if named:
            raise InputError(
                f"CELL '{text}': {len(named)} cells have this label; "
                f"use an id: {self._choices(named)}"
            )
        hint = f"use one of {self._choices(list(self.cells))}"
        if near := difflib.get_close_matches(text, [*by_label, *self.cells], n=1):
            hint = f"did you mean '{near[0]}'?"
        raise InputError(f"CELL '{text}': is not in the run {self.name}; {hint}")

    def _choices(self, ids: Sequence[str]) -> str:
        """The first of these cells, and how many more there are."""
        named = ", ".join(f"{cell_id} ({self.labels[cell_id]})" for cell_id in ids[:CHOICES])
        if len(ids) > CHOICES:
            named += f" and {len(ids) - CHOICES} more"
        return named


def load(folder: Path) -> Run:
    """Load a run, judged by the gates.

    Raises InputError if it is no run, or its journal was truncated or edited.
    """
    manifest = read_manifest(folder)
    journal = Journal(folder)
    lines = journal.read()
    if not lines:
        raise InputError(
            f"{journal.path}: holds no trial; go on with: python -m bench run --resume {folder}"
        )
    if manifest.finished is not None and journal.is_torn():
        raise InputError(
            f"{journal.path}: is truncated: the run is finished and the last line is not; "
            "restore it"
        )
    records = parse_records(lines, journal.path)
    known: dict[str, Cell] = {}
    for number, record in enumerate(records, start=1):
        cell = known.setdefault(record.cell_id, record.cell)
        if cell != record.cell or record.cell.cell_id != record.cell_id:
            raise InputError(
                f"{journal.path}: trial {number} was edited: "
                "its cell is not what its cell_id is made of"
            )
    with _edited(f"{journal.path}: was edited: its trials make no table"):
        unjudged = tables.build(records, manifest)
    try:
        found = _judged(unjudged, records, manifest)
    except (KeyError, TypeError, ValueError) as error:
        if manifest.journal_sha256 == journal.digest():
            raise  # nobody edited it: the judge is wrong
        raise InputError(
            f"{journal.path}: cannot be judged ({type(error).__name__}: {error}); restore it"
        ) from error
    with _edited(f"{folder / MANIFEST}: was edited: its matrix and cells are not those of a run"):
        missing_trials(found)
    return replace(found, digest=journal.digest(), pin=run_sha256(folder))


@contextmanager
def _edited(what: str) -> Iterator[None]:
    """Report in one line that something cannot be as it was written."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        why = str(error)
        if isinstance(error, KeyError):
            why = f"no key {error}"
        raise InputError(f"{what} ({why})") from error


def missing_trials(run: Run) -> int:
    """Number of scheduled trials without a row in the table; interrupted trials have one."""
    scheduled = Counter(trial.cell.cell_id for trial in run.manifest.schedule().trials())
    ran = Counter(row.cell.cell_id for row in run.tables.trial_rows)
    return (scheduled - ran).total()


def run_of(records: Sequence[TrialRecord], manifest: Manifest) -> Run:
    """The run in its current state, judged by the gates.

    Edited records raise KeyError, TypeError or ValueError.
    """
    return _judged(tables.build(records, manifest), records, manifest)


def _judged(unjudged: Tables, records: Sequence[TrialRecord], manifest: Manifest) -> Run:
    judged = gates.judge(unjudged, records, manifest.predicted.peak_bytes)
    cells = _in_order_of_matrix({record.cell_id: record.cell for record in records}, manifest)
    return Run(name=manifest.run_id, tables=judged, cells=cells, manifest=manifest, records=records)


def _in_order_of_matrix(recorded: Mapping[str, Cell], manifest: Manifest) -> dict[str, Cell]:
    """The recorded cells as the matrix has them, since the order of trials differs between runs."""
    planned = [cell.cell_id for cell in manifest.cells if cell.cell_id in recorded]
    return {cell_id: recorded[cell_id] for cell_id in dict.fromkeys([*planned, *recorded])}
