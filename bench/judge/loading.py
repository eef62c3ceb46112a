"""Loads a run's folder for the analyses, and reports a broken one in one line."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.errors import InputError
from bench.judge import gates, tables
from bench.judge.evidence import EvidenceByCell
from bench.judge.expected import layouts_of
from bench.judge.tables import Tables
from bench.plan import columns
from bench.plan.cell import Cell
from bench.plan.matrix import check_stored
from bench.plan.schedule import Schedule
from bench.run.journal import MANIFEST, Journal, read_manifest
from bench.run.trial_record import check


def load(folder: Path) -> Run:
    """Load a run, judged by the gates. Raises InputError if it is no run, or its journal was truncated or edited.

    The manifest of a run that is not finished has the hash of its journal, too.
    """
    run, _ = read(folder)
    return replace(run, manifest={"journal_sha256": Journal(folder).digest(), **run.manifest})


def read(folder: Path) -> tuple[Run, list[dict[str, Any]]]:
    """Like ``load``, together with the records of the journal."""
    manifest = read_manifest(folder)
    if lacking := [name for name in ("run_id", "matrix", "cells", "backends") if name not in manifest]:
        raise InputError(f"{folder / MANIFEST}: has no key '{lacking[0]}'; restore it")
    journal = Journal(folder)
    records = journal.read()
    if not records:
        raise InputError(f"{journal.path}: holds no trial; go on with: python -m bench run --resume {folder}")
    if "finished" in manifest and journal.is_torn():
        raise InputError(f"{journal.path}: is truncated: the run is finished and the last line is not; restore it")
    check(records, journal.path)
    check_stored(manifest, str(folder / MANIFEST))
    known: dict[str, Any] = {}
    for number, record in enumerate(records, start=1):
        cell_id, content = record["cell_id"], record["cell"]
        if known.get(cell_id) != content and Cell.from_dict(content).cell_id != cell_id:
            raise InputError(f"{journal.path}: trial {number} was edited: its cell is not what its cell_id is made of")
        known[cell_id] = content
    try:
        found = run_of(records, manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{journal.path}: was edited: its trials make no table ({_said(error)})") from error
    try:
        missing_trials(found)
    except (KeyError, TypeError, ValueError) as error:
        place = folder / MANIFEST
        raise InputError(
            f"{place}: was edited: its matrix and cells are not those of a run ({_said(error)})"
        ) from error
    return found, records


def _said(error: Exception) -> str:
    return f"no key {error}" if isinstance(error, KeyError) else str(error)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The data of a run that comparisons need."""

    name: str
    tables: Tables
    """Judged by the gates."""
    cells: Mapping[str, Cell]
    """Cells with at least one trial, by id."""
    manifest: Mapping[str, Any]

    @functools.cached_property
    def labels(self) -> Mapping[str, str]:
        """A label for each cell, by id, unique within the run."""
        named = columns.labels(self.cells.values())
        return {cell_id: named[cell] for cell_id, cell in self.cells.items()}

    @functools.cached_property
    def evidence(self) -> EvidenceByCell:
        """The sides of comparisons within the run, shared by verdicts, A/A pair and citations."""
        return EvidenceByCell(self.tables)


def missing_trials(run: Run) -> int:
    """Number of scheduled trials without a row in the table; interrupted trials have one."""
    pairs = set(zip(run.tables.trials["cell_id"], run.tables.trials["repeat"], strict=True))
    scheduled = Counter(trial.cell.cell_id for trial in Schedule(run.manifest).trials())
    return (scheduled - Counter(cell_id for cell_id, _ in pairs)).total()


def run_of(records: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> Run:
    """The run in its current state, judged by the gates. Edited records raise KeyError, TypeError or ValueError."""
    rows = [dict(record) for record in records]
    peaks = (manifest.get("predicted") or {}).get("peak_bytes")
    judged = gates.judge(tables.build(rows, dict(manifest)), layouts_of(rows), peaks)
    contents = {record["cell_id"]: record["cell"] for record in records}
    cells = {cell_id: Cell.from_dict(content) for cell_id, content in contents.items()}
    return Run(name=str(manifest["run_id"]), tables=judged, cells=cells, manifest=manifest)
