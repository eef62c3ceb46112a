"""``python -m studies``: how often verdicts and intervals are right, and docs/statistics.md that says so.

Reports are made of the noise of the committed runs and judged by the bench's own rule, beside a paired t-test and the
rules of asv, hyperfine and pyperf; pools of runs are made of all runs that are kept. Beside them stand real runs whose
verdicts are known, those of results/noise and results/planted. The same seed gives the same numbers. What runs of
different days differ by is written to bench/judge/run_spread.json, too, for reports of a single run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bench.judge import run_spread
from studies import ROOT, choices, page, pools, realtrials, study, trial_noise
from studies.page import Results

DOCS = ROOT / "docs" / "statistics.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, and write the page, which says what is not met."""
    parser = argparse.ArgumentParser(
        prog="python -m studies", description=str(__doc__).partition("\n\n")[2]
    )
    words = "simulated reports per row (default: %(default)s)"
    parser.add_argument("--reports", type=int, default=study.REPORTS, metavar="N", help=words)
    words = "simulated pools of runs per row (default: %(default)s)"
    parser.add_argument("--pools", type=int, default=pools.POOLS, metavar="N", help=words)
    arguments = parser.parse_args(argv)
    found = simulate(arguments.reports, arguments.pools)
    write(found, DOCS)
    text = json.dumps([pools.spread(found.sets)], indent=1)
    run_spread.STORED.write_text(f"{text}\n", encoding="utf-8")
    print(f"written: {DOCS}, {run_spread.STORED}")
    return 0


def simulate(reports: int, num_pools: int) -> Results:
    """The study, and what speaks for the choices of method."""
    noises, sets = list(trial_noise.sources()), pools.kept()
    return Results(
        noises,
        rates=study.study(noises, reports),
        rivals=study.rivals(noises[0], reports),
        intervals=choices.intervals(noises, reports, study.SEED),
        sets=sets,
        elsewhere=pools.elsewhere(),
        pools=pools.study(sets, num_pools),
        reports=reports,
        num_pools=num_pools,
    )


def write(results: Results, docs: Path) -> None:
    chosen = "" if results.reports == study.REPORTS else f" --reports {results.reports}"
    chosen += "" if results.num_pools == pools.POOLS else f" --pools {results.num_pools}"
    known, planted = (list(realtrials.read(folder)) for folder, _ in realtrials.DESIGNS.values())
    docs.write_text(
        page.page(results, f"python -m studies{chosen}", known, planted), encoding="utf-8"
    )


if __name__ == "__main__":
    raise SystemExit(main())
