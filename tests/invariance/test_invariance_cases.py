"""``python -m bench invariance`` on training scripts whose dependence on the split is known."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.audit.command import audited_command
from bench.audit.invariance.invariance_screen import screen
from bench.audit.invariance.invariance_verdict import BITWISE, ROUNDED, InvarianceVerdict
from bench.errors import BAD, GOOD, UNCHECKED
from tests.audit_command.cases import Case, missing, train
from tests.invariance.cases import (
    CASES,
    DIFFERENT,
    EVERYDAY,
    TORCHTITAN,
    UPDATES,
    SplitCase,
    compare,
)

pytestmark = pytest.mark.torch


def check(case: SplitCase, found: InvarianceVerdict) -> None:
    shown = "\n".join(screen(found))
    if case.verdict == ROUNDED:
        assert found.verdict in (ROUNDED, BITWISE), (case.name, shown)
        assert found.status == GOOD
        return
    assert found.verdict == case.verdict, (case.name, shown)
    status = UNCHECKED
    if case.verdict == DIFFERENT:
        status = BAD
    assert found.status == status
    texts = [each.text for each in found.findings if each.topic == case.topic]
    assert any(case.word in text for text in texts), shown


def check_all(cases: tuple[SplitCase, ...], folder: Path) -> None:
    for case, found in zip(cases, compare(cases, folder), strict=True):
        check(case, found)


def test_a_script_of_each_kind_gets_its_verdict(tmp_path: Path) -> None:
    assert len(EVERYDAY) == 10, "a name that no case has is left out"
    check_all(EVERYDAY, tmp_path)


@pytest.mark.slow
def test_every_script_gets_its_verdict(tmp_path: Path) -> None:
    check_all(tuple(case for case in CASES if case not in (*EVERYDAY, *TORCHTITAN)), tmp_path)


@pytest.mark.parametrize(
    "cases", [TORCHTITAN[:1], pytest.param(TORCHTITAN[1:], marks=pytest.mark.slow)]
)
def test_trainings_by_torchtitan_get_their_verdicts(
    cases: tuple[SplitCase, ...], tmp_path: Path
) -> None:
    if reason := missing("torchtitan"):
        pytest.skip(reason)
    check_all(cases, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["single scaler", "ddp clip", "fsdp2 deferred", "deepspeed right 3"]
)
def test_losses_are_the_same_bit_for_bit(script: str, tmp_path: Path) -> None:
    case = Case(script, "")
    train(case, LOSSES=str(tmp_path / "without"))
    ours = audited_command.environment(tmp_path, UPDATES) | {"BENCH_AUDIT_FOR": "invariance"}
    watched = {key: value for key, value in ours.items() if os.environ.get(key) != value}
    paths = f"{watched['PYTHONPATH']}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    train(case, LOSSES=str(tmp_path / "with"), **(watched | {"PYTHONPATH": paths}))
    assert list(tmp_path.glob("*.sketches"))
    assert len((tmp_path / "with").read_text().split()) >= 16
    assert (tmp_path / "with").read_text() == (tmp_path / "without").read_text()
