"""``compare``: two runs, or two backends of one run, cell by cell: verdicts, and regressions for use in CI.

With ``--json`` one object:

- ``a``, ``b``: the baseline and what is compared with it, each with ``run_id`` and ``backend`` (null for whole runs);
- ``margin``, ``thresholds``: as given, 0.05 for 5 %; ``control``: the ratio of the A/A pair with its interval, of two
  runs the one that is farther from 1; null if a run has none;
- ``fingerprint``: the keys that differ between the runs, each with ``key``, ``a`` and ``b``;
- ``cells``: one per pair, with the columns of the frame ``ratios`` (``python -m bench export RUN --table ratios``), and
  ``regressions`` and ``unchecked``: which of the thresholds are certainly exceeded, and which could not be checked;
- ``only_a``, ``only_b``: cells without a partner; ``newly_failed``: pairs of which trials failed in B and none in A;
  ``notes``: sentences; ``regressed``: whether any cell has; ``gate``: passed, regressed or unchecked, null without
  ``--fail-on``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from bench import files
from bench.commands.options import named, share
from bench.errors import BAD, GOOD, UNCHECKED, InputError, suggest
from bench.run.machine import differences

if TYPE_CHECKING:
    from bench.judge.pairs import Pair
    from bench.judge.pool import Pool

METRICS = ("slower", "memory")
DESCRIPTION = (
    "Compares run B with run A, the baseline: the cells that both have; or, of one run or several of one matrix, "
    "--backend with --against: the cells that are equal but for the backend. A folder of runs may stand for a run. Of "
    "a single run of 'run --against COMMIT', the two commits are compared. Of different days, a time is called slower "
    "only beyond what runs of this class of machines differ by."
)
GATE = (
    "Exit status with --fail-on: 0 everything was checked and nothing regressed; 1 something is certainly worse by "
    "more than is allowed; 3 nothing is, but a cell could not be checked, is missing in B, or failed in B alone. With "
    "--allow-unchecked only the last gives 3."
)
WORDS = {
    "passed": "gate: passed",
    "regressed": f"gate: regressed (exit status {BAD})",
    "unchecked": f"gate: not passed (exit status {UNCHECKED}): cells are unchecked, missing in B, or newly failed",
}
"""Of each end of a gate."""


def add(commands: Any) -> None:
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
        help="a gate for CI: no step time and no peak memory may be worse by more, such as slower=5%%,memory=2%%",
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
        name, equals, value = (word.strip() for word in part.partition("="))
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


def run(arguments: argparse.Namespace) -> int:
    from bench.judge import pairs as judge_pairs
    from bench.judge.caveats import remarks
    from bench.judge.statistics import MARGIN
    from bench.report import comparison

    limits, margin = arguments.fail_on, arguments.margin or MARGIN
    if arguments.allow_unchecked and not limits:
        raise InputError(
            "--allow-unchecked: is for a gate; give --fail-on too, such as --fail-on slower=5%"
        )
    a, b, every, titles = _chosen(arguments)
    pairs = [
        pair
        for pair in every
        if judge_pairs.measured(a.first, pair.a) or judge_pairs.measured(b.first, pair.b)
    ]
    if not pairs:
        raise InputError(
            f"{arguments.runs[0]}: every common cell is unsupported on both sides, so nothing was measured"
        )
    if arguments.out:
        with files.writing(f"--out {arguments.out}"):
            arguments.out.mkdir(parents=True, exist_ok=True)
    same = a is not b and a.digests == b.digests
    if same and not arguments.json:
        print(f"A and B are the same run, {a.first.name}: there is nothing to compare")
        return UNCHECKED if limits and not arguments.allow_unchecked else GOOD
    control, control_n, notes = comparison.controls(a, b)
    rows = judge_pairs.judge_pairs(a, b, pairs, thresholds=limits, margin=margin, control=control)
    alone = judge_pairs.partnerless(a.first, b.first, every, (arguments.against, arguments.backend))
    failed = judge_pairs.newly_failed(a.first, b.first, pairs)
    notes += comparison.notes(
        a, b, rows, [pair for pair in every if pair not in pairs], limits, margin
    )
    notes += [f"failed in B and not in A: {', '.join(failed)}"] if failed else []
    gate, status = None, GOOD
    if limits:
        missed = same or any(row.unchecked for row in rows) or bool(alone["only_a"])
        gate, status = "passed", GOOD
        if any(row.regressions for row in rows):
            gate, status = "regressed", BAD
        elif failed or (missed and not arguments.allow_unchecked):
            gate, status = "unchecked", UNCHECKED
    report = comparison.Report(
        a=titles[0],
        b=titles[1],
        rows=rows,
        differences=[]
        if a is b
        else differences(a.first.manifest.node.fingerprint, b.first.manifest.node.fingerprint),
        remarks=remarks(
            side for row in rows for side in ((a.first.manifest, row.a), (b.first.manifest, row.b))
        ),
        notes=[
            *notes,
            *(
                f"only in {key[-1].upper()}: {', '.join(labels)}"
                for key, labels in alone.items()
                if labels
            ),
            *([WORDS[gate]] if gate else []),
        ],
        margin=margin,
        threshold=limits.get("slower"),
        num_runs=len(a.runs),
        is_of_days=a is not b,
        control_n=control_n,
    )
    if arguments.json:
        facts = {
            "a": {"run_id": a.first.name, "backend": arguments.against},
            "b": {"run_id": b.first.name, "backend": arguments.backend},
            "margin": margin,
            "thresholds": limits,
            "control": None if control is None else dataclasses.asdict(control),
            "fingerprint": [
                {"key": each.key, "a": each.a, "b": each.b} for each in report.differences
            ],
            "cells": [judge_pairs.record(row) for row in rows],
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
    return status


def _chosen(arguments: argparse.Namespace) -> tuple[Pool, Pool, list[Pair], tuple[str, str]]:
    """Both sides, their pairs, and what to call them."""
    from bench.judge.pairs import pairs_of_commits, pairs_of_runs
    from bench.judge.pool import load_pool

    named = {option: name for option, name in _backends(arguments).items() if name is not None}
    if named:
        return _backends_of_pool(arguments)
    if len(arguments.runs) == 1:
        pool = load_pool(arguments.runs)
        if pairs := pairs_of_commits(pool):
            commit, now = (
                pairs[0].a.other_commit,
                (pool.first.manifest.git.commit or "the running code")[:12],
            )
            return pool, pool, pairs, (f"commit {commit}", f"commit {now}")
        raise InputError(
            f"{arguments.runs[0]}: is one run; name a second one, or two of its backends with --backend and --against"
        )
    if len(arguments.runs) > 2:
        raise InputError(
            f"{arguments.runs[2]}: is a third run, and two are compared; put the runs of a side into one folder"
        )
    a, b = (load_pool([place]) for place in arguments.runs)
    pairs = [pair for pair in pairs_of_runs(a.first, b.first) if a.has(pair.a) and b.has(pair.b)]
    if not pairs:
        names = " and ".join(map(str, arguments.runs))
        raise InputError(f"{names}: have no common cell; run the same matrix on both sides")
    return a, b, pairs, (a.first.name, b.first.name)


def _backends(arguments: argparse.Namespace) -> dict[str, str | None]:
    return {"--backend": arguments.backend, "--against": arguments.against}


def _backends_of_pool(
    arguments: argparse.Namespace,
) -> tuple[Pool, Pool, list[Pair], tuple[str, str]]:
    from bench.judge.pairs import pairs_of_backends
    from bench.judge.pool import load_pool

    pool = load_pool(arguments.runs)
    run = pool.first
    known = sorted({cell.backend for cell in run.cells.values()})
    for option, name in _backends(arguments).items():
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
            f"{arguments.runs[0]}: {arguments.backend} and {arguments.against} have no cell that differs in the "
            "backend alone; compare others"
        )
    return (
        pool,
        pool,
        pairs,
        (f"{arguments.against} of {run.name}", f"{arguments.backend} of {run.name}"),
    )
