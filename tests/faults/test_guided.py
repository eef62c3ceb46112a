"""Hostile input for the parsers, chosen by the coverage that it reaches; ``nox -s faults`` installs atheris for it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.faults.form import FORM, SEED
from tests.faults.test_fuzz import CONFIGS

SECONDS = 60
"""How long each target is tried."""
NAMES = {
    "matrix": "the matrix parser, by atheris",
    "journal": "the journal reader, by atheris",
    **{name: f"the lint reader of {Path(name).suffix[1:].upper()}, by atheris" for name in CONFIGS if name != "c.yml"},
}
"""Targets, as the page calls them."""
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris"),
]


@pytest.mark.parametrize("target", NAMES)
def test_no_input_that_reaches_new_code_fails(target: str, tmp_path: Path) -> None:
    options = (f"-max_total_time={FORM.choose(5, SECONDS)}", f"-seed={SEED}", "-timeout=30", "-rss_limit_mb=8192")
    command = [sys.executable, "-m", "tests.faults.guided", target, str(tmp_path / "fuzz"), *options, "-verbosity=1"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    number = re.search(r"Done (\d+) runs in", found.stderr)
    assert number and int(number[1]) > 100, found.stderr
    covered = [int(count) for count in re.findall(r"cov: (\d+)", found.stderr)]
    assert covered and covered[-1] > 30, found.stderr  # the readers were reached, and instrumented
    FORM.note("fuzz", NAMES[target], count=int(number[1]))
