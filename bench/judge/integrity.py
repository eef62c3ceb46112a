"""Checks a finished run from its raw samples: whether it is complete and unchanged, and what limits its use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from bench.findings import Finding, Level, error, good, warning
from bench.formatting import plural
from bench.judge import samples
from bench.judge.baseline import AgainstBaseline, against_baseline, widest
from bench.judge.loading import Run, missing_trials, read
from bench.judge.statistics import MIN_TRIALS
from bench.judge.verdicts import Verdict, excess
from bench.measure.host import IDLE_SHARE
from bench.plan.cell import REFERENCES, Cell, Status
from bench.plan.schedule import Ended
from bench.run.journal import Journal
from bench.run.machine import unlike_nodes
from bench.run.trial_record import warmup

TOLERANCE = 1e-9
"""Relative tolerance between a stored and a recomputed number."""
IMBALANCE = 1.05
"""Ratio of the slowest to the median rank's step time from which a cell is reported."""
NAMED = 3
"""Most cells named in one finding."""


def check(folder: Path) -> list[Finding]:
    """All findings on a run, grouped by topic. Raises InputError if the folder holds no run."""
    run, records = read(folder)
    found = [
        *journal_findings(folder, run, len(records)),
        *_tables(folder, run),
        *_trials(run, records),
        *_order(records),
        *_starts(run, records),
        *_surroundings(run),
        *_blocks(run),
        *_telemetry(records),
        *_samples(run, records),
        *_gates(run),
        *_verdicts(run, against_baseline(run)),
    ]
    topics = dict.fromkeys(one.topic for one in found)
    return [one for topic in topics for one in found if one.topic == topic]


def journal_findings(folder: Path, run: Run, num_records: int) -> Iterator[Finding]:
    """Whether the journal is unchanged. ``read`` has already checked every line, and every cell against its id."""
    topic = "journal"
    digest = Journal(folder).digest()
    noted = run.manifest.get("journal_sha256")
    if noted is None:
        yield warning(topic, "its hash was not stored when the run ended, so later edits cannot be detected")
    elif noted != digest:
        yield error(topic, f"was changed after the run: its SHA-256 is {digest}, and was {noted}")
    else:
        yield good(topic, f"{num_records} records, all cells match their ids; SHA-256 {digest}")


def _tables(folder: Path, run: Run) -> Iterator[Finding]:
    """Compares the tables on disk with those built from the journal."""
    topic = "tables"
    different = 0
    for field in fields(run.tables):
        path = folder / f"{field.name}.parquet"
        if not path.exists():
            yield warning(topic, f"{path.name} is missing; write it with: python -m bench report {folder}")
            continue
        stored, recomputed = pd.read_parquet(path), getattr(run.tables, field.name)
        if missing := [name for name in recomputed if name not in stored.columns]:
            text = f"{path.name} has no column {', '.join(missing)}"
            yield warning(topic, f"{text}; write it again with: python -m bench report {folder}")
        for text in _differences(stored, recomputed):
            different += 1
            yield error(topic, f"{path.name}: {text}; write it again with: python -m bench report {folder}")
    if not different:
        yield good(topic, "every number in them follows from the journal")


def _differences(stored: pd.DataFrame, recomputed: pd.DataFrame) -> Iterator[str]:
    """The differences between a stored and a recomputed table: at most one sentence per stored column."""
    if len(stored) != len(recomputed):
        yield f"{plural(len(stored), 'row')}, {len(recomputed)} follow from the journal"
        return
    for name in (name for name in recomputed.columns if name in stored.columns):
        ours, theirs = stored[name], recomputed[name]
        unlike = ours.isna() != theirs.isna()
        both = ours.notna() & theirs.notna()
        if pd.api.types.is_float_dtype(theirs.dtype):
            # NaN is a value (a loss that is not finite), NA is missing.
            a, b = (column[both].astype(float) for column in (ours, theirs))
            unlike.loc[a.index[~((a - b).abs() <= TOLERANCE * b.abs().clip(lower=1e-300)) & ~(a == b)]] = True
        else:
            unlike |= both & (ours.astype("string") != theirs.astype("string")).fillna(False)
        if unlike.any():
            row = int(unlike.to_numpy().argmax())
            yield f"{name} of row {row} is {ours[row]}, {theirs[row]} follows from the journal"


def _trials(run: Run, records: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether all trials are there, and their step times follow from those of the ranks."""
    topic = "trials"
    if "finished" not in run.manifest:
        yield warning(topic, "the run has not finished: continue it with run --resume")
    if missing := missing_trials(run):
        yield error(topic, f"{missing} that were scheduled are not in the journal")
    trials = run.tables.trials
    bad = trials[~trials["status"].isin([Status.OK, Status.INVALID, Status.UNSUPPORTED])]
    for status, rows in bad.groupby("status"):
        yield warning(topic, f"{len(rows)} ended {status}: {_cells(run, rows['cell_id'])}")
    wrong = [record for record in records if record.get("time") and not _follows(record["time"])]
    if wrong:
        named = _cells(run, pd.Series([record["cell_id"] for record in wrong]))
        yield error(topic, f"step times of {len(wrong)} do not follow from those of their ranks: {named}")
    if not (missing or wrong):
        num_ok = int((trials["status"] == Status.OK).sum())
        yield good(topic, f"{num_ok} of {len(trials)} are ok; step times and warm-up follow from the ranks'")


def _follows(timed: Mapping[str, Any]) -> bool:
    """Whether a record's step times are those of the slowest rank, and its warm-up follows from them."""
    slowest = [max(step) for step in zip(*timed["rank_step_seconds"], strict=False)]
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
    # A reversed block starts with the cell that the previous block ended with.
    if rows > blocks and len(set(ids)) > 1:
        yield warning(topic, f"{plural(rows, 'trial')} followed one of the same cell, more than the blocks explain")
    else:
        yield good(topic, f"{plural(blocks, 'block')}, each in its own order")


def _starts(run: Run, records: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether all trials started the same way, cold or forked, as requested."""
    topic, told = "starts", [record["cold"] for record in records if "cold" in record]
    cold, all_of_them = sum(told), f"{plural(len(told), 'trial')} started from"
    if 0 < cold < len(told):
        text = f"{cold} of {all_of_them} new interpreters, the others from the fork server, which may differ in speed"
        yield warning(topic, text)
    elif cold and not run.manifest.get("cold"):
        text = (
            f"{all_of_them} new interpreters, although --cold was not given: forked processes could not use the device"
        )
        yield warning(topic, text)
    elif told:
        yield good(topic, f"{all_of_them} {'new interpreters' if cold else 'the fork server'}, as requested")


def _surroundings(run: Run) -> Iterator[Finding]:
    """The commit, and the load and clocks of the machine."""
    topic, git = "code", run.manifest.get("git") or {}
    if git.get("commit") is None:
        yield warning(topic, "the commit is unknown: the code was not a git checkout")
    elif not git.get("clean"):
        yield warning(
            topic, f"commit {git['commit'][:12]} with uncommitted changes: nobody can run the same code again"
        )
    else:
        yield good(topic, f"commit {git['commit'][:12]}, without changes")
    topic, trials = "machine", run.tables.trials
    cores = trials["num_cpus"].max()
    for name, who in (("foreign_cores", "other programs"), ("stolen_cores", "the hypervisor")):
        seen = trials[name].dropna()
        if seen.empty:
            yield warning(topic, f"the share of its CPUs that {who} took was not measured")
            continue
        level = Level.WARNING if seen.median() > IDLE_SHARE * cores else Level.GOOD
        yield Finding(level, topic, f"{who} took {seen.median():.2g} of {cores} CPUs, at most {seen.max():.2g}")
    slowed = trials[trials["clock_slowdowns"].fillna("") != ""]
    for reasons, rows in slowed.groupby("clock_slowdowns"):
        yield warning(topic, f"clocks were held down in {plural(len(rows), 'trial')}: {reasons}")
    if others := run.manifest.get("nodes"):
        unlike = list(unlike_nodes(run.manifest))
        yield from (warning("nodes", text) for text in unlike)
        if not unlike:
            yield good("nodes", f"{1 + len(others)} nodes have the same hardware, packages and environment")


def _blocks(run: Run) -> Iterator[Finding]:
    """Whether the cells as a whole were slower in some blocks than in others."""
    topic = "blocks"
    found = samples.block_effects(run.tables.trials)
    if found is None:
        return
    if not found.found:
        yield good(topic, "no block is slower or faster than the others in all cells together")
        return
    ordered = sorted(found.effects.items(), key=lambda item: float(item[1]))
    ends = ordered[0], ordered[-1]
    said = " and ".join(f"block {block} by {100 * math.expm1(effect):+.2g} %" for block, effect in ends)
    text = f"differ in all cells together (Friedman's test, p = {found.p_value:.1g}): {said} from the mean block"
    yield warning(topic, f"{text}; ratios are taken within blocks, so this is not in them")


def _telemetry(records: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Why the GPUs' telemetry is empty or limited."""
    notes = Counter(note for record in records for note in (record.get("gpus") or {}).get("notes", ()))
    for note, number in list(notes.items())[:NAMED]:
        yield warning("machine", f"{note} ({plural(number, 'trial')})")


def _samples(run: Run, records: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Drift, outliers, bimodality and imbalance of the cells; one finding per kind."""
    slots = {(record["cell_id"], record["repeat"]): number for number, record in enumerate(records)}
    measured = run.tables.trials[run.tables.trials["status"].isin([Status.OK, Status.INVALID])]
    said: dict[str, list[str]] = {"drift": [], "outliers": [], "two modes": [], "ranks": []}
    ranks = {(r["cell_id"], r["repeat"]): r["time"].get("rank_step_seconds") for r in records if r.get("time")}
    for cell_id, rows in measured[measured["step_time_s"].notna()].groupby("cell_id", sort=False):
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
                + _slowest_node(run.cells[str(cell_id)], [ranks[key] for key in keys if ranks.get(key)])
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
            yield warning(topic, "; ".join(texts[:NAMED]) + more)
        else:
            yield good(topic, fine[topic])


def _slowest_node(cell: Cell, trials: Sequence[Sequence[Sequence[float]]]) -> str:
    """The node of the rank that was the slowest in most trials, if the cell is on several nodes."""
    if cell.num_nodes == 1:
        return ""
    rank = Counter(map(samples.slowest, trials)).most_common(1)[0][0]
    return f" (mostly rank {rank}, on node {rank // cell.ranks_per_node})"


def _farthest(values: Sequence[float]) -> float:
    middle = float(pd.Series(values).median())
    return max((value / middle for value in values), key=lambda share: abs(math.log(share)))


def _gates(run: Run) -> Iterator[Finding]:
    """Trials that failed a gate, by reason."""
    invalid = run.tables.trials[run.tables.trials["status"] == Status.INVALID]
    for reason, rows in invalid.groupby("reason", sort=False):
        yield warning("gates", f"not comparable: {_cells(run, rows['cell_id'])}: {reason}")
    if invalid.empty:
        yield good("gates", "step counts, updates and losses of all trials that ran are right")


def _verdicts(run: Run, found: AgainstBaseline) -> Iterator[Finding]:
    """The A/A pair, what ended the run, and the counts of verdicts."""
    control, topic = found.control, "A/A pair"
    interval = None if control is None else control.interval
    if control is None or interval is None or interval.low is None:
        why = "there is none" if control is None else control.reason
        yield warning(topic, f"{why}; so no cell is called faster, slower or the same")
    else:
        words = f"{control.cell.label} against itself: {interval.ratio:.4f} ({interval.low:.4f} to {interval.high:.4f})"
        by = excess(interval)
        text = f"{words}; excludes 1, so all intervals are {100 * math.expm1(by):.2g} % wider on both sides"
        yield warning(topic, text) if by else good(topic, words)
    ended = run.manifest.get("ended_by")
    if ended in {"budget", "max-repeats"}:
        wide = widest(found.rows)
        text = f"ended by {ended}" + ("" if wide is None else f"; the widest interval is {100 * wide:.2g} %")
        few = run.tables.trials["repeat"].nunique() < MIN_TRIALS
        text += f"; with fewer than {MIN_TRIALS} repeats there are no intervals" if few else ""
        yield warning("verdicts", text)
    elif ended == Ended.NOTHING_TO_COMPARE:
        yield warning("verdicts", f"ended with {ended}: {run.manifest['looks'][-1]['refused']}")
    elif ended:
        yield good("verdicts", f"ended by {ended}")
    counts = {verdict: sum(row.judgement.verdict is verdict for row in found.rows) for verdict in Verdict}
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "none"
    yield Finding(
        Level.WARNING if counts[Verdict.AMBIGUOUS] else Level.GOOD, "verdicts", f"against {found.baseline}: {text}"
    )


def _cells(run: Run, ids: pd.Series) -> str:
    labels = [run.cells[str(cell_id)].label for cell_id in dict.fromkeys(ids)]
    return ", ".join(labels[:NAMED]) + (f" and {len(labels) - NAMED} more cells" if len(labels) > NAMED else "")
