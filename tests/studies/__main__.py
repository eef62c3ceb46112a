"""``python -m tests.studies``: how often verdicts and intervals are right, and docs/statistics.md that says so.

Simulates runs with noise fitted from a real journal, takes them through the whole pipeline of warm-up, repeats, noise
floor, intervals and verdicts, and reports how often these are right, beside the rules of asv, hyperfine and pyperf on
the same data. Runs on this machine whose verdicts are known are measured first, where they are not there yet. The same
seed gives the same numbers. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib.style
from rich.console import Console

from bench.errors import BAD, GOOD
from bench.report import sheet, style
from bench.report.formats import write_frame
from bench.report.progress import Display
from tests.conftest import ROOT
from tests.studies import choices, page, realtrials, study
from tests.studies.known import read
from tests.studies.page import Results
from tests.studies.simulation import FITTED

DOCS = Path("docs/statistics.md")
REAL = ROOT / "results" / "noise"
"""Runs on a real machine, kept with the project; the page shows them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, simulate, write and show; 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="nox -s study --", description=str(__doc__).partition("\n\n")[2])
    option = parser.add_argument
    option("--seed", type=int, default=study.SEED, metavar="S", help="of the noise (default: %(default)s)")
    option(
        "--scenarios",
        type=int,
        default=study.REPORTS,
        metavar="N",
        help="simulated reports of 4 comparisons, per kind of noise; at least 10 (default: %(default)s)",
    )
    option(
        "--docs", type=Path, default=DOCS, metavar="FILE", help="the page, its plot beside it (default: %(default)s)"
    )
    option("--out", type=Path, metavar="DIR", help="write the tables there too: rates.csv, verdicts.csv and more")
    arguments = parser.parse_args(argv)
    notes = Console(stderr=True)
    for number in range(realtrials.RUNS):
        with Display(notes, {}) as display:
            realtrials.measure(REAL, number, display)
    begun = time.perf_counter()
    results = simulate(arguments.scenarios, arguments.seed)
    Console(width=max(150, Console().width)).print(page.table(results.outcome))  # better wrapped than cut off
    misses = page.misses(results.outcome)
    for miss in misses:
        print(f"missed: {miss}")
    notes.print(f"took {time.perf_counter() - begun:.0f} s", highlight=False)
    for path in write(results, arguments.docs, arguments.out):
        notes.print(f"written: {path}", highlight=False, soft_wrap=True)
    return BAD if misses else GOOD


def simulate(reports: int, seed: int) -> Results:
    """The study, and the simulations behind the choices of method."""
    return Results(
        study.study(reports, seed),
        precisions=study.precisions((0.04, 0.03, 0.02), reports, seed),
        limits=study.limits((10, 20, 40, 100, 200), reports, seed),
        sizes=study.sizes((1, 4, 10), reports, seed),
        intervals=choices.intervals(min(1000, 4 * reports), seed),
        warmup=choices.warmup_rules(min(2000, 8 * reports), seed),
        reports=reports,
        seed=seed,
    )


def write(results: Results, docs: Path, out: Path | None) -> list[Path]:
    """The page with its plot, and the tables into a folder; returns the paths."""
    extra = (("--scenarios", results.reports, study.REPORTS), ("--seed", results.seed, study.SEED))
    chosen = "".join(f" {name} {value}" for name, value, default in extra if value != default)
    drawing = page.draw(results, FITTED.name)
    docs.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.style.context(list(style.BASE)):
        pictures = sheet.save(drawing.figure, docs.with_suffix(""), drawing.words)
    command = f"nox -s study{' --' if chosen else ''}{chosen}"
    docs.write_text(page.page(results, command, pictures[0].name, list(read(REAL))), encoding="utf-8")
    written = [docs, *pictures]
    if out:
        out.mkdir(parents=True, exist_ok=True)
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
            write_frame(frame, written[-1])
    return written


if __name__ == "__main__":
    raise SystemExit(main())
