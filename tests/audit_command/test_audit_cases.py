"""``python -m bench audit`` on training scripts as users write them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.audit_command.cases import FAST, OPEN, RIGHT, SLOW, Case, audit_case, train

pytestmark = pytest.mark.torch
PARAMETERS = [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("case", PARAMETERS, ids=lambda case: case.name)
def test_every_script_gets_its_verdict(case: Case) -> None:
    found = audit_case(case)
    assert (found["verdict"], found["findings"]) == (case.verdict, found["findings"])
    assert case.finding in ["", *(finding["topic"] for finding in found["findings"])]
    # Whatever is not judged has a reason.
    assert found["verdict"] != OPEN or any(finding["level"] == "warning" for finding in found["findings"])
    if found["verdict"] == RIGHT:
        sums: Counter[tuple[int, ...]] = Counter()
        for row in found["weights"]:
            sums[row["update"], *row["gradient_of"]] += row["loss_weight"]
        assert sums and sums == pytest.approx(dict.fromkeys(sums, 1.0), rel=0.01 if "bf16" in case.name else 1e-5)


FRAMEWORKS = ("fsdp2 deferred", "deepspeed right 3", "accelerate right", "lightning right ddp", "hf right")


@pytest.mark.parametrize(
    "script", ["single scaler", *(pytest.param(name, marks=pytest.mark.slow) for name in FRAMEWORKS)]
)
def test_losses_are_the_same_bit_for_bit(script: str, tmp_path: Path) -> None:
    case = Case(script, RIGHT)
    train(case, LOSSES=str(tmp_path / "without"))
    audit_case(case, LOSSES=str(tmp_path / "with"))
    assert len((tmp_path / "with").read_text().split()) >= 16
    assert (tmp_path / "with").read_text() == (tmp_path / "without").read_text()
