from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from bench.judge.trial_columns import TrialRow
from studies.versions import __main__ as command
from studies.versions import bounds, environment, lightning_probe, probe, versions_page
from studies.versions.environment import FailedError
from studies.versions.grid_page import weights_section
from studies.versions.versions_page import Entry, Smoke, VersionFact
from tests.factories import make_cell, make_failure, make_manifest, make_tables, manifest_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "versions.md"


def entry(
    package: str = "lightning", version: str = "2.2.0", *findings: VersionFact, **more: Any
) -> Entry:
    about = {"torch": "2.13.0", "python": "3.11.7", "date": "2026-01-02"}
    return Entry(**{"package": package, "version": version, "findings": findings, **about, **more})


@pytest.mark.parametrize(
    ("package", "source", "words"),
    [
        (
            "lightning",
            "raise ImportError('no pkg_resources')",
            "not probed: ImportError: no pkg_resources",
        ),
        ("deepspeed", "import os; os._exit(3)", "not probed: no output"),
    ],
)
def test_version_that_cannot_be_imported_is_an_entry(
    package: str, source: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_pip(command: list[str], *more: Any) -> None:
        if "pip" not in command:
            real(command, *more)

    real = environment.run
    monkeypatch.setattr(environment, "run", no_pip)
    install = environment.install

    def broken(*arguments: Any) -> Path:
        python = install(*arguments)
        (site,) = tmp_path.glob("lib/python*/site-packages")
        (site / package).mkdir()
        (site / package / "__init__.py").write_text(source)
        return python

    monkeypatch.setattr(environment, "install", broken)
    found = environment.measure(package, "1.0", tmp_path)
    assert words in found.error and str(tmp_path) not in found.error and not found.findings


def test_command_keeps_other_versions_and_names_wrong_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "measure", lambda package, version, _: entry(package, version))
    out = ["--out", str(tmp_path)]
    assert (
        command.main(["lightning==2.2.0", *out]) == command.main(["deepspeed==0.18.2", *out]) == 0
    )
    kept = json.loads((tmp_path / "versions.json").read_text())["versions"]
    assert [each["package"] for each in kept] == ["lightning", "deepspeed"]
    for wrong in ("torch==2.0", "lightning", "lightning==new"):
        assert command.main([wrong, *out]) == 2
        error = capsys.readouterr().err
        assert (
            f"'{wrong}' is no version of lightning or deepspeed" in error and error.count("\n") == 1
        )


ENDS = {
    "torch": ("2.11.0", "2.15.0"),
    "lightning": ("2.6.0", "2.6.6"),
    "transformers": ("5.0.0", "5.23.0"),
}


def test_each_torch_runs_with_the_lowest_and_the_newest_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(command: list[str], *more: Any) -> None:
        assert "torch==2.11.0" in command
        raise FailedError("not installed: ERROR: none")

    monkeypatch.setattr(bounds, "ends", lambda required: ENDS.get(required.name, ("1.0", "1.0")))
    monkeypatch.setattr(bounds, "run", refuse)
    real = bounds.smoke
    assert (
        real(tmp_path / "python", {"torch": "2.11.0"}, tmp_path / "run").result
        == "not installed: ERROR: none"
    )
    monkeypatch.setattr(bounds, "create", lambda folder: folder / "python")
    monkeypatch.setattr(
        bounds, "smoke", lambda _, packages, folder: Smoke(packages, "3.11", "now", "a|b", True)
    )
    assert command.main(["--smoke", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("torch 2.15.0, lightning") == 2
    page = (tmp_path / "versions.md").read_text()
    assert "*torch* 2.11.0, 2.15.0." in page
    assert "*lightning* 2.6.0 and 2.6.6; *deepspeed* 1.0; *transformers* 5.0.0 and 5.23.0" in page
    assert "*result* a|b; *as expected* yes." in page
    assert command.main(["lightning==x", "--out", str(tmp_path)]) == 2, "the runs are read again"


def test_what_a_backend_lacks_is_no_failure_of_a_smoke_run() -> None:
    manifest = manifest_of(make_manifest())

    def trial(backend: str, status: str, reason: str = "") -> TrialRow:
        (row,) = make_tables(
            [make_failure(make_cell(backend=backend), status=status, reason=reason)]
        ).trial_rows
        return row

    trials = [
        trial("ddp-eager", "ok"),
        trial("torchtitan-eager", "unsupported", "needs torch>=2.13"),
    ]
    summary = "1 of 2 trials ok; torchtitan-eager unsupported: needs torch>=2.13"
    assert bounds.outcome(manifest, trials) == (summary, True)
    crashed = [*trials, trial("hsdp-eager", "crashed", "raised in /a/b/c.py")]
    assert bounds.outcome(manifest, crashed) == (
        f"{summary.replace('of 2', 'of 3')}; hsdp-eager crashed: raised in c.py",
        False,
    )


def test_all_versions_can_be_named_and_probed() -> None:
    for name in command.VERSIONS:
        package, _ = command.parsed(name)
        assert importlib.import_module(f"studies.versions.{package}_probe").findings


@pytest.mark.slow
def test_the_installed_lightning_is_probed(tmp_path: Path) -> None:
    probe.main("lightning", tmp_path / "answer.json")
    found = json.loads((tmp_path / "answer.json").read_text())
    assert len(found["findings"]) == 1 + len(lightning_probe.RATES)
    assert found["findings"][0]["measured"] == "right at 1, 2, 3, 4, 5, 8, 50"


def test_committed_page_is_what_its_data_says() -> None:
    entries, smokes = versions_page.read(PAGE.with_suffix(".json"))
    assert PAGE.read_text() == versions_page.markdown(entries, smokes, weights_section())
    assert {f"{e.package}=={e.version}" for e in entries} >= set(command.VERSIONS)
    assert environment.without_folders(PAGE.read_text()) == PAGE.read_text()
