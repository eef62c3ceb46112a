"""Weight maps of handmade observations: one strip per distinct map, true to the coefficients, and legible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from bench.audit.weight_figure import LOST, NOT_COMPUTED, SIGNS, weight_figure
from bench.report.canvas import FigureWords
from tests.factories import make_observation
from tests.legible import assert_legible, words

Updates = list[dict[int, dict[int, float]]]
TWO_EPOCHS = {"samples": 12, "epochs": 2}
LONG = "a-backend-with-a-name-that-is-far-too-long-for-half-of-a-page-in-any-font-that-can-be-read"


def window(epoch: int, start: int, stop: int, coefficient: float) -> dict[int, dict[int, float]]:
    return {epoch: dict.fromkeys(range(start, stop), coefficient)}


FLUSHED: Updates = [
    window(e, a, b, c) for e in (0, 1) for a, b, c in ((0, 8, 1 / 8), (8, 12, 1 / 4))
]
UNDER: Updates = [window(e, a, b, 1 / 8) for e in (0, 1) for a, b in ((0, 8), (8, 12))]
CARRIED: Updates = [
    window(0, 0, 8, 1 / 8),
    window(0, 8, 12, 1 / 8) | window(1, 0, 4, 1 / 8),
    window(1, 4, 12, 1 / 8),
]
TWICE: Updates = [
    {e: {s: c / 4 for s, c in of.items()} for e, of in update.items()} for update in CARRIED
]
LOSING: Updates = [window(0, 0, 8, 1 / 32), window(1, 0, 4, 1 / 32)]
ENDLESS: Updates = [window(epoch, 0, 12, 1 / 12) for epoch in range(40)]

SCENES: dict[str, list[dict[str, Any]]] = {
    "partial": [
        make_observation("ddp-eager", FLUSHED, scenario=TWO_EPOCHS),
        make_observation("ddp-deferred", FLUSHED, scenario=TWO_EPOCHS),
        make_observation("carrying", CARRIED, [("carried over", "note")], scenario=TWO_EPOCHS),
        make_observation("miscounting", CARRIED, [("miscounted", "wrong")], scenario=TWO_EPOCHS),
        make_observation("under", UNDER, [("under-weighted", "wrong")], scenario=TWO_EPOCHS),
        make_observation("twice", TWICE, [("divided twice", "wrong")], scenario=TWO_EPOCHS),
        make_observation(
            "losing",
            LOSING,
            [("lost", "wrong"), ("miscounted", "wrong"), ("odd", "wrong")],
            scenario=TWO_EPOCHS,
            lost={"0": [8, 9, 10, 11]},
            left_open={"1": [4, 5, 6, 7, 8, 9, 10, 11]},
        ),
        make_observation("refusing", [], [("refused", "note")], scenario=TWO_EPOCHS),
    ],
    "one": [make_observation()],
    "endless": [
        make_observation("ddp-eager", ENDLESS[:2], scenario={"samples": 12, "epochs": None, "max_steps": 2}),
        make_observation("endless", ENDLESS, [("never stops", "wrong")], scenario={"samples": 12}, stopped="bound"),
    ],
    "many": [
        make_observation(f"backend-{i}", [window(0, 0, 8, (i + 1) / 64)] * (1 + i % 7), [("odd", "wrong")])
        for i in range(15)
    ],
    "names": [
        make_observation(f"{i}-{LONG}-$x^2$ \u4f60", scenario={"title": "costs $1 & <$2>"}) for i in range(3)
    ],
    "late": [
        make_observation(
            f"wrong-at-{at}",
            [window(0, i, i + 1, 0.5 if i == at - 1 else 1) for i in range(20)],
            scenario={"samples": 20, "fault": "exception", "at": 6},
        )
        for at in (3, 20)
    ],
    "large": [
        make_observation("large", [window(0, 0, 700, 1 / 700), window(1, 0, 700, 1 / 700)], scenario={"samples": 700})
    ],
}  # fmt: skip


def drawing(name: str) -> tuple[Figure, FigureWords]:
    found = weight_figure(SCENES[name], footer="made by a test")
    assert found is not None
    return found


def panels(name: str) -> list[Any]:
    return [axes for axes in drawing(name)[0].axes if axes.images]


@pytest.mark.parametrize("name", SCENES)
def test_nothing_overlaps_or_leaves_the_figure(name: str) -> None:
    assert_legible(drawing(name)[0])


def test_the_picture_is_the_coefficients() -> None:
    _, carried, _, twice, losing = panels("partial")
    expected = np.full((3, 24), np.nan)
    expected[0, :8] = expected[1, 8:16] = expected[2, 16:] = 1.0
    for axes, part in ((carried, 1), (twice, 1 / 4)):
        picture = np.ma.filled(axes.images[0].get_array(), np.nan)
        np.testing.assert_allclose(picture, expected * part)
    # Samples in no update are marked below.
    marked = {
        line.get_marker(): list(line.get_xdata()) for line in losing.lines if len(line.get_xdata())
    }
    assert marked == {"x": [8, 9, 10, 11], "o": list(range(16, 24))}
    shown = words(drawing("partial")[0])
    assert (
        shown.count("in none") == 1
        and SIGNS[LOST][1] in shown
        and SIGNS[NOT_COMPUTED][1] not in shown
    )
    assert "carried over 1 of 3: carrying\nmiscounted: miscounting" in shown and "sample" in shown
    assert "lost 4 of 24, miscounted and 1 more: losing" in shown
    assert drawing("partial")[1].notes[1:] == ["Without an update: refusing (refused)."]


def test_what_is_wrong_is_among_the_updates_that_are_drawn() -> None:
    shown, others = words(drawing("late")[0]), "of 20; sums of the others: 1.00"
    assert f"right: wrong-at-3\nupdates 1 to 16 {others}" in shown
    assert f"right: wrong-at-20\nupdates 5 to 20 {others}" in shown
    (note,) = drawing("late")[1].notes[1:]
    assert note.startswith("The epoch that raises ")
