"""How versions are measured and recorded, and the pages that are written from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.audit.advisories import load
from studies import known_bad_page
from studies.versions import __main__ as command
from studies.versions import grid, layers
from studies.versions.environment import FailedError
from studies.versions.grid_page import spelled, weights_section
from studies.versions.layers import Job, Record, measure_into, measured, read_records
from tests.conftest import ROOT

TWO_CASES = """
import json, os
for case in ("a", "b"):
    print(json.dumps({"case": case, "measured": [0.25, 0], "right": [0.25, 0.25 if case == "b" else 0]}))
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""


def script(folder: Path, source: str) -> str:
    """A script as a job names it."""
    path = folder / "made.py"
    path.write_text(source, encoding="utf-8")
    return str(path.with_suffix(""))


def test_each_case_of_a_script_is_a_record(tmp_path: Path) -> None:
    first, second = measured([Job(script(tmp_path, TWO_CASES), ranks=2)], ())
    assert (first.case, first.is_right, second.case, second.is_right) == ("a", True, "b", False)
    assert first.packages["torch"] and first.seconds > 0 and not first.error


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ValueError('this one')", "ValueError: this one"),
        ("import os; os._exit(3)", "no answer"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_script_that_says_nothing_is_a_record_with_its_error(
    source: str, words: str, tmp_path: Path
) -> None:
    (record,) = measured([Job(script(tmp_path, source))], ())
    assert words in record.error and not record.is_right and str(tmp_path) not in record.error


def test_a_version_that_cannot_be_installed_is_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise FailedError(
            "not installed: ERROR: No matching distribution found for deepspeed==0.0.1"
        )

    monkeypatch.setattr(layers, "run", refuse)
    records = measured([Job("a"), Job("b")], ("deepspeed==0.0.1",), tmp_path / "environments")
    assert [record.script for record in records] == ["a", "b"]
    assert all(
        "No matching distribution" in record.error and not record.packages for record in records
    )


def test_what_was_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def pretend(jobs: list[Job], versions: Any, _: Any) -> list[Record]:
        asked.append([job.script for job in jobs])
        return [
            Record(job.script, tuple(versions), {}, "3.11", "2026-01-02", 0.0, case="c")
            for job in jobs
        ]

    monkeypatch.setattr(layers, "measured", pretend)
    path, versions = tmp_path / "records.jsonl", ("deepspeed==0.18.9",)
    measure_into(path, [Job("a")], versions)
    measure_into(path, [Job("a"), Job("b")], versions)
    measure_into(path, [Job("a")], versions, again=True)
    assert asked == [["a"], ["b"], ["a"]]
    assert sorted(record.script for record in read_records(path)) == ["a", "b"]


def test_weights_are_spelled_as_fractions() -> None:
    assert spelled([0.25, 0.0, 0.0, 0.25]) == "1/4 0 0 1/4"
    assert spelled([[0.0625] * 4, [0.0625] * 4]) == "1/16 each"
    assert spelled([[0.25, 0.25], [0.25, 0.0]]) == "1/4 each; 1/4 0"
    assert spelled([2**-18, 0.0, 0.33333]) == "3.815e-06 0 1/3"
    assert (spelled([1, 2, 7]), spelled("trained"), spelled(0.001)) == (
        "1, 2, 7",
        "trained",
        "0.001",
    )


def test_a_wrong_version_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.main(["--weights", "deepspeed==9", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "'deepspeed==9' is not among" in error and error.count("\n") == 1


def test_every_reproducer_belongs_to_an_advisory_and_every_version_is_measured() -> None:
    scripts = {
        f"studies/known_bad/{path.name}" for path in (ROOT / "studies" / "known_bad").glob("*.py")
    }
    assert scripts == {advisory.reproducer for advisory in load()}
    there = {record.key for record in read_records(grid.RECORDS)}
    wanted = {
        (job.script, asked)
        for package, asked in grid.every_version()
        for job in grid.jobs_of(package)
    }
    assert wanted == there, "nox -s versions -- --weights measures what is missing"


def test_committed_pages_are_what_the_data_says() -> None:
    assert known_bad_page.PAGE.read_text() == known_bad_page.page(load())
    committed = {path.name: path.read_text() for path in known_bad_page.UPSTREAM.glob("*.md")}
    assert committed == known_bad_page.reports()
    assert weights_section() in (ROOT / "docs" / "versions.md").read_text()


def test_reports_are_on_what_no_version_has_fixed() -> None:
    advisories = {f"{advisory.id}.md": advisory for advisory in load()}
    reports = known_bad_page.reports()
    assert set(reports) - set(advisories) == {"deepspeed-zero3-gather-order.md"}
    for name, text in reports.items():
        if name in advisories:
            assert not advisories[name].fixed_in
        code = text.partition("```python\n")[2].partition("```")[0]
        assert "import bench" not in code and "from bench" not in code
