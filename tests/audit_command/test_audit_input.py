"""``python -m bench audit`` with commands that train nothing, or fail: a line each, and the exit status."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from bench.errors import BAD
from tests.audit_command.cases import Case, audit
from tests.conftest import ROOT

pytestmark = pytest.mark.torch
NOTHING = "audit: nothing seen:"
ISOLATED = "import torch; torch.ones(9, requires_grad=True).sum().backward()"


@pytest.mark.parametrize(
    ("command", "status", "line"),
    [
        (["-I", "-c", ISOLATED], 3, f"{NOTHING} .* loaded the recorder"),
        (["-c", "print('no torch')"], 3, f"{NOTHING} .* imported torch"),
        (["-c", "import torch"], 3, f"{NOTHING} .* ran a backward"),
        (["-c", "raise SystemExit(5)"], 5, "audit: .* ended with exit status 5"),
    ],
)
def test_commands_that_train_nothing(command: list[str], status: int, line: str) -> None:
    found = audit("--", sys.executable, *command)
    assert found.returncode == status
    assert re.search(line, found.stderr) and "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        pytest.param(
            "single crash", 7, ("verdict   weights right", "events BBBBCS"), marks=pytest.mark.slow
        ),
        ("single killed", 137, ("verdict   weights right", "events BBBBCS")),
        ("single one-backward", 3, ("no update: 1 backward led to no step",)),
    ],
)
def test_what_was_seen_until_then_is_kept(script: str, status: int, words: tuple[str, ...]) -> None:
    found = audit("--", *Case(script, "").command)
    assert found.returncode == status
    assert all(word in found.stdout for word in words)


def test_an_accusation_is_exit_status_1() -> None:
    found = audit("--", *Case("single masked", "").command)
    assert found.returncode == BAD
    assert "verdict   mean of means" in found.stdout


@pytest.mark.slow
def test_fewer_ranks_than_asked_for() -> None:
    # The script knows no process group; one of the launcher's two ranks trains.
    script = "import os, torch; int(os.environ['RANK']) or torch.ones(9, requires_grad=True).sum().backward()"
    launcher = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
    )
    found = audit("--", sys.executable, *launcher, sys.executable, "-c", script)
    assert found.returncode == 3
    assert "ranks missing: 1 of 2 ranks" in found.stdout


@pytest.mark.parametrize("first", ["import datasets", "importlib.util.find_spec('torch')"])
def test_who_looks_for_torch_before_it_is_imported_hides_no_training(first: str) -> None:
    script = f"import importlib.util; {first}; {ISOLATED}"
    found = audit("--", sys.executable, "-c", script)
    assert "no update: 1 backward led to no step" in found.stdout, found.stderr


def test_a_sitecustomize_of_the_user_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    found = audit("--", sys.executable, "-c", "print('done')", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "mine\ndone\n" in found.stdout
