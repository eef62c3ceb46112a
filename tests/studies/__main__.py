"""``python -m tests.studies``: how often verdicts and intervals are right, and docs/statistics.md that says so.

Simulates runs with noise fitted from a real journal, takes them through the whole pipeline of warm-up, repeats, noise
floor, intervals and verdicts, and counts how often these are right, beside the rules of asv, hyperfine and pyperf on
the same data. Beside it stand real runs whose verdicts are known, those of results/noise. The same seed gives the
same numbers. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.errors import BAD, GOOD
from bench.report import canvas
from tests.conftest import ROOT
from tests.studies import choices, page, realtrials, study
from tests.studies.page import Results
from tests.studies.simulation import FITTED

DOCS = ROOT / "docs" / "statistics.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, and write the page; 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies", description=str(__doc__).partition("\n\n")[2])
    parser.add_argument(
        "--scenarios",
        type=int,
        default=study.REPORTS,
        metavar="N",
        help="simulated reports of 4 comparisons, per kind of noise; at least 10 (default: %(default)s)",
    )
    reports = parser.parse_args(argv).scenarios
    notes = Console(stderr=True)
    begun = time.perf_counter()
    results = simulate(reports)
    notes.print(f"took {time.perf_counter() - begun:.0f} s", highlight=False)
    for path in write(results, DOCS):
        notes.print(f"written: {path}", highlight=False, soft_wrap=True)
    misses = page.misses(results.outcome)
    for miss in misses:
        print(f"missed: {miss}")
    return BAD if misses else GOOD


def simulate(reports: int) -> Results:
    """The study, and the simulations behind the choices of method."""
    return Results(
        study.study(reports),
        precisions=study.precisions((0.04, 0.03, 0.02), reports),
        limits=study.limits((10, 20, 40, 100, 200), reports),
        sizes=study.sizes((1, 4, 10), reports),
        intervals=choices.intervals(min(1000, 4 * reports), study.SEED),
        warmup=choices.warmup_rules(min(2000, 8 * reports), study.SEED),
        reports=reports,
    )


def write(results: Results, docs: Path) -> list[Path]:
    """Write the page and the plot beside it; returns the paths."""
    chosen = "" if results.reports == study.REPORTS else f" --scenarios {results.reports}"
    drawing = page.draw(results, FITTED.name)
    picture = canvas.save(drawing.figure, docs.with_suffix(""), drawing.words)
    known = list(realtrials.read(realtrials.REAL))
    text = page.page(results, f"python -m tests.studies{chosen}", picture.name, known)
    docs.write_text(text, encoding="utf-8")
    return [docs, picture]


if __name__ == "__main__":
    raise SystemExit(main())
