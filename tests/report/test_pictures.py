"""Plots look as they did when somebody looked at them."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.testing.compare import compare_images

from tests.pictures import FOLDER, draw

TOLERANCE = 1.0
"""Root of the mean square of 256 grey values: no line may move; how its edge is smoothed may differ."""


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
