"""``python -m bench audit`` on training scripts as users write them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.audit.command.training_audit import RIGHT
from tests.audit_command.cases import (
    FAST,
    OPEN,
    SLOW,
    SPAWNED,
    Case,
    audit_case,
    audit_forked,
    missing,
    train,
)

pytestmark = pytest.mark.torch


def check(case: Case, found: dict[str, Any]) -> None:
    assert found["verdict"] == case.verdict, (case.name, found["findings"])
    assert case.finding in ["", *(finding["topic"] for finding in found["findings"])]
    # Whatever is not judged has a reason.
    assert found["verdict"] not in OPEN or any(
        finding["level"] == "warning" for finding in found["findings"]
    )
    if found["verdict"] == RIGHT and not case.script.startswith(("several", "parallel")):
        sums: Counter[tuple[object, ...]] = Counter()
        for row in found["weights"]:
            sums[row["optimizer"], row["update"], *row["gradient_of"]] += row["loss_weight"] or 0.0
        assert sums
        assert sums == pytest.approx(
            dict.fromkeys(sums, 1.0), rel=0.01 if "bf16" in case.name else 1e-5
        )


def test_a_script_of_each_kind_gets_its_verdict_and_the_same_losses_bit_for_bit(
    tmp_path: Path,
) -> None:
    for case, found in zip(FAST, audit_forked(FAST, tmp_path), strict=True):
        check(case, found)
    (tmp_path / "bare").mkdir()
    assert not audit_forked(FAST[:3], tmp_path / "bare", audited=False)
    for number in range(3):
        losses = (tmp_path / str(number) / "losses").read_text()
        assert (
            len(losses.split()) >= 16
            and losses == (tmp_path / "bare" / str(number) / "losses").read_text()
        )


@pytest.mark.parametrize(
    "case",
    [SPAWNED, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: case.name,
)
def test_every_script_gets_its_verdict(case: Case) -> None:
    if reason := missing(case.script):
        pytest.skip(reason)
    check(case, audit_case(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["deepspeed right 3", "accelerate right", "lightning right ddp", "hf right"]
)
def test_losses_of_frameworks_are_the_same_bit_for_bit(script: str, tmp_path: Path) -> None:
    case = Case(script, RIGHT)
    train(case, LOSSES=str(tmp_path / "without"))
    audit_case(case, LOSSES=str(tmp_path / "with"))
    assert len((tmp_path / "with").read_text().split()) >= 16
    assert (tmp_path / "with").read_text() == (tmp_path / "without").read_text()
