"""``nox -s links``: step times against the rate of the link, measured and predicted, and docs/links.md that shows them.

Runs tests/studies/links.toml on two hosts of the rig at each rate, into results/links/<rate>, unless that run is
finished. Needs root and Debian's slurm-wlm, munge and iproute2, like ``nox -s hosts``; without them, or from a checkout
that has the runs, it draws them again. A run is a forecast's data only by its links, which it measures before its first
trial: compute is that of the run without a limit.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.errors import BAD, GOOD, INTERRUPTED
from bench.run.journal import MANIFEST, read_manifest
from tests.conftest import ROOT
from tests.hosts.rig import rig

MATRIX = Path(__file__).with_suffix(".toml")
RESULTS = ROOT / "results" / "links"
RATES = {"unlimited": "", "1gbit": "1gbit", "200mbit": "200mbit"}
"""The runs, each with what limits the link, as tc names it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, and write plot and page; 1 if a trial failed."""
    parser = argparse.ArgumentParser(prog="nox -s links --", description=str(__doc__).partition("\n\n")[2])
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the runs")
    arguments, options = parser.parse_known_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))  # the rig is removed on the way out
    measure(arguments.out, options)
    return GOOD


def measure(folder: Path, options: Sequence[str]) -> None:
    """Run the matrix at each rate that is not finished, with these further options of ``run``."""
    missing = [name for name in RATES if not _is_finished(folder / name)]
    if not missing:
        return
    with rig(2) as made:
        environment = {**os.environ, **made.environment, "OMP_NUM_THREADS": "1"}
        for name in missing:
            made.limit(RATES[name])
            path = folder / name
            how = ["--resume", path] if (path / MANIFEST).exists() else ["--matrix", MATRIX, *options, "--out", path]
            command = made.srun(2, sys.executable, "-m", "bench", "run", *map(str, how))
            if (status := subprocess.run(command, env=environment, check=False).returncode) not in (GOOD, BAD):
                raise SystemExit(status)


def _is_finished(folder: Path) -> bool:
    return (folder / MANIFEST).exists() and "finished" in read_manifest(folder)


if __name__ == "__main__":
    raise SystemExit(main())
