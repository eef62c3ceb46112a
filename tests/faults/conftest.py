"""The form of these tests, and the page that the full one writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import page
from tests.faults.attacks import note_attacks
from tests.faults.form import FORM


def pytest_configure(config: pytest.Config) -> None:
    FORM.full = bool(config.getoption("--all"))
    FORM.kills = int(config.getoption("--kills"))
    if config.getoption("--reliability") is not None and not FORM.full:
        raise pytest.UsageError("--reliability: the page is of the full form; give --all too")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "tests/faults/" not in report.nodeid or (
        report.outcome == "passed" and report.when != "call"
    ):
        return
    reason = (
        f": {report.longrepr[2].removeprefix('Skipped: ')}"
        if isinstance(report.longrepr, tuple)
        else ""
    )
    if FORM.outcomes.get(report.nodeid) != "failed":
        FORM.outcomes[report.nodeid] = report.outcome + reason


@pytest.hookimpl(
    trylast=True
)  # after fixtures have noted what they know, also when the session is interrupted
def pytest_sessionfinish(session: pytest.Session) -> None:
    out: Path | None = session.config.getoption("--reliability")
    if out is not None:
        note_attacks(FORM.outcomes)
        page.write(out, FORM.facts, FORM.outcomes)
