"""The table that ``nox -s overhead`` prints, on timings made by hand, and the whole command on one hot path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, alone
from tests.overhead.beside import last_committed, table


def timings(cpu: str = "made", **medians: float) -> dict[str, Any]:
    return {
        "machine_info": {"cpu": {"brand_raw": cpu}, "python_version": "3.12.0"},
        "benchmarks": [
            {"name": f"test_{name}", "fullname": f"x.py::test_{name}", "stats": {"median": value, "min": value / 2}}
            for name, value in medians.items()
        ],
    }


def test_ratios_stand_side_by_side() -> None:
    lines = table(timings(one_append=2e-3, gone=1.0), timings(one_append=3e-3, fresh=1e-7), "20250101")
    assert lines[0].split("  ")[0] == "hot path" and "median 20250101" in lines[0]
    assert lines[1].split() == ["one", "append", "2", "ms", "3", "ms", "1.50", "1", "ms", "1.5", "ms", "1.50"]
    assert lines[2].split() == ["fresh", "-", "100", "ns", "-", "-", "50", "ns", "-"]
    assert lines[3] == "gone since 20250101: test_gone"
    assert len({len(line) for line in lines[:3]}) == 1


def test_other_machines_are_said_loudly() -> None:
    assert not any("DIFFERENT" in line for line in table(timings(a=1.0), timings(a=1.0)))
    assert any("DIFFERENT MACHINES OR SOFTWARE: cpu" in line for line in table(timings(a=1.0), timings("other", a=1.0)))
    assert "nothing to compare with" in table(None, timings(a=1.0))[-1]


def test_the_newest_committed_timings_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=made", "-c", "user.email=made@example.org"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.chdir(tmp_path)
    assert last_committed() is None
    git("init", "-q")
    folder = tmp_path / "results" / "overhead"
    folder.mkdir(parents=True)
    for name in ("20250101", "20250102", "20250103"):
        (folder / f"{name}.json").write_text(json.dumps({"name": name}))
        if name != "20250103":
            git("add", "-f", ".")
    git("commit", "-q", "-m", "made")
    assert last_committed() == ("20250102", {"name": "20250102"})


def test_the_command_times_stores_and_compares(tmp_path: Path) -> None:
    """In a folder of its own, so that nothing is stored in the project's."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    command = [sys.executable, "-m", "tests.overhead", "-k", "updates_of", "-p", "no:cacheprovider"]
    command += ["--benchmark-max-time", "0.01", "--benchmark-min-rounds", "2"]
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(command, cwd=tmp_path, env=alone() | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "results" / "overhead").glob("*.json")
    stored = json.loads(path.read_text())
    assert stored["machine_info"]["node"] == "" and "data" not in stored["benchmarks"][0]["stats"]
    assert stored["commit_info"]["project"] == "accumulation-bench" and "branch" not in stored["commit_info"]
    assert "updates of thousand events" in done.stdout and "nothing to compare with" in done.stdout


def test_nothing_is_stored_if_nothing_was_timed(tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    command = [sys.executable, "-m", "tests.overhead", "-k", "no_such_path"]
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(command, cwd=tmp_path, env=alone() | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 5 and "nothing is stored" in done.stderr
    assert not (tmp_path / "results").exists()
