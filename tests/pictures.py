"""The pictures that plots are held against. ``python -m tests.pictures`` draws them anew: then look at them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.judge.loading import load
from bench.report import figures
from bench.report.report_data import ReportData
from tests.pages import write_run

FOLDER = Path(__file__).parent / "pictures"
FACTORS = {"alpha-eager": 1.0, "alpha-deferred": 0.8, "beta-eager": 1.1, "beta-deferred": 1.004, "gamma": 1.3}


def _fate(cell: Any, repeat: int) -> tuple[str, str] | None:
    return ("oom", "rank 0: out of memory") if cell.backend == "gamma" and cell.accumulate == 8 else None


def draw(folder: Path) -> list[Path]:
    """All figures of the made run, as PNG, into the folder."""
    with tempfile.TemporaryDirectory() as place:
        run = load(write_run(Path(place) / "pictures", FACTORS, accumulate=(1, 2, 8), fate=_fate))
        drawn = figures.draw(ReportData(run=run), folder)
    for path in drawn:
        if path.suffix != ".png":
            path.unlink()
    return sorted(path for path in drawn if path.suffix == ".png")


if __name__ == "__main__":
    for old in FOLDER.glob("*.png"):
        old.unlink()
    for path in draw(FOLDER):
        print(path)
