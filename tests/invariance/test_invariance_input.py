"""``python -m bench invariance`` with input that is wrong, and commands that fail or end early: a line each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.audit.invariance.splits import splits
from bench.errors import BAD, InputError
from tests.invariance.cases import ROOT

SCRIPT = Path(__file__).parent / "scripts/train_state.py"
VARY = ("--vary", "--gas {N} --micro-batch {B}", "--batch", "8", "--accumulate", "1,4")


def invariance(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``python -m bench invariance`` as a user runs it."""
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "bench", "invariance", *arguments],
        cwd=cwd,
        env=os.environ | ours,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("training", "vary", "batch", "accumulate", "words"),
    [
        ([], "--gas {N}", None, [1, 4], "name the training command after --"),
        (["--", "train"], None, None, None, "say what varies"),
        (["--", "train"], "--gas 4", None, None, "has nothing that varies"),
        (["--", "train"], "--gas {M}", None, [1, 4], "{M} is not known"),
        (["--", "train"], "--gas {N}", None, None, "--accumulate: give two or more N"),
        (["--", "train"], "--gas {N}", None, [4, 4], "--accumulate: give two or more N"),
        (["--", "train"], "--gas {N} -b {B}", None, [1, 4], "needs --batch"),
        (["--", "train"], "--gas {N} -b {B}", 6, [1, 4], "--batch 6 cannot be split into 4"),
        (["--", "train"], "--gas {N}", 8, [1, 4], "--batch needs {B}"),
        (["--", "train"], "--a {0,1} --b {0,1,2}", None, None, "2 values in one place and 3"),
        (["--", "train"], "--gas {N} --a {0,1}", None, [1, 4], "not both"),
        (["--", "train"], "--a {0,1}", None, [1, 4], "need {N} or {B}"),
        (["--", "train"], "--a '{0,1}", None, None, "No closing quotation"),
        (["--", "train", "--other"], None, None, None, "name the other command"),
        (["--", "train", "--other", "--", "it"], "--a {0,1}", None, None, "leave --vary out"),
    ],
)
def test_what_cannot_be_run(
    training: list[str],
    vary: str | None,
    batch: int | None,
    accumulate: list[int] | None,
    words: str,
) -> None:
    with pytest.raises(InputError) as refused:
        splits(training, vary, batch, accumulate)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_where_the_options_stand() -> None:
    first, second = splits(["--", "env", "{vary}", "train", "{run}"], "N={N} B={B}", 8, [1, 4])
    assert first.numbered(1) == ["env", "N=1", "B=8", "train", "1"]
    assert second.numbered(3) == ["env", "N=4", "B=2", "train", "3"]
    assert second.label == "N=4 B=2"
    plain, compiled = splits(["--", "train", "--port={port}"], "{,--compile}")
    assert plain.numbered(1)[0] == "train" and len(plain.command) == 2
    assert int(plain.numbered(1)[1].removeprefix("--port=")) > 0
    assert compiled.numbered(2)[-1] == "--compile"
    ours, theirs = splits(["--", "a", "b", "--other", "--", "c"], None)
    assert (ours.command, theirs.command) == (("a", "b"), ("c",))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        pytest.param(
            ("--vary", "--nothing {N}", "--accumulate", "1,4", "--", str(SCRIPT), "plain"),
            2,
            "does the command know --nothing {N}?",
            id="an option that the command does not know",
        ),
        pytest.param(
            (*VARY, "--", str(SCRIPT), "crash"),
            5,
            "N=4 B=2 (run 3) ended with exit status 5, ",
            id="a crash in one split",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*VARY, "--", "-c", "print()"),
            3,
            "no Python process of the command imported torch",
            id="no training",
        ),
    ],
)
def test_commands_that_fail(
    arguments: tuple[str, ...], status: int, words: str, tmp_path: Path
) -> None:
    place = arguments.index("--") + 1
    found = invariance(*arguments[:place], sys.executable, *arguments[place:], cwd=tmp_path)
    assert found.returncode == status
    assert words in found.stderr and "Traceback" not in found.stderr


@pytest.mark.torch
def test_a_difference_is_exit_status_1(tmp_path: Path) -> None:
    found = invariance(*VARY, "--", sys.executable, str(SCRIPT), "plain-undivided", cwd=tmp_path)
    assert found.returncode == BAD, found.stderr[-2000:]
    assert "gradient differs" in found.stdout


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "vary", "status", "words"),
    [
        ("plain", ("--vary", "--number {N}", "--accumulate", "1,4"), 3, "changes nothing"),
        ("plain", ("--vary", "--number {0,1}"), 0, "bitwise equal"),
        ("counts", ("--vary", "--number {0,1}"), 3, "the state count of all 9 tensors differs"),
        (
            "plain",
            ("--vary", "--gas {N}", "--accumulate", "1,4"),
            3,
            "keep the samples of an update",
        ),
        ("ends", VARY, 0, "made 1 of 3 updates"),
        ("plain", VARY, 0, "equal to rounding"),
    ],
)
def test_what_a_command_says(
    variant: str, vary: tuple[str, ...], status: int, words: str, tmp_path: Path
) -> None:
    found = invariance(*vary, "--", sys.executable, str(SCRIPT), variant, cwd=tmp_path)
    assert found.returncode == status, found.stderr[-2000:]
    assert words in found.stdout


@pytest.mark.torch
@pytest.mark.slow
def test_a_run_that_resumes_from_another_is_not_compared(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, pathlib\n"
        "torch.manual_seed(0)\n"
        "net, saved = torch.nn.Linear(4, 4), pathlib.Path('saved.pt')\n"
        "if saved.exists():\n"
        "    net.load_state_dict(torch.load(saved))\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    net(torch.ones(8, 4)).pow(2).mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "torch.save(net.state_dict(), saved)\n"
    )
    found = invariance("--vary", "{a,b}", "--", sys.executable, str(script), cwd=tmp_path)
    assert found.returncode == 3
    assert "if it resumes from saved.pt" in found.stdout and "{run}" in found.stdout
