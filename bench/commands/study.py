"""``study``: how often verdicts and intervals are right, on simulated trials with the noise of real ones."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import BAD, GOOD, InputError
from bench.folders import RESULTS

if TYPE_CHECKING:
    from bench.report.study import Results

DESCRIPTION = (
    "Simulates runs with noise fitted from a real journal, takes them through the whole pipeline of warm-up, repeats, "
    "noise floor, intervals and verdicts, and reports how often these are right, next to the rules of asv, hyperfine "
    "and pyperf on the same data. The same seed gives the same numbers. Exit status 1 if a target is missed."
)
DEFAULT_SEED, DEFAULT_REPORTS = 4, 400
LEAST_REPORTS = 10
REAL = RESULTS / "noise"
"""Runs on a real machine, kept with the project; a page shows them."""


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "study", help="how often verdicts and intervals are right, by simulation", description=DESCRIPTION
    )
    option = parser.add_argument
    option("--seed", type=_integer(0), default=DEFAULT_SEED, metavar="S", help="of the noise (default: %(default)s)")
    option(
        "--scenarios",
        type=_integer(LEAST_REPORTS),
        default=DEFAULT_REPORTS,
        metavar="N",
        help="simulated reports of 4 comparisons, per kind of noise (default: %(default)s)",
    )
    option("--out", type=Path, metavar="DIR", help="write the tables there: rates.csv, verdicts.csv and more")
    option("--real", action="store_true", help=f"measure {REAL} first: runs on this machine whose verdicts are known")
    option("--docs", type=Path, metavar="FILE", help="write the page, docs/statistics.md, and its plot beside it")
    parser.set_defaults(command=run)


def _integer(least: int) -> Any:
    """Reads an integer, not below ``least``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"'{text}' is not an integer from {least} on")
        return number

    return read


def run(arguments: argparse.Namespace) -> int:
    """Simulate and show; 1 if a target is missed."""
    if arguments.docs and arguments.docs.suffix != ".md":
        raise InputError(f"--docs {arguments.docs}: is not the name of a page; name one such as docs/statistics.md")
    for name, folder in (("--out", arguments.out), ("--docs", arguments.docs and arguments.docs.parent)):
        try:
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{name} {folder}: cannot be written ({error.strerror}); name one that can") from error

    if arguments.real:
        measure()

    from rich.console import Console

    from bench.report import study as report

    notes = Console(stderr=True)
    begun = time.perf_counter()
    results = simulate(arguments.scenarios, arguments.seed, whole=bool(arguments.out or arguments.docs))
    console = Console(width=max(150, Console().width))  # better wrapped by the terminal than cut off
    console.print(report.table(results.outcome))
    misses = report.misses(results.outcome)
    for miss in misses:
        console.print(f"missed: {miss}", highlight=False, soft_wrap=True)
    if not misses:
        console.print("all targets are met", highlight=False)
    notes.print(f"took {time.perf_counter() - begun:.0f} s", highlight=False)
    try:
        written = write(results, arguments.out, arguments.docs)
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be written ({error.strerror}); name one that can") from error
    for path in written:
        notes.print(f"written: {path}", highlight=False, soft_wrap=True)
    return BAD if misses else GOOD


def measure() -> None:
    """The runs on this machine, one after the other; those that are finished are kept."""
    from rich.console import Console

    from bench import realtrials
    from bench.report.display import Display

    for number in range(realtrials.RUNS):
        with Display(Console(stderr=True), {}) as display:
            display.say(f"run {number + 1} of {realtrials.RUNS}")
            realtrials.measure(REAL, number, display)


def simulate(reports: int, seed: int, *, whole: bool) -> Results:
    """The study; with ``whole`` also the simulations that only the page shows."""
    import pandas as pd

    from bench.analysis import choices, study
    from bench.report.study import Results

    outcome = study.study(reports, seed)
    if not whole:
        none = pd.DataFrame()
        return Results(outcome, none, none, none, none, none, reports, seed)
    return Results(
        outcome,
        precisions=study.precisions((0.04, 0.03, 0.02), reports, seed),
        limits=study.limits((10, 20, 40, 100, 200), reports, seed),
        sizes=study.sizes((1, 4, 10), reports, seed),
        intervals=choices.intervals(min(1000, 4 * reports), seed),
        warmup=choices.warmup_rules(min(2000, 8 * reports), seed),
        reports=reports,
        seed=seed,
    )


def write(results: Results, out: Path | None, docs: Path | None) -> list[Path]:
    """The tables into a folder, and the page with its plot; returns the paths."""
    import matplotlib.style

    from bench.analysis.known import read
    from bench.analysis.simulation import FITTED
    from bench.report import study as report
    from bench.report import style
    from bench.report.spreadsheet import write_csv

    written = []
    if out:
        frames = {
            "rates": results.outcome.rates,
            "verdicts": results.outcome.counts,
            "precisions": results.precisions,
            "limits": results.limits,
            "sizes": results.sizes,
            "intervals": results.intervals,
            "warmup": results.warmup,
        }
        for name, frame in frames.items():
            written.append(out / f"{name}.csv")
            write_csv(frame, written[-1])
    if docs:
        command = "python -m bench study --docs docs/statistics.md"
        extra = (("--scenarios", results.reports, DEFAULT_REPORTS), ("--seed", results.seed, DEFAULT_SEED))
        command += "".join(f" {name} {value}" for name, value, default in extra if value != default)
        drawing = report.draw(results, FITTED.name)
        with matplotlib.style.context(list(style.BASE)):
            pictures = style.save(drawing.figure, docs.with_suffix(""), drawing.words)
        known = list(read(REAL)) if REAL.exists() else []
        docs.write_text(report.page(results, command, pictures[0].name, known), encoding="utf-8")
        written += [docs, *pictures]
    return written
