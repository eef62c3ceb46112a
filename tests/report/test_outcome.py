"""A cell with good and failed trials is shown in the same words everywhere."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

import bench
from bench.cli import main
from bench.plan.cell import Cell
from tests.pages import read, report, write_run

FACTORS = {"alpha-eager": 1.0, "alpha-deferred": 0.75}
OUTCOME = "crashed, 9 of 10 ok"


def crash(cell: Cell, repeat: int) -> dict[str, str]:
    """One trial of ten of the faster backend crashes."""
    failed = cell.backend == "alpha-deferred" and cell.accumulate == 4 and repeat == 3
    return {"status": "crashed", "reason": "rank 1: ValueError: no"} if failed else {}


def test_one_crashed_trial_of_ten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = write_run(tmp_path / "run", FACTORS, changes=crash)
    status, printed = report(folder)
    texts = {"terminal": printed, "report.md": (folder / "report.md").read_text(encoding="utf-8")}
    page = read(folder / "report.html")
    for key in ("cells", "correctness", "failed"):
        (section,) = page.find("section", aria_labelledby=key)
        texts[f"{key} of the page"] = section.text
    sound = write_run(tmp_path / "sound", FACTORS)
    capsys.readouterr()
    main(["compare", str(sound), str(folder)])
    texts["compare"] = capsys.readouterr().out
    assert {place: text.count(OUTCOME) for place, text in texts.items()} == dict.fromkeys(texts, 1)
    assert (
        status == 1
        and "Fastest correct backend" in printed
        and "Fastest correct backend  alpha-eager" in printed
    )

    with Image.open(folder / "plots" / "loss_curves.png") as drawn:
        assert not drawn.info["Title"].startswith("alpha-deferred"), "its losses are right"

    frames = {"frame": bench.load(folder).cells}
    assert main(["export", str(folder), "--format", "csv", "--out", str(tmp_path / "csv")]) == 0
    frames["export"] = pd.read_csv(tmp_path / "csv" / "cells.csv")
    for name in ("memory_vs_time", "step_time", "memory_categories"):
        frames[name] = pd.read_csv(folder / "plots" / f"{name}.csv")
    for name, frame in frames.items():
        (row,) = frame[
            (frame["backend"] == "alpha-deferred")
            & (frame["accumulate"] == 4)
            & frame["run_id"].eq("run")
        ].to_dict("records")
        assert (row["status"], row["outcome"], row["num_ok"], row["num_trials"]) == (
            "crashed",
            OUTCOME,
            9,
            10,
        ), name
        if "step_time_s" in row:
            assert row["step_time_s"] == pytest.approx(0.075, rel=0.01), name
