"""One run against itself: the A/A pair, every cell against the baseline's, and whether more repeats are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bench.judge.caveats import remarks
from bench.judge.loading import Run, run_of
from bench.judge.pairs import ComparedPair, Pair, judge_pairs, pairs_of_backends
from bench.judge.statistics import MARGIN, Interval, ratio, required_trials
from bench.judge.verdicts import band, next_precision
from bench.plan.cell import REFERENCE, REFERENCES, Cell
from bench.plan.schedule import Look
from bench.words import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The noise floor of a run: its A/A pair, the same cell twice."""

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


def noise_floor(run: Run) -> Floor | None:
    """The A/A pair of a run: the first twin in the order of labels; None if the run has none."""
    for cell, twin in _twins(run)[:1]:
        sides = [run.sides.side(one) for one in (twin, cell)]
        bad = [f"{one.label}: {text}" for one in sides for text in one.obstacles]
        bad += [f"{one.label}: {plural(one.num_failed, 'trial')} failed" for one in sides if one.num_failed]
        if bad or not all(len(one.sample.trials) for one in sides):
            return Floor(cell=cell, twin=twin, interval=None, reason="; ".join(bad) or "no trial succeeded")
        found = ratio(sides[0].sample, sides[1].sample)
        return Floor(cell=cell, twin=twin, interval=found, reason=found.reason)
    return None


def _twins(run: Run) -> list[tuple[Cell, Cell]]:
    """Cells that the run holds twice, each with its twin, sorted by the twins' labels."""
    twins = sorted((cell for cell in run.cells.values() if cell.twin), key=lambda cell: cell.twin)
    both = [(replace(twin, twin=""), twin) for twin in twins]
    return [(cell, twin) for cell, twin in both if cell.cell_id in run.cells]


def pairs_with_baseline(run: Run, baseline: str = "") -> list[Pair]:
    """Every cell with the cell of the baseline (by default the run's own) that differs in the backend alone.

    If a run has more twins than the noise floor needs, the others are compared too.
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
class Standing:
    """What a run shows about its backends."""

    baseline: str
    """The backend that all others are compared with."""
    floor: Floor | None
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


def standing(run: Run, *, margin: float = MARGIN) -> Standing:
    """The verdicts of a run's own report: on every cell, against the baseline's."""
    own = baseline_of(run.manifest)
    return standings(run, [own], margin=margin)[own]


def standings(run: Run, names: Sequence[str] = (), *, margin: float = MARGIN) -> dict[str, Standing]:
    """The verdicts with each of these backends as the baseline; by default with every backend, the run's own first.

    Holm's correction counts the comparisons with one baseline, not the baselines that could have been chosen.
    """
    own = baseline_of(run.manifest)
    every = dict.fromkeys([own, *(cell.backend for cell in run.cells.values() if not cell.is_reference)])
    chosen = list(names or every)
    floor = noise_floor(run)
    noise = None if floor is None else floor.interval
    said = remarks((run.manifest, cell) for cell in run.cells.values() if not cell.twin)
    found = {}
    for name in chosen:
        rows = judge_pairs(run, run, pairs_with_baseline(run, name), margin=margin, floor=noise)
        found[name] = Standing(baseline=name, floor=floor, rows=rows, remarks=said)
    return found


def look(records: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any], repeats: int) -> Look:
    """Which cells need more repeats.

    Cells that are equal but for the backend are one group, which stays open as a whole until the intervals of all its
    ratios to the baseline are narrow enough (``verdicts.next_precision``); the A/A pair's counts in its own group.
    Cells that cannot be compared, or have failed trials, keep no group open and get no more trials; neither do cells
    that need only one trial (``once`` of the manifest).
    """
    run = run_of(records, manifest)
    precision = float(manifest["matrix"]["values"]["precision"])
    floor = noise_floor(run)
    noise = None if floor is None else floor.interval
    pairs = pairs_with_baseline(run)
    if floor is not None and noise is not None:
        pairs.append(Pair(a=floor.cell, b=floor.twin, name="A/A"))
    done = set(manifest.get("once") or ())
    groups: dict[str, list[ComparedPair]] = {}
    for row in judge_pairs(run, run, pairs, floor=noise):
        groups.setdefault(row.pair.a.cell_id, []).append(row)
    last = manifest.get("looks") or []
    was_open = set(last[-1]["open"]) if last else set(run.cells)
    still: set[str] = set()
    widest, wanted = 0.0, 0
    for base, rows in groups.items():
        own = floor is not None and floor.cell.cell_id == base
        alive = [row for row in rows if row.judgement.comparison.blocked is None]
        alive = [row for row in alive if row.pair.b.cell_id not in done]
        if not alive or base not in was_open - done:
            continue
        widest = max(widest, *(row.time.width for row in alive if row.time is not None))
        asked = [
            row.judgement if own else replace(row.judgement, comparison=replace(row.judgement.comparison, floor=None))
            for row in alive
        ]
        target = next_precision(asked, precision)
        if target is not None:
            times = [one.comparison.time for one in asked if one.comparison.time is not None]
            wanted = max([wanted, *(time.num_trials + required_trials(time, target) for time in times)])
            still |= {base, *(row.pair.b.cell_id for row in alive)}
    chosen = tuple(cell_id for cell_id in run.cells if cell_id in still & was_open)
    return Look(
        repeats=repeats,
        open=chosen,
        widest=widest if 0 < widest < math.inf else None,
        wanted=wanted,
        refused=_refusal(list(groups.values())),
    )


def _refusal(groups: Sequence[Sequence[ComparedPair]]) -> str:
    """Why no comparison can be made; empty if one can."""
    rows = [row for rows in groups for row in rows]
    if any(row.judgement.comparison.blocked is None for row in rows):
        return ""
    return rows[0].judgement.detail if rows else "no two cells differ in the backend alone"


def floor_of_runs(a: Run, b: Run) -> tuple[Interval | None, list[str]]:
    """The noise floor, the higher one of two runs, and notes on it; None if a run has none."""
    found, unsure = [], []
    for letter, one in (("A: ", a), ("B: ", b)) if a is not b else (("", a),):
        floor = noise_floor(one)
        if floor is None or floor.interval is None or floor.interval.low is None:
            why = "it has no A/A pair" if floor is None else f"A/A pair: {floor.reason}"
            unsure.append(f"{letter}the noise floor of {one.name} is unknown: {why}")
        else:
            found.append(floor.interval)
            unsure.append(
                f"{letter}noise floor {100 * (band(floor.interval) - 1):.2g}%: {floor.cell.label} against itself is "
                f"{floor.interval.ratio:.4f} [{floor.interval.low:.4f}, {floor.interval.high:.4f}], "
                f"n = {floor.interval.num_trials}"
            )
    known = len(found) == len(unsure)
    return (max(found, key=band) if known else None), unsure
