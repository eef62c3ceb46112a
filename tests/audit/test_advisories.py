"""The list of known-bad versions: each entry is what its reproducer measured, and is matched with what is known."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from bench.audit.advisories import FILE, Advisory, facts_of, load, matching
from bench.errors import InputError
from studies.versions.grid import IMPORTS, RECORDS, script_of
from studies.versions.grid_page import spelled
from studies.versions.layers import Job, Record, measured, read_records
from tests.conftest import ROOT

OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
ADVISORIES = {advisory.id: advisory for advisory in load()}


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return read_records(RECORDS)


def of(advisory: Advisory, records: list[Record]) -> list[Record]:
    """What its reproducer measured."""
    script = script_of(advisory)
    return [record for record in records if (record.script, record.case) == (script, advisory.case)]


def number(advisory: Advisory, record: Record) -> str:
    return Version(record.packages[advisory.package]).public


@pytest.mark.parametrize("name", ADVISORIES)
def test_an_advisory_says_what_its_reproducer_measured(name: str, records: list[Record]) -> None:
    advisory = ADVISORIES[name]
    assert (ROOT / advisory.reproducer).exists()
    found = of(advisory, records)
    for is_right, rows in ((False, advisory.bad), (True, advisory.good)):
        seen = {
            (number(advisory, r), spelled(r.measured), r.date)
            for r in found
            if r.is_right is is_right
        }
        assert {(v, row.result, row.date.isoformat()) for row in rows for v in row.versions} == seen
    assert advisory.bad, "nothing shows it"
    assert {spelled(record.right) for record in found} == {advisory.right}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADVISORIES)
def test_the_reproducer_gives_the_same_again(name: str, records: list[Record]) -> None:
    advisory = ADVISORIES[name]
    job = Job(script_of(advisory), advisory.ranks, IMPORTS[advisory.package])
    before = {number(advisory, r): r.measured for r in of(advisory, records)}
    try:
        here = Version(version(advisory.package)).public
    except ModuleNotFoundError:
        pytest.skip(f"{advisory.package} is not installed")
    if here not in before:
        pytest.skip(f"{advisory.package} {here} was not measured")
    (again,) = [record for record in measured([job], ()) if record.case == advisory.case]
    assert again.measured == before[here]


def first_entry() -> dict[str, Any]:
    entry: dict[str, Any] = tomllib.loads(FILE.read_text(encoding="utf-8"))["advisory"][0]
    return entry


def written(entry: dict[str, Any], folder: Path) -> Path:
    """A file with this one advisory; the tables of TOML hold what JSON's do, but for its colons."""
    lines = [f"{key} = {inline(value)}" for key, value in entry.items()]
    path = folder / "advisories.toml"
    path.write_text("\n".join(["[[advisory]]", *lines]), encoding="utf-8")
    return path


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {inline(each)}' for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value) if isinstance(value, (str, int, float, bool)) else str(value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reproducer": None}, "reproducer is missing"),
        ({"reproducer": "studies/other.py"}, "studies/other.py"),
        ({"affected": "new"}, "'new' is no range of versions"),
        ({"affected": ">=99"}, "are bad, but not in '>=99'"),
        ({"affected": ""}, "are good, but in ''"),
        ({"bad": []}, "bad"),
        ({"sort": 1}, "sort is unknown"),
    ],
)
def test_an_advisory_without_proof_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    entry = {key: value for key, value in (first_entry() | change).items() if value is not None}
    path = written(entry, tmp_path)
    with pytest.raises(InputError) as caught:
        load(path)
    assert str(caught.value).startswith("advisories.toml: ") and words in str(caught.value)


def test_the_entry_that_these_change_is_read(tmp_path: Path) -> None:
    (advisory,) = load(written(first_entry(), tmp_path))
    assert advisory.id == first_entry()["id"]


def test_a_config_is_matched_as_far_as_it_is_known() -> None:
    def found(
        installed: dict[str, str], *, configs: Any = None, certain: bool = True, **facts: Any
    ) -> set[str]:
        matches = matching(installed, facts_of(configs, **facts))
        return {match.advisory.id for match in matches if match.is_certain or not certain}

    bad, good = {"deepspeed": "0.18.9"}, {"deepspeed": "0.19.8"}
    assert "deepspeed-zero2-offload" in found(bad, configs={"deepspeed": OFFLOAD}, accumulate=4)
    assert "deepspeed-zero2-offload" not in found(bad, configs={"deepspeed": OFFLOAD})
    assert "deepspeed-zero2-offload" in found(bad, configs={"deepspeed": OFFLOAD}, certain=False), (
        "N may be above 1"
    )
    for innocent in ({"stage": 2}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}):
        config = {"deepspeed": {"zero_optimization": innocent}}
        assert "deepspeed-zero2-offload" not in found(
            bad, configs=config, accumulate=4, certain=False
        )
    assert "deepspeed-zero2-offload" not in found(
        bad, configs={"deepspeed": OFFLOAD}, accumulate=1, certain=False
    )
    assert "deepspeed-zero2-offload" not in found(
        good, configs={"deepspeed": OFFLOAD}, accumulate=4, certain=False
    )
    auto = {
        "deepspeed": {
            "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "cpu"}}
        }
    }
    assert "deepspeed-zero2-offload" not in found(bad, configs=auto, accumulate=4)
    assert "deepspeed-zero2-offload" in found(bad, configs=auto, accumulate=4, certain=False), (
        "auto may be 2"
    )
    assert found({"deepspeed": "here"}, certain=False) == found({}, certain=False) == set()
    both = {"lightning": "2.6.6", "deepspeed": "0.19.8"}
    twice = {"framework": "lightning", "strategy": "deepspeed", "accumulate": 4}
    assert "lightning-deepspeed-divides-twice" in found(both, **twice)
    assert "lightning-deepspeed-divides-twice" not in found(
        {"lightning": "2.6.6"}, **twice, certain=False
    )


def test_the_list_is_read_without_torch() -> None:
    code = "import sys, bench.audit.advisories as a; assert a.load() and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
