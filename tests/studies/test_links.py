"""The study of links, on runs whose steps are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.judge.loading import load
from tests import legible
from tests.forecast.test_from_run import COMPUTE_S, sent_s, write
from tests.studies import links


def test_page_and_picture_say_where_deferring_pays_and_how_far_predictions_are_off(tmp_path: Path) -> None:
    """At 20 MB/s eager DDP takes 1.3 times what it should; elsewhere nothing is hidden, as predicted."""
    rates = dict(zip(links.RATES, (2e8, 1e8, 2e7), strict=True))
    runs = [load(write(tmp_path / name, rate, 1.3 if rate == 2e7 else 1.0)) for name, rate in rates.items()]
    study = links.Study(runs)
    assert study.rates == pytest.approx(list(rates.values()))
    said = "\n".join(links.page(study, "picture.png"))
    ratios = [(COMPUTE_S + sent_s(rate)) / (COMPUTE_S + 4 * sent_s(rate)) for rate in rates.values()]
    measured = [f"{ratio / slower:.2f}" for ratio, slower in zip(ratios, (1, 1, 1.3), strict=True)]
    shown = [f"{found} ({found} - {found}); {ratio:.2f}" for found, ratio in zip(measured, ratios, strict=True)]
    assert f"| ddp-deferred | 4 | {' | '.join(shown)} | any |" in said
    # At 100 MB/s only eager sync with N = 4 communicates for longer than it computes, at 20 MB/s every cell.
    assert "In 5 cells of the runs with a limit" in said and "0 % in the median and by\n30 % at most. 4 reach" in said
    drawing = links.draw(study)
    legible.assert_legible(drawing.figure)
    assert drawing.data.query("run == '200mbit' and accumulate == 4")["upper_s"].tolist() == pytest.approx(
        [COMPUTE_S + sent_s(2e7), COMPUTE_S + 4 * sent_s(2e7)]
    )
