"""The study of links: on runs whose steps are known, and what ``predict`` says of its estimates on committed ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.forecast.from_run import measured_link
from bench.forecast.prediction_text import EstimateAccuracy
from bench.judge.loading import load
from studies import links
from tests import legible
from tests.conftest import ROOT
from tests.forecast.test_from_run import COMPUTE_S, LATENCY_S, WITHIN, sent_s, write

FALLING = (2e8, 1e8, 2e7)
"""Bytes per second between the hosts of runs that are made up."""


def test_page_and_picture_say_where_deferring_pays(tmp_path: Path) -> None:
    """At 20 MB/s eager DDP with N = 4 takes 1.3 times what it should; elsewhere nothing is hidden, as predicted."""
    rates = dict(zip(links.RATES, FALLING, strict=True))
    study = links.Study(
        [
            load(write(tmp_path / name, speed, 1.3 if speed == 2e7 else 1.0))
            for name, speed in rates.items()
        ]
    )
    assert study.rates == pytest.approx(FALLING, rel=1e-3)
    ((latency_s, within),) = {(link.latency_s, link.intra_bytes_per_s) for link in study.links}
    assert (latency_s, within) == pytest.approx((LATENCY_S, WITHIN), rel=1e-3), (
        "the same in all runs"
    )
    text = "\n".join(links.page(study, "picture.png"))
    ratios = [(COMPUTE_S + sent_s(speed)) / (COMPUTE_S + 4 * sent_s(speed)) for speed in FALLING]
    shown = [
        f"{found:.2f} ({found:.2f} to {found:.2f}) ambiguous"
        for found in (*ratios[:2], ratios[2] / 1.3)
    ]
    row = f"| ddp-deferred | 4 | {shown[0]} | {shown[1]}; {ratios[1]:.2f} | {shown[2]}; {ratios[2]:.2f} |"
    assert row in text, "without an A/A pair there is no verdict"
    assert "| 200mbit | 2 | 0 | 1 | +15 % (+0 % to +30 %) |" in text
    drawing = links.draw(study)
    told = re.findall(r"(\d) of (\d) pairs at (\d+) MB/s", drawing.words.title)
    assert told == [("0", "1", "20"), ("0", "1", "100"), ("0", "1", "200")]
    assert drawing.words.title.startswith("With N > 1, deferring ")
    assert drawing.words.footer.startswith("runs unlimited, 1gbit and 200mbit; machine: ")
    assert "not to scale" in drawing.words.notes[0] and "side by side" in drawing.words.notes[0]
    legible.assert_legible(drawing.figure)


def test_rates_that_do_not_fall_as_the_limits_do_are_refused(tmp_path: Path) -> None:
    runs = [
        load(write(tmp_path / name, speed, 1.0))
        for name, speed in zip("abc", (2e8, 2e7, 1e8), strict=True)
    ]
    with pytest.raises(SystemExit, match="do not fall as the limits do"):
        links.Study(runs)


def test_what_predict_says_of_its_estimates_is_what_the_study_counts_in_all_committed_runs() -> (
    None
):
    committed = [
        load(ROOT / "results" / name)
        for name in (*(f"links/{name}" for name in links.RATES), *links.OTHERS)
    ]
    study = links.Study(committed[:3], committed[3:])
    assert EstimateAccuracy.stored() == links.stored_accuracy(study)
    for number, alone in enumerate(measured_link(run.manifest) for run in committed[:3]):
        assert alone is not None and alone.bytes_per_s == pytest.approx(
            study.links[number].bytes_per_s, rel=0.1
        )
    for cell in study.times[0]:
        steps = [study.predicted(cell, number) for number in range(3)]
        assert steps == sorted(steps), f"{cell.label} would be faster on a slower link"
    (page,) = (ROOT / "results/links").glob("*.md")
    assert "\n".join(
        links.page(study, "../../plots/links/deferring_by_link.png")
    ) == page.read_text(encoding="utf-8")
