"""Checks a finished run from its raw samples: that it is complete and unchanged, and its limits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pandas as pd

from bench.errors import InputError
from bench.findings import Finding, error, good, warning
from bench.formatting import plural, some
from bench.judge.analysis import Analysis
from bench.judge.caveats import CONTROL, OTHER_DAYS, VERDICTS
from bench.judge.contradictions import contradictions
from bench.judge.loading import Run, missing_trials
from bench.judge.pool import Pool, folders_of, load_pool
from bench.judge.stored_tables import read_table
from bench.judge.tables import NAMES
from bench.plan.cell import Status
from bench.run.trial_record import MergedTimings, TrialRecord

TOLERANCE = 1e-9
"""Relative tolerance between a stored and a recomputed number."""
OF_A_POOL = (CONTROL, VERDICTS, OTHER_DAYS)
"""Topics on which several runs say more together than each by itself."""
PROSE = "reason"
"""A column that may be worded otherwise by another version; gates and causes have columns of their
own."""


def check(*places: Path) -> list[Finding]:
    """All findings on a run, or on each run of a pool and what they say together, by topic.

    Raises InputError if a folder holds no run, or the runs cannot be pooled.
    """
    return examine(load_pool(places), folders_of(places))


def examine(pool: Pool, folders: Sequence[Path]) -> list[Finding]:
    """The findings of ``check`` on runs that are loaded, each from its folder."""
    found: list[Finding] = []
    for title, folder, run in zip(pool.titles, folders, pool.runs, strict=True):
        of_run = [
            journal(run),
            *contradictions(run),
            *_tables(folder, run),
            *_trials(run),
            _order(run.records),
        ]
        of_run += Analysis(run=run, folder=folder).findings
        if pool.is_single:
            found += of_run
            continue
        for finding in of_run:
            if finding.topic != OTHER_DAYS:
                found.append(replace(finding, subject=f"{title}, {finding.subject}".rstrip(", ")))
    if not pool.is_single:
        for finding in Analysis.of(pool, folders[0]).findings:
            if finding.topic in OF_A_POOL:
                found.append(replace(finding, subject=f"{len(folders)} runs"))
    topics = list(dict.fromkeys(finding.topic for finding in found))
    return sorted(found, key=lambda finding: topics.index(finding.topic))


def journal(run: Run) -> Finding:
    """Whether the journal is unchanged.

    ``load`` has already checked every line, and every cell against its id.
    """
    stored = run.manifest.journal_sha256
    if stored is None:
        return warning(
            "journal",
            "its hash was not stored when the run ended, so later edits cannot be detected",
        )
    if stored != run.digest:
        return error(
            "journal", f"was changed after the run: its SHA-256 is {run.digest}, and was {stored}"
        )
    return good(
        "journal", f"{len(run.records)} records, all cells match their ids; SHA-256 {run.digest}"
    )


def _tables(folder: Path, run: Run) -> Iterator[Finding]:
    """Compares the tables on disk with those built from the journal."""
    topic, again = "tables", f"write it again with: python -m bench report {folder}"
    different = False
    for name in NAMES:
        path = folder / f"{name}.parquet"
        if not os.path.lexists(path):
            yield warning(topic, f"{path.name} is missing; {again}")
            continue
        recomputed = getattr(run.tables, name)
        try:
            stored = read_table(path, recomputed)
        except InputError as broken:
            different = True
            yield error(topic, f"{broken}; {again}")
            continue
        if missing := [column for column in recomputed if column not in stored.columns]:
            yield warning(topic, f"{path.name} has no column {', '.join(missing)}; {again}")
        for text in _differences(stored, recomputed):
            different = True
            yield error(topic, f"{path.name}: {text}; {again}")
    if not different:
        yield good(topic, "every number in them follows from the journal")


def _differences(stored: pd.DataFrame, recomputed: pd.DataFrame) -> Iterator[str]:
    """The differences between a stored and a recomputed table: at most one sentence per column."""
    if len(stored) != len(recomputed):
        yield f"{plural(len(stored), 'row')}, {len(recomputed)} follow from the journal"
        return
    for name in recomputed.columns:
        if name == PROSE or name not in stored.columns:
            continue
        ours, theirs = stored[name], recomputed[name]
        unlike = _unlike(ours, theirs)
        if unlike.any():
            row = int(unlike.to_numpy().argmax())
            yield f"{name} of row {row} is {ours[row]}, {theirs[row]} follows from the journal"


def _unlike(ours: pd.Series, theirs: pd.Series) -> pd.Series:
    """Which values of a stored and a recomputed column differ."""
    unlike = ours.isna() != theirs.isna()
    both = ours.notna() & theirs.notna()
    if not pd.api.types.is_float_dtype(theirs.dtype):
        return unlike | both & (ours.astype("string") != theirs.astype("string")).fillna(False)
    # NaN is a value (a loss that is not finite), NA is missing.
    a, b = ours[both].astype(float), theirs[both].astype(float)
    is_near = (a - b).abs() <= TOLERANCE * b.abs().clip(lower=1e-300)
    unlike.loc[a.index[~is_near & ~(a == b)]] = True
    return unlike


def _trials(run: Run) -> Iterator[Finding]:
    """Whether all trials are there, and their step times follow from those of the ranks."""
    topic, trials = "trials", run.tables.trials
    if missing := missing_trials(run):
        yield error(topic, f"{missing} that were scheduled are not in the journal")
    wrong: list[str] = []
    for record in run.records:
        if record.time is not None and not _follows(record.time):
            wrong.append(record.cell_id)
    if wrong:
        named = some([run.labels[cell_id] for cell_id in dict.fromkeys(wrong)])
        text = f"step times of {len(wrong)} do not follow from those of their ranks: {named}"
        yield error(topic, text)
    if not (missing or wrong):
        num_ok = int((trials["status"] == Status.OK).sum())
        yield good(topic, f"{num_ok} of {len(trials)} are ok; step times follow from the ranks'")


def _follows(timed: MergedTimings) -> bool:
    """Whether a record's step times are those of the slowest rank."""
    slowest = [max(step) for step in zip(*timed.rank_step_seconds, strict=False)]
    if len(slowest) != len(timed.step_seconds):
        return False
    for a, b in zip(slowest, timed.step_seconds, strict=True):
        if not math.isclose(a, b, rel_tol=1e-6, abs_tol=2e-9):
            return False
    return True


def _order(records: Sequence[TrialRecord]) -> Finding:
    """Whether the trials of different cells are interleaved."""
    ids: list[str] = []
    repeats: set[int] = set()
    for record in records:
        repeats.add(record.repeat)
        if not record.cell.is_reference:
            ids.append(record.cell_id)
    rows = sum(a == b for a, b in pairwise(ids))
    blocks = len(repeats)
    # A reversed block starts with the cell that the previous block ended with.
    if rows > blocks and len(set(ids)) > 1:
        return warning(
            "order",
            f"{plural(rows, 'trial')} followed one of the same cell, more than the blocks explain",
        )
    return good("order", f"{plural(blocks, 'block')}, each in its own order")
