"""``python -m studies``: how often verdicts and intervals are right, and docs/statistics.md that says so.

Reports are made of the noise of the committed runs and judged by the bench's own rule, beside a paired t-test and the
rules of asv, hyperfine and pyperf. Beside them stand real runs whose verdicts are known, those of results/noise. The
same seed gives the same numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from studies import ROOT, choices, page, realtrials, study, trial_noise
from studies.page import Results

DOCS = ROOT / "docs" / "statistics.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, and write the page, which says what is not met."""
    parser = argparse.ArgumentParser(prog="python -m studies", description=str(__doc__).partition("\n\n")[2])
    words = "simulated reports per row (default: %(default)s)"
    parser.add_argument("--reports", type=int, default=study.REPORTS, metavar="N", help=words)
    reports = parser.parse_args(argv).reports
    write(simulate(reports), DOCS)
    print(f"written: {DOCS}")
    return 0


def simulate(reports: int) -> Results:
    """The study, and what speaks for the choices of method."""
    noises = list(trial_noise.sources())
    return Results(
        noises,
        rates=study.study(noises, reports),
        rivals=study.rivals(noises[0], reports),
        intervals=choices.intervals(noises, reports, study.SEED),
        warmup=choices.warmup_rules(trial_noise.steps(), 2 * reports, study.SEED),
        reports=reports,
    )


def write(results: Results, docs: Path) -> None:
    chosen = "" if results.reports == study.REPORTS else f" --reports {results.reports}"
    known = list(realtrials.read(realtrials.REAL))
    docs.write_text(page.page(results, f"python -m studies{chosen}", known), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
