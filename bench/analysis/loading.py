"""A run's folder as what the analyses need, with every way in which it can be broken said in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.analysis import compare
from bench.analysis.baseline import run_of
from bench.analysis.compare import Run
from bench.cell import Cell
from bench.errors import InputError
from bench.journal import MANIFEST, Journal, read_manifest
from bench.matrix import check_stored
from bench.record import check


def load(folder: Path) -> Run:
    """A run's judged tables. Raises InputError for what is no run, or a journal that was truncated or edited."""
    return read(folder)[0]


def read(folder: Path) -> tuple[Run, list[dict[str, Any]]]:
    """As ``load``, with the journal's records that the tables are made of."""
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
    for number, record in enumerate(records, start=1):
        try:
            right = Cell.from_dict(record["cell"]).cell_id == record["cell_id"]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{journal.path}: trial {number} is no record of a trial ({_said(error)})") from error
        if not right:
            raise InputError(f"{journal.path}: trial {number} was edited: its cell is not what its cell_id is made of")
    try:
        found = run_of(records, manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{journal.path}: was edited: its trials make no table ({_said(error)})") from error
    try:
        compare.missing_trials(found)
    except (KeyError, TypeError, ValueError) as error:
        place = folder / MANIFEST
        raise InputError(
            f"{place}: was edited: its matrix and cells are not those of a run ({_said(error)})"
        ) from error
    return found, records


def hashed(run: Run, folder: Path) -> Run:
    """The run with its journal's SHA-256 in the manifest, where it ended before that was stored."""
    if run.manifest.get("journal_sha256"):
        return run
    return replace(run, manifest={**run.manifest, "journal_sha256": Journal(folder).digest()})


def _said(error: Exception) -> str:
    return f"no key {error}" if isinstance(error, KeyError) else str(error)
