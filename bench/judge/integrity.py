"""A finished run audited from its raw samples: whether it is whole and unchanged, and what to know before citing it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from bench.judge import samples
from bench.judge.loading import Run, missing_trials, read
from bench.judge.sides import IDLE_SHARE
from bench.judge.standing import Standing, standing, widest
from bench.judge.statistics import MARGIN, MIN_TRIALS
from bench.judge.verdicts import Verdict, band
from bench.plan.cell import REFERENCES, Status
from bench.plan.schedule import Ended
from bench.run.journal import Journal
from bench.run.warmup import warmup
from bench.words import plural

TOLERANCE = 1e-9
"""Relative difference up to which a stored and a recomputed number are the same: floats written and read again."""
IMBALANCE = 1.05
"""Times the median rank's step time from which the slowest rank is named."""
NAMED = 3
"""Cells that are named where several have the same said of them."""


class Level(StrEnum):
    """How grave a finding is."""

    ERROR = "error"
    """The data is not what it says: do not cite it."""
    WARNING = "warning"
    """To be known, and said, by whoever cites it."""
    GOOD = "good"
    """Looked at, and as it should be."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    topic: str
    text: str


def check(folder: Path) -> list[Finding]:
    """Everything that was looked at in a run, in order. Raises InputError if the folder holds no run."""
    run, records = read(folder)
    found = [
        *journal_findings(folder, run, len(records)),
        *_tables(folder, run),
        *_trials(run, records),
        *_order(records),
        *_starts(run, records),
        *_surroundings(run),
        *_samples(run, records),
        *_gates(run),
        *_verdicts(run, standing(run)),
    ]
    topics = dict.fromkeys(one.topic for one in found)
    return [one for topic in topics for one in found if one.topic == topic]


def journal_findings(folder: Path, run: Run, num_records: int) -> Iterator[Finding]:
    """Schema and hashes: ``load`` has read every line and compared every cell with its id."""
    topic = "journal"
    digest = Journal(folder).digest()
    noted = run.manifest.get("journal_sha256")
    if noted is None:
        yield Finding(Level.WARNING, topic, "its hash was not stored when the run ended, so later edits cannot be seen")
    elif noted != digest:
        yield Finding(Level.ERROR, topic, f"was changed after the run: its SHA-256 is {digest}, and was {noted}")
    else:
        yield Finding(Level.GOOD, topic, f"{num_records} records, all cells match their ids; SHA-256 {digest}")


def _tables(folder: Path, run: Run) -> Iterator[Finding]:
    """The tables on disk against those that follow from the journal."""
    topic = "tables"
    different = 0
    for field in fields(run.tables):
        path = folder / f"{field.name}.parquet"
        if not path.exists():
            yield Finding(
                Level.WARNING, topic, f"{path.name} is missing; write it with: python -m bench report {folder}"
            )
            continue
        stored, recomputed = pd.read_parquet(path), getattr(run.tables, field.name)
        # A later column of which the journal knows nothing is not missed.
        values = recomputed.columns[recomputed.notna().any()]
        if missing := [name for name in values if name not in stored.columns]:
            text = f"{path.name} has no column {', '.join(missing)}, as those of an earlier version of the bench"
            yield Finding(Level.WARNING, topic, f"{text}; write it again with: python -m bench report {folder}")
        for text in _differences(stored, recomputed):
            different += 1
            yield Finding(
                Level.ERROR, topic, f"{path.name}: {text}; write it again with: python -m bench report {folder}"
            )
    if not different:
        yield Finding(Level.GOOD, topic, "every number in them follows from the journal")


def _differences(stored: pd.DataFrame, recomputed: pd.DataFrame) -> Iterator[str]:
    """In words, how a stored table is not the recomputed one: at most one sentence per column that it has."""
    if len(stored) != len(recomputed):
        yield f"{plural(len(stored), 'row')}, {len(recomputed)} follow from the journal"
        return
    for name in (name for name in recomputed.columns if name in stored.columns):
        ours, theirs = stored[name], recomputed[name]
        unlike = ours.isna() != theirs.isna()
        both = ours.notna() & theirs.notna()
        if pd.api.types.is_float_dtype(theirs.dtype):
            # NaN is a value here (a loss that is not finite), NA is none.
            a, b = (column[both].astype(float) for column in (ours, theirs))
            unlike.loc[a.index[~((a - b).abs() <= TOLERANCE * b.abs().clip(lower=1e-300)) & ~(a == b)]] = True
        else:
            unlike |= both & (ours.astype("string") != theirs.astype("string")).fillna(False)
        if unlike.any():
            row = int(unlike.to_numpy().argmax())
            yield f"{name} of row {row} is {ours[row]}, {theirs[row]} follows from the journal"


def _trials(run: Run, records: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether every trial that was due is there, and its numbers follow from what the ranks handed back."""
    topic = "trials"
    if "finished" not in run.manifest:
        yield Finding(Level.WARNING, topic, "the run has not ended: go on with run --resume")
    if missing := missing_trials(run):
        yield Finding(Level.ERROR, topic, f"{missing} that were due are not in the journal")
    trials = run.tables.trials
    bad = trials[~trials["status"].isin([Status.OK, Status.INVALID, Status.UNSUPPORTED])]
    for status, rows in bad.groupby("status"):
        yield Finding(Level.WARNING, topic, f"{len(rows)} ended {status}: {_cells(run, rows['cell_id'])}")
    wrong = [record for record in records if record.get("time") and not _follows(record["time"])]
    if wrong:
        named = _cells(run, pd.Series([record["cell_id"] for record in wrong]))
        yield Finding(
            Level.ERROR, topic, f"step times of {len(wrong)} do not follow from those of their ranks: {named}"
        )
    if not (missing or wrong):
        good = int((trials["status"] == Status.OK).sum())
        yield Finding(
            Level.GOOD, topic, f"{good} of {len(trials)} are ok; step times and warm-up follow from the ranks'"
        )


def _follows(timed: Mapping[str, Any]) -> bool:
    """Whether a record's step times are the slowest rank's, and its warm-up is what is found in them."""
    ranks = timed.get("rank_step_seconds")
    if ranks is None:
        return True  # older records have none
    slowest = [max(step) for step in zip(*ranks, strict=False)]
    steps = timed["step_seconds"]
    same = len(slowest) == len(steps) and all(
        math.isclose(a, b, rel_tol=1e-6, abs_tol=2e-9) for a, b in zip(slowest, steps, strict=True)
    )
    return same and bool(timed["num_warmup"] == len(timed["warmup_seconds"]) + 1 + warmup(steps))


def _order(records: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether the trials of different cells are interleaved."""
    topic = "order"
    ids = [record["cell_id"] for record in records if record["cell"]["backend"] not in REFERENCES]
    rows = sum(a == b for a, b in pairwise(ids))
    blocks = len({record["repeat"] for record in records})
    # A block that runs backwards begins with the cell that the one before ended with.
    if rows > blocks and len(set(ids)) > 1:
        yield Finding(
            Level.WARNING, topic, f"{plural(rows, 'trial')} followed one of the same cell, more than the blocks explain"
        )
    else:
        yield Finding(Level.GOOD, topic, f"{plural(blocks, 'block')}, each in an order of its own")


def _starts(run: Run, records: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether the trials' processes started as was asked, and all in one way; older records do not tell."""
    topic, told = "starts", [record["cold"] for record in records if "cold" in record]
    cold, all_of_them = sum(told), f"{plural(len(told), 'trial')} started from"
    if 0 < cold < len(told):
        text = f"{cold} of {all_of_them} new interpreters, the others from the fork server, which may differ in speed"
        yield Finding(Level.WARNING, topic, text)
    elif cold and not run.manifest.get("cold"):
        text = f"{all_of_them} new interpreters, unasked: forked processes could not use the device"
        yield Finding(Level.WARNING, topic, text)
    elif told:
        yield Finding(Level.GOOD, topic, f"{all_of_them} {'new interpreters' if cold else 'the fork server'}, as asked")


def _surroundings(run: Run) -> Iterator[Finding]:
    """The code, the machine, and what else it did."""
    topic, git = "code", run.manifest.get("git") or {}
    if git.get("commit") is None:
        yield Finding(Level.WARNING, topic, "the commit that was run is not known: it was no checkout")
    elif not git.get("clean"):
        yield Finding(
            Level.WARNING, topic, f"commit {git['commit'][:12]} with uncommitted changes: nobody can run it again"
        )
    else:
        yield Finding(Level.GOOD, topic, f"commit {git['commit'][:12]}, without changes")
    topic, trials = "machine", run.tables.trials
    cores = trials["num_cpus"].max()
    for name, who in (("foreign_cores", "other programs"), ("stolen_cores", "the hypervisor")):
        seen = trials[name].dropna()
        if seen.empty:
            yield Finding(Level.WARNING, topic, f"what {who} took of it was not measured")
            continue
        level = Level.WARNING if seen.median() > IDLE_SHARE * cores else Level.GOOD
        yield Finding(level, topic, f"{who} took {seen.median():.2g} of {cores} CPUs, at most {seen.max():.2g}")
    slowed = trials[trials["clock_slowdowns"].fillna("") != ""]
    for reasons, rows in slowed.groupby("clock_slowdowns"):
        yield Finding(Level.WARNING, topic, f"clocks were held down in {plural(len(rows), 'trial')}: {reasons}")


def _samples(run: Run, records: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Drift, outliers, two modes and imbalance, cell by cell; one finding for each kind."""
    slots = {(record["cell_id"], record["repeat"]): number for number, record in enumerate(records)}
    good = run.tables.trials[run.tables.trials["status"].isin([Status.OK, Status.INVALID])]
    said: dict[str, list[str]] = {"drift": [], "outliers": [], "two modes": [], "ranks": []}
    ranks = {(r["cell_id"], r["repeat"]): r["time"].get("rank_step_seconds") for r in records if r.get("time")}
    for cell_id, rows in good[good["step_time_s"].notna()].groupby("cell_id", sort=False):
        label, medians = run.cells[str(cell_id)].label, rows["step_time_s"].astype(float).tolist()
        keys = [(str(cell_id), int(repeat)) for repeat in rows["repeat"]]
        moved = samples.drift([slots[key] for key in keys], medians)
        if moved.found:
            said["drift"].append(f"{label} {100 * moved.change:+.2g} % from first to last (p = {moved.p_value:.1g})")
        if len(medians) >= MIN_TRIALS and (far := samples.outliers(medians)):
            said["outliers"].append(
                f"{label}: {len(far)} of {plural(len(medians), 'trial')}, "
                f"the farthest {_farthest(medians):.2g} x the median"
            )
        modes = samples.bimodal(medians)
        if modes is not None and modes.found:
            said["two modes"].append(f"{label}: {100 * modes.share:.0f} % of the trials are {modes.ratio:.3g} x slower")
        apart = [samples.imbalance(ranks[key]) for key in keys if ranks.get(key) and len(ranks[key][0])]
        if apart and sorted(apart)[len(apart) // 2] > IMBALANCE:
            said["ranks"].append(
                f"{label}: the slowest rank takes {sorted(apart)[len(apart) // 2]:.3g} x the median rank"
            )
    fine = {
        "drift": "no cell got faster or slower in the course of the run",
        "outliers": "no trial is ten standard deviations from its cell's median",
        "two modes": "no cell has two modes, as far as its number of trials can show",
        "ranks": "no rank holds up the others",
    }
    for topic, texts in said.items():
        if texts:
            more = f"; and {len(texts) - NAMED} more cells" if len(texts) > NAMED else ""
            yield Finding(Level.WARNING, topic, "; ".join(texts[:NAMED]) + more)
        else:
            yield Finding(Level.GOOD, topic, fine[topic])


def _farthest(values: Sequence[float]) -> float:
    middle = float(pd.Series(values).median())
    return max((value / middle for value in values), key=lambda share: abs(math.log(share)))


def _gates(run: Run) -> Iterator[Finding]:
    """What failed a gate, by reason."""
    invalid = run.tables.trials[run.tables.trials["status"] == Status.INVALID]
    for reason, rows in invalid.groupby("reason", sort=False):
        yield Finding(Level.WARNING, "gates", f"not comparable: {_cells(run, rows['cell_id'])}: {reason}")
    if invalid.empty:
        yield Finding(Level.GOOD, "gates", "step counts, updates and losses of all that ran are right")


def _verdicts(run: Run, found: Standing) -> Iterator[Finding]:
    """The noise floor, what ended the run, and how many verdicts are certain."""
    floor = found.floor
    if floor is None or floor.interval is None or floor.interval.low is None or floor.interval.high is None:
        why = "the run has no A/A pair" if floor is None else floor.reason
        yield Finding(Level.WARNING, "noise floor", f"unknown: {why}; so no cell is called faster, slower or the same")
    else:
        interval = floor.interval
        assert interval.low is not None and interval.high is not None, "looked at above"
        words = f"{floor.cell.label} against itself: {interval.ratio:.4f} ({interval.low:.4f} - {interval.high:.4f})"
        if not interval.low <= 1 <= interval.high:
            yield Finding(
                Level.WARNING,
                "noise floor",
                f"{words}: the machine made a difference of none; one interval in twenty does, but see drift and modes",
            )
        elif band(interval) > 1 + MARGIN:
            yield Finding(Level.WARNING, "noise floor", f"{words}: wider than the margin of {100 * MARGIN:g} %")
        else:
            yield Finding(Level.GOOD, "noise floor", words)
    ended = run.manifest.get("ended_by")
    if ended in {"budget", "max-repeats"}:
        wide = widest(found.rows)
        text = f"ended by {ended}" + ("" if wide is None else f"; the widest interval is {100 * wide:.2g} %")
        few = run.tables.trials["repeat"].nunique() < MIN_TRIALS
        text += f"; with fewer than {MIN_TRIALS} repeats there are no intervals" if few else ""
        yield Finding(Level.WARNING, "verdicts", text)
    elif ended == Ended.NOTHING_TO_COMPARE:
        yield Finding(Level.WARNING, "verdicts", f"ended with {ended}: {run.manifest['looks'][-1]['refused']}")
    elif ended:
        yield Finding(Level.GOOD, "verdicts", f"ended by {ended}")
    counts = {verdict: sum(row.judgement.verdict is verdict for row in found.rows) for verdict in Verdict}
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "none"
    yield Finding(
        Level.WARNING if counts[Verdict.AMBIGUOUS] else Level.GOOD, "verdicts", f"against {found.baseline}: {text}"
    )


def _cells(run: Run, ids: pd.Series) -> str:
    labels = [run.cells[str(cell_id)].label for cell_id in dict.fromkeys(ids)]
    return ", ".join(labels[:NAMED]) + (f" and {len(labels) - NAMED} more cells" if len(labels) > NAMED else "")
