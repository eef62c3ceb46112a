"""The page on claims: it is what the committed measurements say, and a verdict follows its measurement."""

from __future__ import annotations

import copy

import pytest

from tests.studies.claims import CLAIMS, DOCS, FALSE, TRUE, Claim, Measured, page


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured.load()


def test_the_page_is_what_the_committed_measurements_say(measured: Measured) -> None:
    assert DOCS.read_text() == page(measured), "nox -s results -- claims writes it again"


def test_a_verdict_follows_its_measurement(measured: Measured) -> None:
    """Lightning with DeepSpeed as it would be without its defects, and probes with the opposite result."""
    suite, probes = copy.deepcopy(measured.suite), copy.deepcopy(measured.probes)
    by_name = {(one["scenario"]["name"], one["backend"]): one for one in suite}
    for (name, backend), one in by_name.items():
        if backend.startswith("lightning-deepspeed"):
            right = by_name[name, "lightning-ddp" if name != "partial-window" else "ddp-eager"]
            one.update(updates=right["updates"], optimizer_steps_observed=right["optimizer_steps_observed"])
            one.update(samples_lost=0, steps_reported=by_name[name, "lightning-ddp"]["steps_reported"])
    probes["both_defined"]["optimizer"] = probes["both_defined"]["neither"]
    probes["unscaled"]["SGD"]["distance"] = 0.0
    probes["equal_n"] = ""
    other = Measured(measured.about, suite, measured.rates, measured.versions, probes)
    judged = {claim.text: (claim.judge(measured)[0], claim.judge(other)[0]) for claim in _claims()}
    assert judged["Lightning hands control of accumulation completely to DeepSpeed."] == (FALSE, TRUE)
    assert judged["It is normal cooperation of two frameworks, not a defect."] == (FALSE, TRUE)
    assert judged["Keep N equal in the Trainer and in DeepSpeed's config."] == (FALSE, TRUE)
    assert judged["Define optimizer and scheduler only in `configure_optimizers`."] == (TRUE, FALSE)
    assert judged["The loss must be scaled by 1/N."] == (TRUE, FALSE)
    assert judged["`strategy.optimizer_step` runs for every batch."] == ("true only under DeepSpeed", FALSE)


def _claims() -> list[Claim]:
    return [claim for claims in CLAIMS.values() for claim in claims]
