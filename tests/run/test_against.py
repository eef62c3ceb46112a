"""Two commits of the bench in one run: the twin runs the other one's code, and ``compare`` names what got slower."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.errors import InputError
from bench.judge.loading import load
from bench.launch import two_codes
from bench.plan.cell import Status, summarize
from tests.conftest import ROOT
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
