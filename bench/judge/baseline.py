"""One run or pool against itself: A/A pair, cells and baseline, and the need for repeats."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from bench.judge.loading import run_of
from bench.judge.pairs import ComparedPair, Pair, judge_pairs, pairs_of_backends, pairs_of_commits
from bench.judge.pool import Pool
from bench.judge.statistics import required_trials
from bench.judge.verdicts import next_precision
from bench.plan.cell import REFERENCE, REFERENCES, Cell
from bench.plan.schedule import InterimAnalysis
from bench.run.manifest import Manifest
from bench.run.trial_record import TrialRecord


def baseline_of(manifest: Manifest) -> str:
    """The backend that the others of a run are compared with."""
    if manifest.baseline:
        return manifest.baseline
    others = [name for name in manifest.backends if name not in REFERENCES]
    for name in others:
        if not manifest.backends[name].get("defect"):
            return name
    if others:
        return others[0]
    return REFERENCE


def control_of(pool: Pool) -> ComparedPair | None:
    """The A/A pair, the same cell twice: the first twin by labels; None if not every run has it.

    Its time is None if one of the two failed or is not comparable; ``detail`` says why it has no
    interval.
    """
    twins = _twins(pool)
    if not twins:
        return None
    cell, twin = twins[0]
    (found,) = judge_pairs(pool, pool, [Pair(a=cell, b=twin, name="A/A")])
    if found.blocked:
        return replace(found, time=None)
    return found


def _twins(pool: Pool) -> list[tuple[Cell, Cell]]:
    """Cells that every run holds twice, each with its twin, sorted by the twins' labels."""
    found = []
    for twin in sorted(pool.first.cells.values(), key=lambda cell: cell.twin):
        cell = replace(twin, twin="")
        if twin.twin and not twin.other_commit and pool.has(cell, twin):
            found.append((cell, twin))
    return found


def pairs_with_baseline(pool: Pool, baseline: str) -> list[Pair]:
    """Every cell with the first of the baseline that differs from it in the backend alone.

    There are several only of HSDP, with other numbers of replicas.
    If a run has more twins than one, the others are compared too.
    """
    run = pool.first
    found: list[Pair] = []
    for backend in dict.fromkeys(cell.backend for cell in run.cells.values()):
        if backend == baseline or backend in REFERENCES:
            continue
        compared: set[str] = set()
        for pair in pairs_of_backends(run, baseline, backend):
            if pair.b.cell_id not in compared:
                compared.add(pair.b.cell_id)
                found.append(replace(pair, name=f"{backend} {pair.name}"))
    for cell, twin in _twins(pool)[1:]:
        found.append(Pair(a=cell, b=twin, name=twin.label, group="A/A"))
    return found


def widest(rows: Sequence[ComparedPair]) -> float | None:
    """The width of the widest interval of these ratios, high / low - 1; None if there is none."""
    widths = []
    for row in rows:
        if row.time is not None and row.has_interval:
            widths.append(row.time.width)
    return max(widths, default=None)


def percent(share: float, sign: str = "") -> str:
    """A share with two significant digits and without an exponent: ``130 %``."""
    return f"{float(f'{100 * share:.2g}'):{sign}g} %"


def interim_analysis(
    records: Sequence[TrialRecord], manifest: Manifest, repeats: int
) -> InterimAnalysis:
    """Which cells need more repeats.

    Cells that are equal but for the backend are one group, which stays open as a whole until the
    intervals of all its ratios to the baseline are narrow enough (``verdicts.next_precision``); the
    A/A pair's counts in its own group. Cells that cannot be compared, or have failed trials, keep
    no group open and get no more trials; neither do cells that need only one trial (``once`` of the
    manifest).
    """
    run = run_of(records, manifest)
    pool = Pool(runs=(run,))
    control = control_of(pool)
    measured = None
    pairs = pairs_with_baseline(pool, baseline_of(manifest))
    if control is not None and control.time is not None:
        measured = control.time
        pairs.append(Pair(a=control.a, b=control.b, name="A/A"))
    pairs += pairs_of_commits(pool)
    judged = judge_pairs(pool, pool, pairs, control=measured)
    was_open = set(run.cells)
    if manifest.looks:
        was_open = set(manifest.looks[-1].open)
    was_open.difference_update(manifest.once)
    still: set[str] = set()
    broadest, wanted = 0.0, 0
    for base, rows in _groups(judged, set(manifest.once)).items():
        if base not in was_open:
            continue
        looked_at = rows
        if control is None or control.a.cell_id != base:
            looked_at = [replace(row, control=None) for row in rows]
        target = next_precision(looked_at, manifest.settings.precision)
        for row in rows:
            if target is not None:
                still |= {base, row.b.cell_id}
            if row.time is None:
                continue
            broadest = max(broadest, row.time.width)
            if target is not None:
                wanted = max(wanted, row.time.num_trials + required_trials(row.time, target))
    still &= was_open
    return InterimAnalysis(
        repeats=repeats,
        open=tuple(cell_id for cell_id in run.cells if cell_id in still),
        widest=broadest if 0 < broadest < math.inf else None,
        wanted=wanted,
        refused=_refused(judged),
    )


def _groups(judged: Sequence[ComparedPair], once: Collection[str]) -> dict[str, list[ComparedPair]]:
    """The comparisons of cells that may need more trials, by the id of the cell of the baseline."""
    found: dict[str, list[ComparedPair]] = {}
    for row in judged:
        if not row.blocked and row.b.cell_id not in once:
            found.setdefault(row.a.cell_id, []).append(row)
    return found


def _refused(judged: Sequence[ComparedPair]) -> str:
    """Why nothing can be compared; empty if something can."""
    if not judged:
        return "no two cells differ in the backend alone"
    if all(row.blocked for row in judged):
        return judged[0].detail
    return ""
