"""Two commits of the bench in one run: the twin runs the other one's code, and ``compare`` names what got slower."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.errors import BAD, GOOD, UNCHECKED, InputError
from bench.judge.loading import load
from bench.judge.statistics import MIN_TRIALS
from bench.judge.verdicts import Reason
from bench.launch import two_codes
from bench.plan.cell import Status, summarize
from tests.conftest import ROOT, bench
from tests.factories import make_cell
from tests.pages import records_of, write

COMMIT = "0123456789abcdef"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there are commits in a checkout alone")
def test_a_commit_is_unpacked_once_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    head = two_codes.commit_of("HEAD")
    place = two_codes.unpack(head, tmp_path)
    stored = subprocess.run(
        ["git", "show", "HEAD:bench/errors.py"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    assert (place / "bench" / "errors.py").read_bytes() == stored
    (place / "bench" / "errors.py").write_text("changed")
    assert (
        two_codes.unpack(head, tmp_path) == place
        and (place / "bench" / "errors.py").read_text() == "changed"
    )
    with pytest.raises(InputError, match="--against 'no-such': is no commit of "):
        two_codes.commit_of("no-such")


def test_the_commits_of_a_run_are_compared_and_nothing_else_changes(
    tmp_path: Path, capsys: Any
) -> None:
    base, cell = make_cell(timed_windows=8), make_cell(backend="ddp-eager", timed_windows=8)
    speeds = {base: 0.5, cell: 0.6}
    twins = {base.at_commit(COMMIT): 0.5, cell.at_commit(COMMIT): 0.5}
    again = {make_cell(timed_windows=8, twin="again"): 0.5}
    plain = load(
        write(
            tmp_path / "plain", records_of({**speeds, **again}, noise=0.005), baseline=base.backend
        )
    )
    path = write(
        tmp_path / "both",
        records_of({**speeds, **again, **twins}, noise=0.005),
        baseline=base.backend,
    )
    both = load(path)
    assert set(plain.cells) < set(both.cells), "no other cell has another id"
    assert summarize(both.cells.values(), base.backend).endswith("1 A/A twin, 2 of another commit")
    assert main(["compare", str(path), "--fail-on", "slower=5%"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert (
        f"compared with A: commit {COMMIT[:12]}" in text
        and "slower=5%: 1 of 2 cells regressed: ddp-eager" in text
    )
    assert main(["report", str(path)]) == 0
    assert "1 compared with ddp-deferred" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_the_twin_runs_the_code_of_the_commit(tmp_path: Path, capsys: Any) -> None:
    """Real trials; the other code says in a file that it was imported, by a rank among others."""
    out, marker = tmp_path / "run", tmp_path / "imported"
    head = two_codes.commit_of("HEAD")
    package = two_codes.unpack(head, out) / "bench"
    with (package / "launch" / "rank.py").open("a", encoding="utf-8") as rank:
        rank.write(f"\nopen({str(marker)!r}, 'a').write(__file__ + '\\n')\n")
    options = [
        "--model",
        "micro",
        "--accumulate",
        "2",
        "--world-size",
        "1",
        "--repeats",
        "5",
        "--max-repeats",
        "5",
    ]
    assert (
        main(
            [
                "run",
                "--backend",
                "ddp-deferred",
                *options,
                "--against",
                head,
                "--out",
                str(out),
                "--quiet",
            ]
        )
        == 0
    )
    assert set(marker.read_text().split()) == {str(package / "launch" / "rank.py")}
    run = load(out)
    assert set(run.tables.trials["status"]) == {Status.OK}
    (twin,) = [cell for cell in run.cells.values() if cell.other_commit]
    assert head.startswith(twin.other_commit)
    capsys.readouterr()
    assert main(["compare", str(out)]) == 0
    assert f"compared with A: commit {twin.other_commit}" in capsys.readouterr().out


SLEPT_S = 0.05
SLOWER = f"""

def _slower(self, job):
    import dataclasses, time

    def delayed(parameters):
        optimizer = job.optimizer(parameters)
        optimizer.register_step_post_hook(lambda *_: time.sleep({SLEPT_S}))
        return optimizer

    DDPEager.train(self, dataclasses.replace(job, optimizer=delayed))


DDPDeferred.train = _slower
"""
"""What the second commit adds to a backend."""
GATE = f"""
device = "cpu"
repeats = {MIN_TRIALS}
[workload]
model = "micro"
sequence_length = 32
global_batch_size = 4
[training]
warmup_windows = 2
timed_windows = 6
[axes]
backend = ["ddp-deferred"]
accumulate = [2]
world_size = [1]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package in a checkout of its own: commit ``fast``, then HEAD, in which ``ddp-deferred`` sleeps."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "bench", folder / "bench", ignore=shutil.ignore_patterns("__pycache__"))

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=no")
        subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)

    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--message", "fast")
    git("tag", "fast")
    with (folder / "bench" / "backends" / "plain.py").open("a", encoding="utf-8") as file:
        file.write(SLOWER)
    git("commit", "--all", "--message", "slow")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="commits are git's")
@pytest.mark.parametrize(("commit", "status"), [("fast", BAD), ("HEAD", GOOD)])
def test_of_two_commits_the_slower_is_named_and_equal_ones_are_not(
    repository: Path, tmp_path: Path, capsys: Any, commit: str, status: int
) -> None:
    """A gate as in docs/ci.md, with real trials; on a busy machine it checks no times, and says so."""
    out, matrix = tmp_path / "run", tmp_path / "gate.toml"
    matrix.write_text(GATE)
    command = ["run", "--matrix", str(matrix), "--against", commit, "--out", str(out), "--quiet"]
    done = bench(*command, cwd=repository, PYTHONPATH=str(repository))
    assert done.returncode == GOOD, done.stdout + done.stderr

    rows = [row for row in load(out).tables.trial_rows if row.cell.backend == "ddp-deferred"]
    blocks: dict[int, list[str]] = {}
    for row in sorted(rows, key=lambda row: row.slot or 0):
        blocks.setdefault(row.repeat, []).append(row.cell.twin)
    sides = {"", *(row.cell.twin for row in rows if row.cell.other_commit)}
    assert len(blocks) == MIN_TRIALS and all(sides <= set(block) for block in blocks.values())

    ended = main(["compare", str(out), "--fail-on", "slower=20%", "--json"])
    (found,) = json.loads(capsys.readouterr().out)["cells"]
    assert found["backend_b"] == "ddp-deferred"
    if found["reason"] == Reason.DISTURBED:
        assert ended == UNCHECKED
        pytest.skip(found["detail"])
    assert (ended, found["unchecked"]) == (status, [])
    assert found["regressions"] == (["slower"] if status == BAD else [])
    seconds = {
        side: statistics.median(row.step_time_s or 0 for row in rows if row.cell.twin == side)
        for side in sides
    }
    (other,) = sides - {""}
    planted = SLEPT_S if status == BAD else 0.0
    assert seconds[""] - seconds[other] == pytest.approx(planted, abs=SLEPT_S / 2)
