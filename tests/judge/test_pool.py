"""Several runs of the same cells: each counts once, all places say the same of them, and unlike ones are refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from bench.cli import main
from bench.judge.analysis import Analysis
from bench.judge.pool import Pool, load_pool
from bench.judge.verdicts import Verdict
from bench.plan.cell import Cell
from bench.report.citation import check_citations, cite
from bench.run.journal import JOURNAL, MANIFEST, Journal, encode
from tests.factories import make_cell
from tests.pages import kind, read, records_of, report, write, write_run

DAYS = ("friday", "monday", "tuesday")
BACKENDS = {"base": 1.0, "slow": 1.3, "turning": 1.05}
OF_DAYS = {"friday": 1.0, "monday": 0.97, "tuesday": 1.05}
"""How much longer `slow` and `turning` take on a day."""


def run_of_day(folder: Path, day: str, **more: Any) -> Path:
    factors = {
        name: factor * (OF_DAYS[day] if name != "base" else 1) for name, factor in BACKENDS.items()
    }
    return write_run(
        folder / day,
        factors,
        accumulate=(2,),
        started=f"2026-01-{10 + len(day)}T00:00:00+00:00",
        **more,
    )


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three runs."""
    folder = tmp_path_factory.mktemp("pool") / "week"
    for day in DAYS:
        run_of_day(folder, day)
    return folder


def ids(data: Analysis) -> dict[str, str]:
    return {cell.backend: cell.cell_id for cell in data.run.cells.values() if not cell.twin}


def test_a_ratio_is_of_the_means_of_the_runs(week: Path) -> None:
    """From the tables of each run alone, with scipy."""
    data = Analysis.of(load_pool([week]), week / "friday")
    found = data.pairs[ids(data)["slow"]]
    logs = []
    for run in data.pool.runs:
        wide = run.tables.trials.pivot_table(
            index="repeat", columns="cell_id", values="step_time_s"
        ).astype(float)
        logs.append(float(np.log(wide[ids(data)["slow"]] / wide[ids(data)["base"]]).mean()))
    ends = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    time = found.time
    assert (
        time is not None
        and time.low is not None
        and time.high is not None
        and time.next_high is not None
    )
    assert (math.log(time.low), math.log(time.high)) == (
        pytest.approx(ends.low),
        pytest.approx(ends.high),
    )
    reach = stats.t.ppf(0.975, 2) * np.std(logs, ddof=1) * math.sqrt(1 + 1 / 3)
    assert math.log(time.next_high) == pytest.approx(np.mean(logs) + reach)
    assert found.verdict is Verdict.SLOWER and found.words.startswith("slower over 3 runs")


def test_all_places_say_the_same(
    week: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Analysis.of(load_pool([week]), week / "friday")
    pair = data.pairs[ids(data)["slow"]]
    assert main(["report", str(week), "--plots", str(tmp_path)]) == 0
    terminal = capsys.readouterr().out
    short = (week / "friday" / "report.md").read_text(encoding="utf-8")
    assert pair.time is not None
    number = f"{pair.time.ratio:.3f}"
    (row,) = [line for line in short.splitlines() if line.startswith("| slow ")]
    assert number in row and f" {pair.verdict}" in row
    page = read(week / "friday" / "report.html").text.partition("Methods")[0]
    for text in (terminal, short, page):
        assert (
            number in text and "over 3 runs" in " ".join(text.split()) and "in this run" not in text
        )
    text = cite(data, ids(data)["slow"], ids(data)["base"]).text
    assert (
        f"{number} times the step time" in text
        and f"verdict: {pair.words}" in text
        and "over 3 runs; next run" in text
    )
    hashes = "+".join(run.pin[:12] for run in data.pool.runs)
    assert f"accumulation-bench:friday:{hashes}/" in text and " runs=3 " in text
    assert all(finding.level == "good" for finding in check_citations(data, text))
    assert main(["check", str(week)]) == 0
    assert "over 3 runs" in capsys.readouterr().out


def test_a_cell_that_one_run_bars_has_no_step_time(tmp_path: Path) -> None:
    def changes(cell: Cell, repeat: int) -> dict[str, Any]:
        if cell.backend == "slow":
            return {"update": {"error": 0.5, "scale": 0.5, "residual": 1e-7}}
        return {}

    for day in DAYS:
        more = {"changes": changes} if day == "tuesday" else {}
        run_of_day(tmp_path / "week", day, **more)
    data = Analysis.of(load_pool([tmp_path / "week"]), tmp_path / "week" / "friday")
    slow, base = (data.rows[ids(data)[name]] for name in ("slow", "base"))
    assert slow.step_time_s is None and base.step_time_s is not None
    assert "NOT COMPARABLE" in cite(data, slow.cell_id).statement


def test_runs_of_one_name_and_minute_have_titles_of_their_own(week: Path) -> None:
    run = load_pool([week]).first
    assert len(set(Pool(runs=(run, run)).titles)) == 2


def test_one_run_says_so(week: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = report(week / "monday")
    words = " ".join(printed.split())
    assert status == 0 and "in this run" in words and "machines differ is not known" in words
    data = Analysis.of(load_pool([week / "monday"]), week / "monday")
    text = cite(data, ids(data)["slow"], ids(data)["base"]).text
    assert "verdict: slower in this run" in text and "the verdicts are of this run" in text


def test_two_runs_are_two_values_and_no_verdict(week: Path) -> None:
    data = Analysis.of(load_pool([week / "monday", week / "friday"]), week / "monday")
    pair = data.pairs[ids(data)["slow"]]
    assert (
        pair.verdict is Verdict.AMBIGUOUS and pair.time is not None and not data.times_unavailable
    )
    text = cite(data, ids(data)["slow"], ids(data)["base"]).text
    first, second = (f"{ratio:.3f}" for ratio in pair.time.runs)
    assert f"{first} and {second} times" in text and "(no interval, over 2 runs)" in text


def fails(capsys: Any, *arguments: str) -> str:
    capsys.readouterr()
    assert main([*arguments]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1, found
    return str(found.err)


def test_runs_that_do_not_belong_together_are_named(
    week: Path, tmp_path: Path, capsys: Any
) -> None:
    first = str(week / "friday")
    same = fails(capsys, "check", first, str(week / "monday"), first)
    assert f"{first}: is the same run as {first}" in same
    other = write_run(tmp_path / "cells", {"base": 1.0, "slow": 1.3}, accumulate=(2,))
    text = fails(capsys, "report", first, str(other))
    assert f"{other}: cannot be pooled with {first}: " in text and "cell turning N=2" in text
    machine = run_of_day(tmp_path, "monday", machine={"cpu": "another", "cores": 2})
    text = fails(capsys, "cite", first, str(machine), "slow N=2 W=2 fp32")
    assert re.search(rf"{machine}: .* {first}: its CPU is another", text)
    torch = run_of_day(tmp_path, "tuesday", packages={"torch": "1.0"})
    assert "its set of frameworks is torch 1.0, and" in fails(capsys, "check", first, str(torch))
    schema = run_of_day(tmp_path / "old", "tuesday")
    about = json.loads((schema / MANIFEST).read_text())
    (schema / MANIFEST).write_text(json.dumps(about | {"schema_version": 1}))
    assert f"{schema / MANIFEST}: schema_version is 1" in fails(capsys, "check", first, str(schema))
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'}: holds no run" in fails(capsys, "check", str(tmp_path / "empty"))


def test_what_check_refuses_is_cited_with_force_alone_which_says_so(
    week: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_of_day(tmp_path, "monday")
    records = Journal(folder).read()
    records[-1]["wall_s"] = 99.0
    (folder / JOURNAL).write_bytes(b"".join(map(encode, records)))
    cell = "slow N=2 W=2 fp32"
    assert main(["check", str(folder)]) == 1
    capsys.readouterr()
    assert main(["cite", str(folder), cell]) == 1
    found = capsys.readouterr()
    assert found.out == "" and "journal: was changed after the run" in found.err
    assert main(["cite", str(folder), cell, "--force", "--format", "text"]) == 0
    text = capsys.readouterr().out
    assert "DO NOT CITE THIS: " in text and "journal: was changed after the run" in text


def test_older_ids_are_found_and_those_of_another_run_are_not(week: Path) -> None:
    data = Analysis.of(load_pool([week / "friday"]), week / "friday")
    text = cite(data, ids(data)["slow"]).text
    digest = data.run.pin[:12]
    assert all(finding.level == "good" for finding in check_citations(data, text))
    older = text.replace(f"friday:{digest}/", "friday/")
    assert all(finding.level == "good" for finding in check_citations(data, older))
    (wrong,) = check_citations(data, text.replace(f"friday:{digest}/", f"friday:{'0' * 12}/"))
    assert wrong.level == "error" and "is of the run with the hash 000000000000" in wrong.text


def test_a_verdict_that_is_another_one_beside_the_copy_is_doubted(tmp_path: Path) -> None:
    """The copy is 1.9 % slower, which is no reason to distrust all times, and the cell 3 %."""
    base = make_cell(backend="base", accumulate=2)
    speeds = {
        base: 1.0,
        dataclasses.replace(base, twin="again"): 1.019,
        dataclasses.replace(base, backend="slow"): 1.03,
        dataclasses.replace(base, backend="slower"): 1.3,
    }
    backends = {name: kind(name) for name in ("reference", "base", "slow", "slower")}
    folder = write(
        tmp_path / "run", records_of(speeds, 10, 0.002), baseline="base", backends=backends
    )
    data = Analysis.of(load_pool([folder]), folder)
    assert {pair.b.backend: pair.verdict for pair in data.verdicts} == {
        "slow": Verdict.SLOWER,
        "slower": Verdict.SLOWER,
    }
    (doubt,) = data.doubts
    assert doubt.startswith("slow N=2 ") and Verdict.SAME in doubt and doubt in data.remarks
    assert " slower than base in this run, " in doubt
    assert any(doubt in found.text and found.level == "warning" for found in data.findings)
