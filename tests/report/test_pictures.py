"""Plots look as they did when somebody looked at them.

``python -m tests.report.test_pictures`` draws the pictures that they are held against anew: then look at them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.style
import pytest
from matplotlib.testing.compare import compare_images

from bench.judge.analysis import Analysis
from bench.judge.loading import load
from bench.report import figures, style
from tests.pages import write_run

FOLDER = Path(__file__).parents[1] / "pictures"
FACTORS = {
    "alpha-eager": 1.0,
    "alpha-deferred": 0.8,
    "beta-eager": 1.1,
    "beta-deferred": 1.004,
    "gamma": 1.3,
}
DPI = 75
TOLERANCE = 1.0
"""Root of the mean square of 256 grey values: no line may move; how its edge is smoothed may differ."""


def fails(cell: Any, repeat: int) -> dict[str, str]:
    failed = cell.backend == "gamma" and cell.accumulate == 8
    return {"status": "oom", "reason": "rank 0: out of memory"} if failed else {}


def draw(folder: Path) -> None:
    run = load(write_run(folder / "run", FACTORS, accumulate=(1, 2, 8), changes=fails))
    with matplotlib.style.context(list(style.BASE)):
        for drawing in figures.figures(Analysis(run=run)):
            drawing.figure.savefig(folder / f"{drawing.stem}.png", dpi=DPI)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    draw(folder)
    return folder


def test_all_are_drawn(drawn: Path) -> None:
    names = sorted(path.name for path in FOLDER.glob("*.png"))
    assert names == sorted(path.name for path in drawn.glob("*.png")) and len(names) >= 7


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.png")))
def test_it_looks_as_it_did(drawn: Path, name: str) -> None:
    assert compare_images(str(FOLDER / name), str(drawn / name), TOLERANCE) is None


if __name__ == "__main__":
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        draw(Path(place))
        shutil.rmtree(FOLDER)
        shutil.copytree(place, FOLDER, ignore=shutil.ignore_patterns("run"))
