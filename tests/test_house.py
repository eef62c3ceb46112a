"""The package is being rearranged: what must stay as it is, and figures that may only fall."""

from __future__ import annotations

import json

import pytest

from bench.findings import Level
from bench.report.cited import verify
from tests import house
from tests.conftest import ROOT

AT_MOST = {
    "modules": 196,
    "lines": 34350,
    "longest module": 350,
    "names of several modules": 0,
    "names of several classes": 0,
}
"""What the package has today. Lower them when they fall; docs and tests are not counted."""
BY_DEFAULT = ("results/cpu", "results/old/cpu-reference", "results/curves", "results/bytes-8b", "results/noise/run-4")
"""One run of each kind; all others take 20 s."""


def test_ids_of_all_committed_cells_are_as_they_were() -> None:
    assert house.cells() == json.loads(house.CELLS.read_text())


@pytest.mark.parametrize(
    "run", [run if run in BY_DEFAULT else pytest.param(run, marks=pytest.mark.slow) for run in house.RUNS]
)
def test_check_says_of_each_committed_run_what_it_said(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert house.checked(run) == house.check_file(run).read_text()


@pytest.mark.parametrize("name", ["cpu-new", "cpu-reference"])
def test_citations_that_were_once_printed_still_check(name: str) -> None:
    text = (house.FOLDER / "cited" / f"{name}.txt").read_text()
    found = [one for one in verify(ROOT / "results" / "old" / name, text) if one.topic == "citation"]
    assert len(found) == text.count("accumulation-bench:")
    assert {one.level for one in found} == {Level.GOOD}, [one.text for one in found]


@pytest.mark.parametrize("name", AT_MOST)
def test_the_package_only_gets_smaller(name: str) -> None:
    assert house.figures()[name] <= AT_MOST[name]
