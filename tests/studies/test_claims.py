"""The page on claims: a verdict follows its measurement."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from studies import judges_torch
from studies.claims import CLAIMS, answer
from studies.measured import FALSE, TRUE, Measured

MEASURED = "(measured: DDP, FSDP2, DeepSpeed)"


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured.load()


def test_a_verdict_follows_its_measurement(measured: Measured) -> None:
    """Lightning with DeepSpeed as it would be without its defects, and probes with the opposite result."""
    suite, probes = copy.deepcopy(measured.suite), copy.deepcopy(measured.probes)
    by_name = {
        (observation["scenario"]["name"], observation["backend"]): observation
        for observation in suite
    }
    for (name, backend), observation in by_name.items():
        if backend.startswith("lightning-deepspeed"):
            right = by_name[name, "lightning-ddp" if name != "partial-window" else "ddp-eager"]
            observation.update(
                updates=right["updates"], optimizer_steps_observed=right["optimizer_steps_observed"]
            )
            observation.update(
                samples_lost=0, steps_reported=by_name[name, "lightning-ddp"]["steps_reported"]
            )
    probes["both_defined"]["optimizer"] = probes["both_defined"]["neither"]
    probes["unscaled"]["SGD"]["distance"] = 0.0
    probes["equal_n"] = ""
    weights = [dataclasses.replace(record, measured=record.right) for record in measured.by_version]
    other = Measured(
        measured.about, suite, measured.rates, measured.versions, probes, measured.zero3, weights
    )
    rows = {row["judge"]: row for claims in CLAIMS.values() for row in claims}
    judged = {name: (answer(row, measured)[0], answer(row, other)[0]) for name, row in rows.items()}
    for name in ("completely", "equal_n"):
        assert judged[name] == (FALSE, TRUE), name
    for name in ("configure_optimizers", "divided_twice", "scaled"):
        assert judged[name] == (TRUE, FALSE), name
    assert judged["every_batch"] == (f"true only under DeepSpeed {MEASURED}", FALSE)
    assert judged["hook"] == (f"true only without DeepSpeed {MEASURED}", TRUE)
    assert judged["offload_drops"] == (f"true only {rows['offload_drops']['only']}", FALSE)


def test_the_formula_of_samples_is_that_of_the_article(measured: Measured) -> None:
    """ceil(samples / (batch x N x GPUs)) counts what drop_last leaves out: 6, where every backend takes 4."""
    (row,) = [
        row for claims in CLAIMS.values() for row in claims if row["judge"] == "ceil_of_samples"
    ]
    verdict, text = answer(row, measured)
    assert verdict == FALSE and "6 by it and 4 by every backend" in text


def test_a_verdict_on_memory_asks_the_large_model_too(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were eager no lower at 8b, what the small model shows would be no verdict."""
    (row,) = [row for claims in CLAIMS.values() for row in claims if row["judge"] == "lower_peak"]
    assert answer(row, measured)[0] == f"true, except {row['only']}"
    monkeypatch.setattr(judges_torch.measured, "due_peak", lambda cell: 1.0)
    assert answer(row, measured)[0] == FALSE


def test_who_takes_no_step_for_a_partial_window_is_told_of_every_backend(
    measured: Measured,
) -> None:
    """Backends with offload are DeepSpeed's engine, too."""
    (row,) = [row for claims in CLAIMS.values() for row in claims if row["judge"] == "last_window"]
    assert answer(row, measured)[0] == f"true only {row['only']}"
