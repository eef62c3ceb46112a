"""A run for other programs: documented frames, CSV, parquet, and JSON that pytest-benchmark itself reads."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import bench
from bench import cli
from bench.judge.analysis import Analysis, Frames
from bench.judge.columns import COLUMNS, FRAMES
from bench.plan.cell import REFERENCE
from bench.report.formats import COLUMNS_FILE, FORMULA
from tests.conftest import ROOT, alone
from tests.pages import write_run
from tests.report.test_citation import wrong_update

FORMULAS = ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", "\t=1", "\uff1d1", " =1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "exported"
    backends = {"base": 1.0, "slow": 1.1, "wrong": 1.0}
    return write_run(path, backends, changes=wrong_update, accumulate=(2, 4), repeats=6)


@pytest.fixture(scope="module")
def frames(folder: Path) -> Frames:
    return bench.load(str(folder))


def test_the_help_has_the_words_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    docs = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8").replace("`", "")
    for text in (
        "tables, plots and report again from its",
        "one number, one ratio or one plot",
        "a run's tables, or",
    ):
        assert text in told and text in docs


def test_every_column_of_every_frame_is_documented(frames: Frames) -> None:
    assert list(frames) == list(FRAMES) == list(COLUMNS) and len(frames) == len(FRAMES)
    for name, frame in frames.items():
        assert frame is getattr(frames, name)
        assert {key: str(dtype) for key, dtype in frame.dtypes.items()} == {
            key: about.dtype for key, about in COLUMNS[name].items()
        }, name
        assert list(frame.columns) == list(COLUMNS[name])
        assert all(about.meaning for about in COLUMNS[name].values())
    with pytest.raises(KeyError, match="they are cells, trials"):
        frames["trial"]


def test_cells_have_an_interval_a_verdict_and_an_id_or_the_reason_why_not(frames: Frames) -> None:
    cells = frames.cells.set_index("cell_id")
    assert len(cells) == len(frames.run.cells) == cells["citation"].nunique()
    for row in Analysis(run=frames.run).verdicts:
        cell = cells.loc[row.b.cell_id]
        assert cell["verdict"] == row.verdict and cell["baseline"] == "base"
        if row.time is not None:
            assert (cell["ratio"], cell["ratio_low"]) == (row.time.ratio, row.time.low)
    good = cells[
        cells["comparable"] & (cells["backend"] != REFERENCE)
    ]  # the reference's made-up steps are all alike
    assert (good["step_time_low_s"] < good["step_time_s"]).all() and (
        good["step_time_s"] < good["step_time_high_s"]
    ).all()
    assert (good["num_ok"] == 6).all() and (good["tokens_per_s"] * good["step_time_s"]).round(
        6
    ).nunique() == 1
    wrong = cells[cells["backend"] == "wrong"]
    assert len(wrong) == 2 and not wrong["comparable"].any() and wrong["step_time_s"].isna().all()
    assert (
        wrong["caveats"].str.contains("the update is off by").all()
        and (wrong["status"] == "invalid").all()
    )


def test_rows_are_read_in_a_narrow_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line per value there; in a pipe, a line per row."""
    command = ["export", str(folder), "--table", "cells", "--head", "2"]
    assert cli.main(command) == 0
    piped = capsys.readouterr().out.rstrip().splitlines()
    assert piped[-3].split()[:2] == ["cell_id", "label"]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(command) == 0
    first, second = capsys.readouterr().out.rstrip().split("\n\n")[-2:]
    for record in (first, second):
        assert record.split()[:3] == ["column", "value", "cell_id"] and "<NA>" not in record


def test_csv_says_the_same_as_the_frames(folder: Path, frames: Frames, tmp_path: Path) -> None:
    assert cli.main(["export", str(folder), "--format", "csv", "--out", str(tmp_path / "csv")]) == 0
    documented = pd.read_csv(tmp_path / "csv" / COLUMNS_FILE, keep_default_na=False)
    for name, frame in frames.items():
        about = documented[documented["frame"] == name].set_index("column")
        assert list(about.index) == list(frame.columns)
        read = pd.read_csv(
            tmp_path / "csv" / f"{name}.csv",
            dtype=about["dtype"].to_dict(),
            keep_default_na=False,
            na_values=[""],
        )
        for key in frame.columns:
            if about.loc[key, "dtype"] == "string":
                assert (read[key].fillna("") == frame[key].fillna("").str.strip()).all(), key
            else:
                pd.testing.assert_series_equal(read[key], frame[key], rtol=1e-12)
    units = {tuple(row) for row in documented[["column", "unit"]].to_numpy()}
    assert {("step_time_s", "s"), ("peak_memory_bytes", "B"), ("power_w", "W")} <= units


def test_no_text_in_csv_is_a_formula(tmp_path: Path) -> None:
    write_run(tmp_path / "run", dict.fromkeys(FORMULAS, 1.0), repeats=2)
    assert (
        cli.main(
            ["export", str(tmp_path / "run"), "--format", "csv", "--out", str(tmp_path / "csv")]
        )
        == 0
    )
    seen = 0
    for path in (tmp_path / "csv").glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                for value in row:
                    seen += value.startswith("'")
                    assert not value.startswith((*FORMULA, "\t", "\r")) or float(value) < 0
    assert seen > len(FORMULAS)


@pytest.fixture(scope="module")
def document(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("json") / "run.json"
    assert (
        cli.main(["export", str(folder), "--format", "pytest-benchmark", "--out", str(path)]) == 0
    )
    return path


def test_the_document_has_the_fields_of_a_real_one(document: Path, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(benchmark):\n    benchmark(sum, [1])\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--rootdir",
        str(tmp_path),
        "--benchmark-json",
        "real.json",
    ]
    more = ["--benchmark-max-time", "0.01", "--benchmark-min-rounds", "2", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *more], cwd=tmp_path, env=alone(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    real, ours = json.loads((tmp_path / "real.json").read_text()), json.loads(document.read_text())
    assert real.keys() <= ours.keys()
    for part in ("machine_info", "commit_info"):
        assert real[part].keys() <= ours[part].keys(), part
    for benchmark in ours["benchmarks"]:
        assert benchmark.keys() == real["benchmarks"][0].keys()
        assert benchmark["stats"].keys() == real["benchmarks"][0]["stats"].keys()
        assert {type(value) for value in benchmark["stats"]["data"]} == {float}
        assert benchmark["options"].keys() <= real["benchmarks"][0]["options"].keys()


def compare(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest_benchmark", "compare", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "Failed to load" not in done.stderr, done.stderr
    return done.stdout


def test_pytest_benchmark_compares_it(document: Path, tmp_path: Path) -> None:
    for name in ("run.json", "b.json"):
        (tmp_path / name).write_bytes(document.read_bytes())
    out = compare(
        tmp_path,
        "run.json",
        "b.json",
        "--columns",
        "median,iqr,ops,rounds,outliers",
        "--csv",
        "out.csv",
    )
    count = sum(
        benchmark["group"] == "N=2 W=2 fp32"
        for benchmark in json.loads(document.read_text())["benchmarks"]
    )
    assert (
        f"'N=2 W=2 fp32': {2 * count} tests" in out
        and "slow N=4 W=2 fp32 (" in out
        and "wrong" not in out
    )
    rows = pd.read_csv(tmp_path / "out.csv")
    assert len(rows) == 2 * len(json.loads(document.read_text())["benchmarks"])
    assert "backend=slow" in compare(tmp_path, "run.json", "--group-by", "param:backend")


@pytest.mark.parametrize(
    "arguments",
    [
        "--table nothing",
        "--head 3",
        "--table steps --head 0",
        "--out x",
        "--table steps --format csv --out x",
        "--format pytest-benchmark --out {tmp}/x.txt",
        "--format csv --out {run}",
        "--format parquet --out {run}/run.json/x",
        "--format xlsx --out {tmp}/x",
        "--format csv",
    ],
)
def test_a_wrong_export_is_one_line(
    folder: Path, arguments: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert (
        cli.main(["export", str(folder), *arguments.format(run=folder, tmp=tmp_path).split()]) == 2
    )
    assert capsys.readouterr().err.count("\n") == 1
