"""One run against itself: the A/A pair, every cell against the baseline's, and whether more repeats are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bench.formatting import plural
from bench.judge.caveats import remarks
from bench.judge.loading import Run, run_of
from bench.judge.pairs import ComparedPair, Pair, judge_pairs, pairs_of_backends
from bench.judge.statistics import Interval, ratio, required_trials
from bench.judge.verdicts import excess, next_precision
from bench.plan.cell import REFERENCE, REFERENCES, Cell
from bench.plan.schedule import InterimAnalysis


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """The A/A pair of a run: the same cell twice, which checks the instrument."""

    cell: Cell
    twin: Cell
    interval: Interval | None
    """Ratio of the twin's step time to the cell's; None if one of the two has no good trial."""
    reason: str = ""
    """Why there is no interval."""


def baseline_of(manifest: Mapping[str, Any]) -> str:
    """The backend that the others of a run are compared with."""
    if "baseline" in manifest:
        return str(manifest["baseline"])
    others = {name: about for name, about in manifest["backends"].items() if name not in REFERENCES}
    return min(others, key=lambda name: bool(others[name].get("defect")), default=REFERENCE)


def control_of(run: Run) -> Control | None:
    """The A/A pair of a run: the first twin in the order of labels; None if the run has none."""
    for cell, twin in _twins(run)[:1]:
        sides = [run.evidence.of(twin), run.evidence.of(cell)]
        bad = [f"{side.label}: {text}" for side in sides for text in side.obstacles]
        bad += [f"{side.label}: {plural(side.num_failed, 'trial')} failed" for side in sides if side.num_failed]
        if bad or not all(side.sample.trials for side in sides):
            return Control(cell=cell, twin=twin, interval=None, reason="; ".join(bad) or "no trial succeeded")
        found = ratio(sides[0].sample, sides[1].sample)
        return Control(cell=cell, twin=twin, interval=found, reason=found.reason)
    return None


def _twins(run: Run) -> list[tuple[Cell, Cell]]:
    """Cells that the run holds twice, each with its twin, sorted by the twins' labels."""
    twins = sorted((cell for cell in run.cells.values() if cell.twin), key=lambda cell: cell.twin)
    both = [(replace(twin, twin=""), twin) for twin in twins]
    return [(cell, twin) for cell, twin in both if cell.cell_id in run.cells]


def pairs_with_baseline(run: Run, baseline: str = "") -> list[Pair]:
    """Every cell with the cell of the baseline (by default the run's own) that differs in the backend alone.

    If a run has more twins than one, the others are compared too.
    """
    baseline = baseline or baseline_of(run.manifest)
    backends = dict.fromkeys(cell.backend for cell in run.cells.values())
    others = [
        replace(pair, name=f"{backend} {pair.name}")
        for backend in backends
        if backend not in {baseline, *REFERENCES}
        for pair in pairs_of_backends(run, baseline, backend)
    ]
    return others + [Pair(a=cell, b=twin, name=twin.label, group="A/A") for cell, twin in _twins(run)[1:]]


@dataclass(frozen=True, kw_only=True)
class AgainstBaseline:
    """What a run shows about its backends."""

    baseline: str
    """The backend that all others are compared with."""
    control: Control | None
    """The A/A pair; None if the run has none."""
    rows: list[ComparedPair]
    """A verdict on each cell."""
    remarks: Sequence[str] = ()
    """What must be said beside the numbers of the run's cells (``bench.judge.caveats``)."""

    @cached_property
    def by_cell(self) -> dict[str, ComparedPair]:
        """The rows by the id of the cell that is compared with the baseline."""
        return {row.pair.b.cell_id: row for row in self.rows}


def widest(rows: Sequence[ComparedPair]) -> float | None:
    """The width of the widest interval of these ratios, relative: high / low - 1; None if there is no interval."""
    return max((row.time.width for row in rows if row.time is not None and row.time.low is not None), default=None)


def against_baseline(run: Run) -> AgainstBaseline:
    """The verdicts of a run's own report: on every cell, against the baseline's."""
    (found,) = against_baselines(run, [baseline_of(run.manifest)]).values()
    return found


def against_baselines(run: Run, names: Sequence[str] = ()) -> dict[str, AgainstBaseline]:
    """The verdicts with each of these backends as the baseline; by default with every backend, the run's own first.

    Holm's correction counts the comparisons with one baseline, not the baselines that could have been chosen.
    """
    every = [baseline_of(run.manifest), *(cell.backend for cell in run.cells.values() if not cell.is_reference)]
    control = control_of(run)
    measured = None if control is None else control.interval
    notes = [] if control is None or measured is None else widened(control.cell, measured)
    notes += remarks((run.manifest, cell) for cell in run.cells.values() if not cell.twin)
    return {
        name: AgainstBaseline(
            baseline=name,
            control=control,
            rows=judge_pairs(run, run, pairs_with_baseline(run, name), control=measured),
            remarks=notes,
        )
        for name in names or dict.fromkeys(every)
    }


def interim_analysis(
    records: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any], repeats: int
) -> InterimAnalysis:
    """Which cells need more repeats.

    Cells that are equal but for the backend are one group, which stays open as a whole until the intervals of all its
    ratios to the baseline are narrow enough (``verdicts.next_precision``); the A/A pair's counts in its own group.
    Cells that cannot be compared, or have failed trials, keep no group open and get no more trials; neither do cells
    that need only one trial (``once`` of the manifest).
    """
    run = run_of(records, manifest)
    precision = float(manifest["matrix"]["values"]["precision"])
    control = control_of(run)
    measured = None if control is None else control.interval
    pairs = pairs_with_baseline(run)
    if control is not None and measured is not None:
        pairs.append(Pair(a=control.cell, b=control.twin, name="A/A"))
    judged = judge_pairs(run, run, pairs, control=measured)
    done = set(manifest.get("once") or ())
    looks = manifest.get("looks") or [{"open": run.cells}]
    was_open, still = set(looks[-1]["open"]) - done, set[str]()
    widths, wanted = [0.0], 0
    for base in dict.fromkeys(row.pair.a.cell_id for row in judged):
        rows = [row for row in judged if row.pair.a.cell_id == base and row.pair.b.cell_id not in done]
        alive = [row for row in rows if row.judgement.comparison.blocked is None]
        if not alive or base not in was_open:
            continue
        asked = [row.judgement for row in alive]
        if control is None or control.cell.cell_id != base:
            asked = [replace(each, comparison=replace(each.comparison, control=None)) for each in asked]
        times = [row.time for row in alive if row.time is not None]
        widths += [time.width for time in times]
        target = next_precision(asked, precision)
        if target is not None:
            wanted = max([wanted, *(time.num_trials + required_trials(time, target) for time in times)])
            still |= {base, *(row.pair.b.cell_id for row in alive)}
    chosen = tuple(cell_id for cell_id in run.cells if cell_id in still & was_open)
    widest = max(widths)
    return InterimAnalysis(
        repeats=repeats,
        open=chosen,
        widest=widest if 0 < widest < math.inf else None,
        wanted=wanted,
        refused=_refusal(judged),
    )


def _refusal(rows: Sequence[ComparedPair]) -> str:
    """Why no comparison can be made; empty if one can."""
    if any(row.judgement.comparison.blocked is None for row in rows):
        return ""
    return rows[0].judgement.detail if rows else "no two cells differ in the backend alone"


def widened(cell: Cell, control: Interval) -> list[str]:
    """The remark on intervals that are wider because the A/A pair's excludes 1; none if it contains 1."""
    if not (by := excess(control)):
        return []
    return [
        f"the A/A pair, {cell.label} twice, differs: {control.ratio:.4f} ({control.low:.4f} to {control.high:.4f}); so "
        f"the interval of every ratio is {100 * math.expm1(by):.2g} % wider on both sides"
    ]


def control_of_runs(a: Run, b: Run) -> tuple[Interval | None, list[str]]:
    """The A/A pair, of two runs the one that is farther from 1, and notes on it; None if a run has none."""
    intervals, notes = [], []
    for letter, run in (("A: ", a), ("B: ", b)) if a is not b else (("", a),):
        control = control_of(run)
        if control is None or control.interval is None or control.interval.low is None:
            why = "" if control is None else f": {control.reason}"
            notes.append(f"{letter}{run.name} has no interval of an A/A pair{why}")
        else:
            found = control.interval
            intervals.append(found)
            notes.append(
                f"{letter}A/A pair: {control.cell.label} against itself is {found.ratio:.4f} [{found.low:.4f}, "
                f"{found.high:.4f}], n = {found.num_trials}"
            )
            notes += widened(control.cell, found)
    return (max(intervals, key=excess) if len(intervals) == (1 if a is b else 2) else None), notes
