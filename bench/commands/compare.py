"""``compare``: two runs, or two backends of one run, cell by cell, with a gate for CI.

With ``--json`` one object:

- ``a``, ``b``: the baseline and what is compared with it, each with ``run_id`` and ``backend``
  (null for whole runs);
- ``margin``, ``thresholds``: as given, 0.05 for 5 %; ``control``: the ratio of the A/A pair with
  its interval, of two runs the one that is farther from 1; null if a run has none;
- ``fingerprint``: the keys that differ between the runs, each with ``key``, ``a`` and ``b``;
- ``cells``: one per pair, with the columns of the frame ``ratios``
  (``python -m bench export RUN --table ratios``), and ``regressions`` and ``unchecked``: which of
  the thresholds are certainly exceeded, and which could not be checked;
- ``only_a``, ``only_b``: cells without a partner; ``newly_failed``: pairs of which trials failed in
  B and none in A; ``notes``: sentences; ``regressed``: whether any cell has; ``gate``: passed,
  regressed or unchecked, null without ``--fail-on``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench import files
from bench.commands.options import CommandParsers, named, share
from bench.errors import BAD, GOOD, UNCHECKED, InputError, suggest
from bench.run.machine import Changed, differences

if TYPE_CHECKING:
    from bench.judge.pairs import ComparedPair, Pair
    from bench.judge.pool import Pool
    from bench.judge.statistics import Interval
    from bench.report.comparison import Report

METRICS = ("slower", "memory")
DESCRIPTION = (
    "Compares run B with run A, the baseline: the cells that both have; or, of one run or several "
    "of one matrix, --backend with --against: the cells that are equal but for the backend. A "
    "folder of runs may stand for a run. Of a single run of 'run --against COMMIT', the two "
    "commits are compared. Of different days, a time is called slower only beyond what runs of "
    "this class of machines differ by."
)
GATE = (
    "Exit status with --fail-on: 0 everything was checked and nothing regressed; 1 something is "
    "certainly worse by more than is allowed; 3 nothing is, but a cell could not be checked, is "
    "missing in B, or failed in B alone. With --allow-unchecked only the last gives 3."
)
WORDS = {
    "passed": "gate: passed",
    "regressed": f"gate: regressed (exit status {BAD})",
    "unchecked": (
        f"gate: not passed (exit status {UNCHECKED}): cells are unchecked, missing in B, or newly "
        "failed"
    ),
}
"""Of each end of a gate."""
STATUSES = {"passed": GOOD, "regressed": BAD, "unchecked": UNCHECKED}
"""The exit status of each."""


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare two runs, or two backends of one run",
        description=DESCRIPTION,
        epilog=GATE,
    )
    option = parser.add_argument
    words = (
        "folders of two runs, or of runs, A the baseline; with --backend one or more of one matrix"
    )
    option("runs", type=named, nargs="+", metavar="RUN", help=words)
    option("--backend", metavar="X", help="within runs: the backend that is compared")
    option("--against", metavar="Y", help="within runs: the backend that is the baseline")
    option(
        "--fail-on",
        type=_thresholds,
        default={},
        metavar="METRIC=P[,METRIC=P]",
        help=(
            "a gate for CI: no step time and no peak memory may be worse by more, such as "
            "slower=5%%,memory=2%%"
        ),
    )
    option(
        "--allow-unchecked",
        action="store_true",
        help="with --fail-on: pass although cells are unchecked or missing",
    )
    option(
        "--margin",
        type=_margin,
        metavar="P",
        help="a ratio this near to 1 is called the same (default: 2%%)",
    )
    option(
        "--json",
        action="store_true",
        help="one JSON object; its keys: see bench/commands/compare.py",
    )
    option(
        "--out",
        type=named,
        metavar="DIR",
        help="write compare.parquet, compare.md and the forest plot there",
    )


def _margin(text: str) -> float:
    number = share(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"'{text}' must be above 0, or nothing could be the same")
    return number


def _thresholds(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = map(str.strip, part.partition("="))
        if name not in METRICS:
            raise argparse.ArgumentTypeError(
                f"'{name}' is no limit such as slower=5%; {suggest(name, METRICS)}"
            )
        if not equals:
            raise argparse.ArgumentTypeError(f"'{name}' has no threshold; write {name}=5%")
        if name in found:
            raise argparse.ArgumentTypeError(f"'{name}' is given twice; leave out one")
        found[name] = share(value)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenPairs:
    """Both sides, their pairs, and what to call A and B."""

    a: Pool
    b: Pool
    pairs: Sequence[Pair]
    names: tuple[str, str]


def run(arguments: argparse.Namespace) -> int:
    from bench.judge import pairs as judge_pairs
    from bench.judge.as_benched import notes_between
    from bench.report import comparison

    limits: dict[str, float] = arguments.fail_on
    margin = _chosen_margin(arguments)
    if arguments.allow_unchecked and not limits:
        raise InputError(
            "--allow-unchecked: is for a gate; give --fail-on too, such as --fail-on slower=5%"
        )
    chosen = _chosen(arguments)
    a, b = chosen.a, chosen.b
    pairs, never = _measured(chosen, str(arguments.runs[0]))
    is_same = a is not b and a.digests == b.digests
    if is_same and not arguments.json:
        print(f"A and B are the same run, {a.first.name}: there is nothing to compare or to write")
        if limits and not arguments.allow_unchecked:
            return UNCHECKED
        return GOOD
    if arguments.out:
        with files.writing(f"--out {arguments.out}"):
            arguments.out.mkdir(parents=True, exist_ok=True)
    control, control_n, notes = comparison.controls(a, b)
    rows = judge_pairs.judge_pairs(a, b, pairs, thresholds=limits, margin=margin, control=control)
    backends = (arguments.against, arguments.backend)
    alone = judge_pairs.partnerless(a.first, b.first, chosen.pairs, backends)
    failed = judge_pairs.newly_failed(a.first, b.first, pairs)
    notes += comparison.notes(a, b, rows, never, limits, margin)
    notes += notes_between((row.a, row.b) for row in rows)
    if failed:
        notes.append(f"failed in B and not in A: {', '.join(failed)}")
    gate = None
    if limits:
        lacks_some = is_same or bool(alone["only_a"])
        gate = _gate(arguments, rows, has_failed=bool(failed), lacks_some=lacks_some)
    report = comparison.Report(
        a=chosen.names[0],
        b=chosen.names[1],
        rows=rows,
        differences=_differences(chosen),
        remarks=_remarks(chosen, rows),
        notes=[*notes, *_further_notes(alone, gate)],
        margin=margin,
        threshold=limits.get("slower"),
        num_runs=len(a.runs),
        is_within=a is b,
        is_of_days=any(row.allows_for_days for row in rows),
        control_n=control_n,
    )
    if arguments.json:
        facts = {
            "a": {"run_id": a.first.name, "backend": arguments.against},
            "b": {"run_id": b.first.name, "backend": arguments.backend},
            "margin": margin,
            "thresholds": limits,
            **_facts(report, control),
            **alone,
            "newly_failed": failed,
            "notes": [*report.remarks, *notes],
            "regressed": any(row.regressions for row in rows),
            "gate": gate,
        }
        print(json.dumps(facts, allow_nan=False))
    else:
        comparison.show(report)
    if arguments.out:
        with files.writing(f"--out {arguments.out}"):
            names = ", ".join(path.name for path in comparison.write(report, arguments.out))
        print(f"written: {names} to {arguments.out}", file=sys.stderr)
    if gate is None:
        return GOOD
    return STATUSES[gate]


def _chosen_margin(arguments: argparse.Namespace) -> float:
    """How near to 1 a ratio is called the same: as ``--margin`` says, or as reports have it."""
    from bench.judge.statistics import MARGIN

    margin: float | None = arguments.margin
    if margin is None:
        return MARGIN
    return margin


def _measured(chosen: ChosenPairs, place: str) -> tuple[list[Pair], list[Pair]]:
    """The pairs of which a side was measured, and the others. Raises InputError if none was."""
    from bench.judge.pairs import measured

    pairs, never = [], []
    for pair in chosen.pairs:
        if measured(chosen.a.first, pair.a) or measured(chosen.b.first, pair.b):
            pairs.append(pair)
        else:
            never.append(pair)
    if not pairs:
        raise InputError(
            f"{place}: every common cell is unsupported on both sides, so nothing was measured"
        )
    return pairs, never


def _gate(
    arguments: argparse.Namespace,
    rows: Sequence[ComparedPair],
    *,
    has_failed: bool,
    lacks_some: bool,
) -> str:
    """How a gate ends: a key of WORDS."""
    lacks_some = lacks_some or any(row.unchecked for row in rows)
    if any(row.regressions for row in rows):
        return "regressed"
    if has_failed or (lacks_some and not arguments.allow_unchecked):
        return "unchecked"
    return "passed"


def _differences(chosen: ChosenPairs) -> Sequence[Changed]:
    """The keys of the fingerprints that differ between two runs, and may matter."""
    if chosen.a is chosen.b:
        return []
    a, b = chosen.a.first.manifest.node, chosen.b.first.manifest.node
    return differences(a.fingerprint, b.fingerprint)


def _remarks(chosen: ChosenPairs, rows: Sequence[ComparedPair]) -> list[str]:
    """What is to say of the cells of both sides."""
    from bench.judge.caveats import remarks

    cells = []
    for row in rows:
        cells.append((chosen.a.first.manifest, row.a))
        cells.append((chosen.b.first.manifest, row.b))
    return remarks(cells)


def _further_notes(alone: Mapping[str, Sequence[str]], gate: str | None) -> list[str]:
    """What ``--json`` has under keys of its own."""
    notes = []
    for key, labels in alone.items():
        if labels:
            notes.append(f"only in {key[-1].upper()}: {', '.join(labels)}")
    if gate is not None:
        notes.append(WORDS[gate])
    return notes


def _facts(report: Report, control: Interval | None) -> dict[str, object]:
    """The A/A pair, the fingerprints and the cells, for ``--json``."""
    from bench.judge.pairs import record

    of_control = None
    if control is not None:
        of_control = dataclasses.asdict(control)
        del of_control["freedom"]
    return {
        "control": of_control,
        "fingerprint": [dataclasses.asdict(changed) for changed in report.differences],
        "cells": [record(row) for row in report.rows],
    }


def _chosen(arguments: argparse.Namespace) -> ChosenPairs:
    if arguments.backend is not None or arguments.against is not None:
        return _backends_of_pool(arguments)
    if len(arguments.runs) == 1:
        return _commits_of_run(arguments)
    if len(arguments.runs) > 2:
        raise InputError(
            f"{arguments.runs[2]}: is a third run, and two are compared; put the runs of a side "
            "into one folder"
        )
    return _two_runs(arguments)


def _two_runs(arguments: argparse.Namespace) -> ChosenPairs:
    from bench.judge.pairs import pairs_of_runs
    from bench.judge.pool import load_pool

    first, second = arguments.runs
    a, b = load_pool([first]), load_pool([second])
    pairs = []
    for pair in pairs_of_runs(a.first, b.first):
        if a.has(pair.a) and b.has(pair.b):
            pairs.append(pair)
    if not pairs:
        raise InputError(
            f"{first} and {second}: have no common cell; run the same matrix on both sides"
        )
    return ChosenPairs(a=a, b=b, pairs=pairs, names=(a.first.name, b.first.name))


def _commits_of_run(arguments: argparse.Namespace) -> ChosenPairs:
    """The two commits of ``run --against``."""
    from bench.judge.pairs import pairs_of_commits
    from bench.judge.pool import load_pool

    pool = load_pool(arguments.runs)
    pairs = pairs_of_commits(pool)
    if not pairs:
        raise InputError(
            f"{arguments.runs[0]}: is one run; name a second one, or two of its backends with "
            "--backend and --against"
        )
    now = "the running code"
    commit = pool.first.manifest.git.commit
    if commit:
        now = f"commit {commit[:12]}"
    names = (f"commit {pairs[0].a.other_commit}", now)
    return ChosenPairs(a=pool, b=pool, pairs=pairs, names=names)


def _backends_of_pool(arguments: argparse.Namespace) -> ChosenPairs:
    from bench.judge.pairs import pairs_of_backends
    from bench.judge.pool import load_pool

    pool = load_pool(arguments.runs)
    run = pool.first
    known = sorted({cell.backend for cell in run.cells.values()})
    for option, name in (("--backend", arguments.backend), ("--against", arguments.against)):
        if name is None:
            raise InputError(
                f"{option}: is missing; name the two backends with --backend and --against"
            )
        if name not in known:
            raise InputError(
                f"{option}: '{name}' is not in the run {run.name}; {suggest(name, known)}"
            )
    if arguments.backend == arguments.against:
        raise InputError(f"--against: '{arguments.against}' is --backend too; name another one")
    pairs = pairs_of_backends(run, arguments.against, arguments.backend)
    if not pairs:
        raise InputError(
            f"{arguments.runs[0]}: {arguments.backend} and {arguments.against} have no cell that "
            "differs in the backend alone; compare others"
        )
    names = (f"{arguments.against} of {run.name}", f"{arguments.backend} of {run.name}")
    return ChosenPairs(a=pool, b=pool, pairs=pairs, names=names)
