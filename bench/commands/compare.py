"""``compare``: two runs, or two backends of one run, cell by cell: verdicts, and regressions for use in CI.

With ``--json`` one object:

- ``a``, ``b``: the baseline and what is compared with it, each with ``run_id`` and ``backend`` (null for whole runs);
- ``margin``, ``thresholds``: as given, 0.05 for 5 %; ``floor``: the ratio of the A/A pair with its interval, of two
  runs the one that is farther from 1; null if a run has none;
- ``fingerprint``: the keys that differ between the runs, each with ``key``, ``a`` and ``b``;
- ``cells``: one per pair (bench.judge.pairs.record): ``cell``, its ``group``, ``cell_id_a`` and ``_b``,
  ``backend_a`` and ``_b``; ``verdict`` on B, ``reason``, ``detail``, ``next``: what to do; ``forced``: whether numbers
  are given although the two are not comparable; ``ratio``: step time of B over that of A, with the 95 % interval
  ``low`` to ``high`` (null without one, and ``no_interval`` says why), ``num_trials``, ``paired``, ``p_different`` and
  ``p_same`` after Holm's correction; ``peak_memory_a_bytes``, ``_b_bytes``, ``_verdict`` (equal, more, fewer,
  unknown: of B) and ``_ratio``; ``optimizer_steps_a``, ``_b`` and ``_verdict``; ``regressions`` and ``unchecked``:
  which of the thresholds are certainly exceeded, and which could not be checked;
- ``only_a``, ``only_b``: cells without a partner; ``notes``: sentences; ``regressed``: whether any cell has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.commands.options import share
from bench.errors import BAD, GOOD, InputError, suggest

if TYPE_CHECKING:
    from bench.judge.loading import Run
    from bench.judge.pairs import Pair
    from bench.report.comparison import Report

METRICS = ("slower", "memory")
DESCRIPTION = (
    "Compares run B with run A, the baseline: the cells that both have; or, of one run, --backend with --against: the "
    "cells that are equal but for the backend. Exit status 1 if --fail-on is given and a cell of B is certainly worse "
    "by more than it allows."
)
WIDTH = 150


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "compare", help="compare two runs, or two backends of one run", description=DESCRIPTION.replace("%", "%%")
    )
    option = parser.add_argument
    option("a", type=Path, metavar="A", help="folder of the run that is the baseline")
    option("b", type=Path, nargs="?", metavar="B", help="folder of the run that is compared with it")
    option("--backend", metavar="X", help="of one run: the backend that is compared")
    option("--against", metavar="Y", help="of one run: the backend that is the baseline")
    option(
        "--fail-on",
        type=_thresholds,
        default={},
        metavar="METRIC=P[,METRIC=P]",
        help="exit status 1 if a step time or a peak memory is certainly worse by more, such as slower=5%%,memory=2%%",
    )
    option("--margin", type=_margin, metavar="P", help="a ratio this near to 1 is called the same (default: 2%%)")
    option("--force", action="store_true", help="also show the numbers of what is not comparable, crossed out")
    option("--json", action="store_true", help="one JSON object; its keys: see bench/commands/compare.py")
    option("--out", type=Path, metavar="DIR", help="write compare.parquet, compare.md and the forest plot there")
    parser.set_defaults(command=run)


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
            raise argparse.ArgumentTypeError(f"'{name}' is unknown; {suggest(name, METRICS)}, such as slower=5%")
        if not equals:
            raise argparse.ArgumentTypeError(f"'{name}' has no threshold; write {name}=5%")
        if name in found:
            raise argparse.ArgumentTypeError(f"'{name}' is given twice; leave out one")
        found[name] = share(value)
    return found


def run(arguments: argparse.Namespace) -> int:
    """Compare and show; 1 if something has certainly regressed."""
    from bench.judge import pairs as judge_pairs
    from bench.judge.pairs import partnerless
    from bench.judge.remarks import remarks
    from bench.judge.standing import floor_of_runs
    from bench.judge.statistics import MARGIN
    from bench.report import comparison
    from bench.report.comparison import notes_on
    from bench.run import machine

    a, b, pairs, titles = _chosen(arguments)
    margin = MARGIN if arguments.margin is None else arguments.margin
    never = [pair for pair in pairs if not (judge_pairs.measured(a, pair.a) or judge_pairs.measured(b, pair.b))]
    pairs = [pair for pair in pairs if pair not in never]
    if not pairs:
        raise InputError(f"{arguments.a}: every common cell is unsupported on both sides, so nothing was measured")
    if arguments.out:
        _make(arguments.out)
    floor, unsure = floor_of_runs(a, b)
    rows = judge_pairs.judge_pairs(
        a, b, pairs, thresholds=arguments.fail_on, margin=margin, force=arguments.force, floor=floor
    )
    about: dict[str, Any] = {
        "a": {"run_id": a.name, "backend": arguments.against},
        "b": {"run_id": b.name, "backend": arguments.backend},
        "margin": margin,
        "thresholds": arguments.fail_on,
        "floor": None if floor is None else dataclasses.asdict(floor),
    }
    unlike = [] if a is b else machine.differences(a.manifest, b.manifest)
    alone = partnerless(a, b, pairs, never, arguments)
    remarked = remarks(side for row in rows for side in ((a.manifest, row.pair.a), (b.manifest, row.pair.b)))
    said = [*unsure, *notes_on(a, b, rows, never, arguments.fail_on, margin)]
    lonely = [f"only in {key[-1].upper()}: {', '.join(labels)}" for key, labels in alone.items() if labels]
    report = comparison.Report(
        a=titles[0],
        b=titles[1],
        rows=rows,
        differences=unlike,
        remarks=remarked,
        notes=[*said, *lonely],
        margin=margin,
        threshold=arguments.fail_on.get("slower"),
    )
    if arguments.json:
        facts = {
            **about,
            "fingerprint": [{"key": one.key, "a": one.a, "b": one.b} for one in unlike],
            "cells": [judge_pairs.record(row) for row in rows],
            **alone,
            "notes": [*remarked, *said],
            "regressed": any(row.regressions for row in rows),
        }
        print(json.dumps(facts, allow_nan=False))
    else:
        _show(report)
    if arguments.out:
        _write(arguments.out, report)
    return BAD if any(row.regressions for row in rows) else GOOD


def _chosen(arguments: argparse.Namespace) -> tuple[Run, Run, list[Pair], tuple[str, str]]:
    """Both sides, their pairs, and what to call them."""
    from bench.judge import pairs as judge_pairs
    from bench.judge.loading import load

    backends = (arguments.backend, arguments.against)
    if arguments.b is None:
        if None in backends:
            raise InputError(
                f"{arguments.a}: is one run; name a second one, or two of its backends with --backend and --against"
            )
        one = load(arguments.a)
        for option, name in (("--backend", arguments.backend), ("--against", arguments.against)):
            _check_backend(one, option, name)
        if arguments.backend == arguments.against:
            raise InputError(f"--against: '{arguments.against}' is --backend too; name another one")
        pairs = judge_pairs.pairs_of_backends(one, arguments.against, arguments.backend)
        if not pairs:
            raise InputError(
                f"{arguments.a}: {arguments.backend} and {arguments.against} have no cell that differs in the backend "
                "alone; compare others"
            )
        return one, one, pairs, (f"{arguments.against} of {one.name}", f"{arguments.backend} of {one.name}")
    for option, name in (("--backend", arguments.backend), ("--against", arguments.against)):
        if name is not None:
            raise InputError(f"{option}: is for one run, and two are named; leave out {option} or {arguments.b}")
    a, b = load(arguments.a), load(arguments.b)
    pairs, apart = judge_pairs.pairs_of_runs(a, b), judge_pairs.pairs_apart(a, b)
    if not pairs and not (apart and arguments.force):
        near = (
            f"; {apart[0].name} is on both sides in another precision or accumulation dtype: --force shows "
            "such pairs crossed out"
            if apart
            else "; run the same matrix on both sides"
        )
        raise InputError(f"{arguments.a} and {arguments.b}: have no common cell{near}")
    return a, b, [*pairs, *apart], (a.name, b.name)


def _check_backend(one: Run, option: str, name: str) -> None:
    known = sorted({cell.backend for cell in one.cells.values()})
    if name not in known:
        raise InputError(f"{option}: '{name}' is not in the run {one.name}; {suggest(name, known)}")


def _show(report: Report) -> None:
    """Table and words on the terminal."""
    from rich.console import Console
    from rich.text import Text

    from bench.report import comparison

    console = Console(width=max(WIDTH, Console().width))  # better wrapped by the terminal than cut off
    console.print(Text(comparison.headline(report)), soft_wrap=True)
    for line in comparison.alarm(report.differences):
        console.print(Text(line, style="bold red"), soft_wrap=True)
    for title, rows in comparison.groups(report.rows):
        console.print(comparison.table(title, rows))
    for line in [*comparison.reasons(report.rows), "", *report.remarks, *report.notes]:
        console.print(Text(line), soft_wrap=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(f"--out {folder}: cannot be written ({error.strerror or error}); name a folder that can")


def _write(folder: Path, report: Report) -> None:
    """Table, page and plots."""
    import matplotlib.style
    from rich.console import Console

    from bench.report import comparison, forest, sheet, style

    table, page = folder / "compare.parquet", folder / "compare.md"
    written = [table, page]
    try:
        comparison.frame(report.rows).to_parquet(table, index=False)
        drawings = forest.draw(report)
        with matplotlib.style.context(list(style.BASE)):
            for drawing in drawings:
                written += sheet.save(drawing.figure, folder / drawing.stem, drawing.words)
        page.write_text(comparison.markdown(report, [f"{one.stem}.png" for one in drawings]), encoding="utf-8")
    except OSError as error:
        raise _unwritable(folder, error) from error
    names = ", ".join(path.name for path in written)
    Console(stderr=True).print(f"written: {names} to {folder}", highlight=False, markup=False, soft_wrap=True)
