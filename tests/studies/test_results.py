"""Pages are of the data beside them; what is out of date, and what is made again, in a repository of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BAD, GOOD, WRONG
from bench.run import machine
from bench.run.journal import read_document, write_document
from studies import audit_page, claims, results
from studies.measured import Measured
from studies.results import ROWS, Made
from tests.audit_command.cases import CASES
from tests.conftest import ROOT
from tests.hosts import __main__ as hosts
from tests.pages import simulate

CODE, RUN, PAGE = "bench/code.py", "results/timed", "page.md"


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=Someone", "-c", "user.email=someone@example.org")
    return subprocess.run(
        ["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout


def commit(root: Path, code: str) -> str:
    (root / CODE).write_text(code, encoding="utf-8")
    git(root, "add", CODE)
    git(root, "commit", "-qm", "code")
    return git(root, "rev-parse", "HEAD").strip()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a run of its only commit, and a page of that run that was never made."""
    git(tmp_path, "init", "-q")
    (tmp_path / "bench").mkdir()
    first = commit(tmp_path, '"""What is run."""\nrate = 1\n')
    monkeypatch.setattr(machine, "git_state", lambda: {"commit": first, "clean": True})
    simulate(tmp_path / RUN, {"a": 1.0, "b": 1.1}, repeats=2)
    timed = Made(
        name="timed", paths=(RUN,), commands=("false",), code=(CODE,), minutes=1, is_run=True
    )
    made_by = (f"cp {CODE} {PAGE}",)
    page = Made(
        name="page", paths=(PAGE,), commands=made_by, code=(".",), sources=("timed",), minutes=2
    )
    monkeypatch.setattr(results, "ROWS", (timed, page))
    monkeypatch.setattr(results, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> object:
    """What the list says of each, with its exit status."""

    def listed() -> tuple[int, dict[str, str]]:
        capsys.readouterr()
        status = results.main([])
        return status, dict(
            re.findall(r"^(timed|page) +\d+ min  (.*)$", capsys.readouterr().out, re.MULTILINE)
        )

    return listed


def test_a_page_is_made_and_stays_up_to_date_until_code_or_run_changes(
    root: Path, printed: object
) -> None:
    assert printed() == (
        BAD,
        {"timed": "up to date", "page": "results/made.json does not say when it was made"},
    )
    assert results.main(["--all"]) == GOOD
    git(root, "add", PAGE)
    git(root, "commit", "-qm", "page")
    fresh = (GOOD, {"timed": "up to date", "page": "up to date"})
    assert printed() == fresh, "a page that is a part of its own code is not older than itself"
    commit(root, '"""What is measured."""\nrate = 1  # per second\n')
    assert printed() == fresh, "words are no code"
    first = read_document(root / RUN)["git"]["commit"]
    last = commit(root, '"""What is measured."""\nrate = 2\n')
    older = f"is older than {CODE} (made at "
    status, states = printed()
    assert status == BAD and states["timed"] == f"{older}{first[:12]})"
    assert states["page"].startswith(older) and "is made from timed" in states["page"]
    write_document(
        root / RUN,
        read_document(root / RUN) | {"git": {"commit": last, "clean": True}, "finished": "3000"},
    )
    assert results.main(["page"]) == GOOD
    assert printed() == (BAD, {"timed": "up to date", "page": "is made from timed, which is newer"})


def test_what_cannot_be_made_or_trusted_is_said(
    root: Path, printed: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_document(root / RUN)
    write_document(
        root / RUN,
        manifest | {"git": {"commit": "0" * 40, "clean": False}, "journal_sha256": "0" * 64},
    )
    assert results.main([]) == BAD
    out = capsys.readouterr().out
    assert "at commit 000000000000, which is not in this repository; " in out
    assert "uncommitted changes" in out
    assert "ERROR, journal: was changed after the run" in out
    assert results.main(["timed", "page"]) == BAD
    out = capsys.readouterr().out
    assert "exit status 1: false" in out and "failed: timed" in out and (root / PAGE).exists()
    monkeypatch.setattr(
        results, "ROWS", [dataclasses.replace(row, commands=("true",)) for row in results.ROWS]
    )
    os.utime(root / PAGE, (0, 0))
    assert results.main(["page"]) == BAD
    assert f"wrote nothing into {PAGE}: true" in capsys.readouterr().out
    assert printed()[1]["timed"] == "is missing"
    (root / CODE).write_text("rate = 3\n", encoding="utf-8")
    assert results.main(["page"]) == WRONG
    assert f"{CODE}: has changes that are not committed" in capsys.readouterr().err


def test_what_the_table_names_is_there() -> None:
    names = [row.name for row in ROWS]
    for row in ROWS:
        for path in row.code:
            assert any(ROOT.glob(path.removeprefix(":!"))), (row.name, path)
        assert set(row.sources) <= set(names[: names.index(row.name)]), row.name


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


PAGES: dict[Path, Callable[[], str]] = {
    audit_page.PAGE: lambda: audit_page.page(read(audit_page.DATA)),
    claims.DOCS: lambda: claims.page(Measured.load()),
    hosts.PAGE: lambda: hosts.page(
        hosts.PAGE.read_text().partition(hosts.HEADING)[0], read(hosts.DATA)
    ),
}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_of_its_data(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path]()


def test_every_audited_script_has_got_its_verdict() -> None:
    found = read(audit_page.DATA)
    assert {case.name: found[case.name]["verdict"] for case in CASES} == {
        case.name: case.verdict for case in CASES
    }
