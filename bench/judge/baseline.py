"""One run or pool against itself: the A/A pair, each cell against the baseline's, whether more repeats are needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    others = {name: about for name, about in manifest.backends.items() if name not in REFERENCES}
    return min(others, key=lambda name: bool(others[name].get("defect")), default=REFERENCE)


def control_of(pool: Pool) -> ComparedPair | None:
    """The A/A pair, the same cell twice: the first twin in the order of labels; None if not every run has it.

    Its time is None if one of the two failed or is not comparable; ``detail`` says why it has no interval.
    """
    for cell, twin in _twins(pool)[:1]:
        (found,) = judge_pairs(pool, pool, [Pair(a=cell, b=twin, name="A/A")])
        if found.blocked:
            return replace(found, time=None)
        return found
    return None


def _twins(pool: Pool) -> list[tuple[Cell, Cell]]:
    """Cells that every run holds twice, each with its twin, sorted by the twins' labels."""
    twins = [cell for cell in pool.first.cells.values() if cell.twin and not cell.other_commit]
    twins.sort(key=lambda cell: cell.twin)
    both = [(replace(twin, twin=""), twin) for twin in twins]
    return [(cell, twin) for cell, twin in both if pool.has(cell, twin)]


def pairs_with_baseline(pool: Pool, baseline: str = "") -> list[Pair]:
    """Every cell with the cell of the baseline (by default the run's own) that differs in the backend alone.

    If a run has more twins than one, the others are compared too.
    """
    run = pool.first
    baseline = baseline or baseline_of(run.manifest)
    backends = dict.fromkeys(cell.backend for cell in run.cells.values())
    others = [
        replace(pair, name=f"{backend} {pair.name}")
        for backend in backends
        if backend not in {baseline, *REFERENCES}
        for pair in pairs_of_backends(run, baseline, backend)
    ]
    return others + [
        Pair(a=cell, b=twin, name=twin.label, group="A/A") for cell, twin in _twins(pool)[1:]
    ]


def widest(rows: Sequence[ComparedPair]) -> float | None:
    """The width of the widest interval of these ratios, relative: high / low - 1; None if there is no interval."""
    times = (row.time for row in rows if row.has_interval)
    return max((time.width for time in times if time is not None), default=None)


def percent(share: float, sign: str = "") -> str:
    """A share with two significant digits and without an exponent: ``130 %``."""
    return f"{float(f'{100 * share:.2g}'):{sign}g} %"


def interim_analysis(
    records: Sequence[TrialRecord], manifest: Manifest, repeats: int
) -> InterimAnalysis:
    """Which cells need more repeats.

    Cells that are equal but for the backend are one group, which stays open as a whole until the intervals of all its
    ratios to the baseline are narrow enough (``verdicts.next_precision``); the A/A pair's counts in its own group.
    Cells that cannot be compared, or have failed trials, keep no group open and get no more trials; neither do cells
    that need only one trial (``once`` of the manifest).
    """
    run = run_of(records, manifest)
    pool = Pool(runs=(run,))
    precision = manifest.settings.precision
    control = control_of(pool)
    measured = None if control is None else control.time
    pairs = pairs_with_baseline(pool)
    if control is not None and measured is not None:
        pairs.append(Pair(a=control.a, b=control.b, name="A/A"))
    pairs += pairs_of_commits(pool)
    judged = judge_pairs(pool, pool, pairs, control=measured)
    done = set(manifest.once)
    was_open = set(manifest.looks[-1].open if manifest.looks else run.cells) - done
    still: set[str] = set()
    widths, wanted = [0.0], 0
    compared = [row for row in judged if not row.blocked]
    for base in dict.fromkeys(row.a.cell_id for row in judged):
        of_group = (row for row in compared if row.a.cell_id == base)
        rows = [row for row in of_group if row.b.cell_id not in done]
        if not rows or base not in was_open:
            continue
        is_of_control = control is not None and control.a.cell_id == base
        times = [row.time for row in rows if row.time is not None]
        widths += [time.width for time in times]
        looked_at = rows
        if not is_of_control:
            looked_at = [replace(row, control=None) for row in rows]
        target = next_precision(looked_at, precision)
        if target is not None:
            wanted = max(
                [wanted, *(time.num_trials + required_trials(time, target) for time in times)]
            )
            still |= {base, *(row.b.cell_id for row in rows)}
    chosen = tuple(cell_id for cell_id in run.cells if cell_id in still & was_open)
    broadest, refused = max(widths), ""
    if not judged:
        refused = "no two cells differ in the backend alone"
    elif all(row.blocked for row in judged):
        refused = judged[0].detail
    return InterimAnalysis(
        repeats=repeats,
        open=chosen,
        widest=broadest if 0 < broadest < math.inf else None,
        wanted=wanted,
        refused=refused,
    )
