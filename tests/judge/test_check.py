"""``check`` and the baseline's verdicts, on whole runs whose step times are simulated."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench import cli
from bench.findings import Level
from bench.judge.analysis import Analysis
from bench.judge.integrity import check
from bench.judge.loading import load
from bench.judge.verdicts import Verdict
from bench.plan.cell import Cell
from bench.run.journal import JOURNAL, Journal, encode, read_document, write_document
from tests.factories import GoneReader, judged_run, make_cell, make_manifest, make_record
from tests.pages import report, write_run

FACTORS = {"base": 1.0, "equal": 1.0, "slow": 1.05, "fast": 0.9}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended by its precision, with its tables."""
    folder = write_run(
        tmp_path_factory.mktemp("check") / "sound",
        FACTORS,
        accumulate=(2,),
        repeats=12,
        ended_by="precision",
    )
    report(folder, drawn=False)
    return folder


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def found(folder: Path, level: Level) -> dict[str, str]:
    return {finding.topic: finding.text for finding in check(folder) if finding.level is level}


def test_verdicts_of_a_run_against_its_baseline(sound: Path) -> None:
    run = load(sound)
    result = Analysis(run=run)
    assert result.baseline == "base"
    verdicts = {row.b.backend: row.verdict for row in result.verdicts}
    assert verdicts == {"equal": Verdict.SAME, "slow": Verdict.SLOWER, "fast": Verdict.FASTER}
    assert run.manifest.ended_by == "precision"
    assert (
        result.control is not None
        and result.control.b.backend == "base"
        and result.control.has_interval
    )
    stored = pd.read_parquet(sound / "ratios.parquet").set_index("backend_b")
    assert stored["verdict"].to_dict() == {"equal": "same", "slow": "slower", "fast": "faster"}


def test_a_sound_run_is_clean_but_for_what_was_not_measured(
    sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert found(sound, Level.ERROR) == {}
    assert set(found(sound, Level.WARNING)) == {"machine", "records"}, (
        "the ranks do not say how idle the machine was, and dates are made up"
    )
    assert cli.main(["check", str(sound)]) == 0
    assert "0 errors" in capsys.readouterr().out
    assert cli.main(["check", str(sound), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["errors"] == 0 and {"level", "topic", "text"} == facts["findings"][0].keys()


def edit(folder: Path, number: int, change: Any) -> None:
    """Change one record of the journal, counted from 0, as one does who knows how its checksum is made."""
    path = folder / JOURNAL
    records = Journal(folder).read()
    change(records[number])
    path.write_bytes(b"".join(map(encode, records)))


def test_an_edited_step_time_is_found_thrice(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(copy, 3, lambda record: record["time"].update(step_seconds=[0.01] * 3))
    errors = found(copy, Level.ERROR)
    assert "was changed after the run" in errors["journal"]
    assert "do not follow from those of their ranks" in errors["trials"]
    assert "follows from the journal" in errors["tables"]
    assert cli.main(["check", str(copy)]) == 1
    assert "do not cite it" in capsys.readouterr().out


def test_a_reader_that_has_gone_does_not_make_bad_data_good(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(copy, 3, lambda record: record["time"].update(step_seconds=[0.01] * 3))
    monkeypatch.setattr(sys, "stdout", GoneReader())
    assert cli.main(["check", str(copy)]) == 1


def test_why_there_is_no_telemetry_is_a_limitation(copy: Path) -> None:
    edit(
        copy, 3, lambda record: record.update(gpus={"gpus": [], "notes": ["no telemetry: no NVML"]})
    )
    texts = [finding.text for finding in check(copy) if finding.level is Level.WARNING]
    assert "no telemetry: no NVML (1 trial)" in texts


def test_an_edited_table_is_found(copy: Path) -> None:
    path = copy / "trials.parquet"
    table = pd.read_parquet(path)
    table.loc[4, "step_time_s"] *= 0.9
    table.to_parquet(path)
    assert "step_time_s of row 4" in found(copy, Level.ERROR)["tables"]
    table.drop(columns=["mfu", "wall_s"]).to_parquet(path)
    assert "step_time_s of row 4" in found(copy, Level.ERROR)["tables"], "what is there is compared"
    assert "has no column mfu, wall_s" in found(copy, Level.WARNING)["tables"]
    path.unlink()
    assert "is missing" in found(copy, Level.WARNING)["tables"]


def test_missing_trials_are_found(copy: Path) -> None:
    path = copy / JOURNAL
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    errors = found(copy, Level.ERROR)
    assert errors["trials"].startswith("2 that were scheduled")
    assert "journal" in errors


def test_an_unfinished_run_and_uncommitted_changes_are_told(copy: Path) -> None:
    manifest = {
        key: value
        for key, value in read_document(copy).items()
        if key not in ("finished", "journal_sha256")
    }
    write_document(copy, manifest | {"git": {"commit": "0123456789abcdef", "clean": False}})
    warnings = found(copy, Level.WARNING)
    assert "not finished" in warnings["trials"] and "was not stored" in warnings["journal"]
    assert "uncommitted" in warnings["code"]


def test_a_trial_whose_ranks_took_different_numbers_of_steps_is_told(copy: Path) -> None:
    uneven = {"rank_step_seconds": [[0.01] * 3, [0.01] * 2], "ranks_agree": False}
    edit(copy, 3, lambda record: record["time"].update(uneven))
    assert Analysis(run=load(copy)).findings
    assert "ranks" in found(copy, Level.WARNING)["gates"]


def test_one_repeat_shows_neither_drift_nor_that_there_is_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", FACTORS, accumulate=(2,), repeats=1)
    assert not {"drift", "outliers", "two modes", "blocks"} & found(folder, Level.GOOD).keys()


def test_drift_and_failed_gates_are_told(tmp_path: Path) -> None:
    def changes(cell: Cell, repeat: int) -> dict[str, Any]:
        wrong = (
            {"update": {"error": 0.5, "scale": 0.5, "residual": 1e-7}}
            if cell.backend == "other"
            else {}
        )
        return wrong | {"slower": 1 + 0.01 * repeat}

    folder = write_run(
        tmp_path / "run", {"base": 1.0, "other": 1.3}, accumulate=(2,), changes=changes
    )
    warned = found(folder, Level.WARNING)
    assert "from first to last" in warned["drift"]
    assert "divided by N = 2 twice" in warned["gates"]


@pytest.mark.parametrize(
    "backends", [("ddp-deferred", "fsdp2-deferred"), ("ddp-deferred", "ddp-eager")]
)
def test_loops_that_were_compared_with_bare_ones_are_named_beside_their_comparison(
    backends: tuple[str, ...],
) -> None:
    cells = [make_cell(backend=name) for name in backends]
    records = [make_record(cell) for cell in (cells[0].reference(), *cells)]
    data = Analysis(run=judged_run(records, make_manifest([cells[0].reference(), *cells])))
    found = [finding.text for finding in data.findings if finding.topic == "bare loops"]
    assert len(found) == ("fsdp2-deferred" in backends)
    assert all(name in text for text in found for name in backends)


@pytest.mark.parametrize("workload", ["mine:Own", "llama"])
def test_bytes_without_a_layout_to_hold_them_against_are_told(workload: str) -> None:
    cell = make_cell(backend="ddp-deferred", workload=workload)
    run = judged_run([make_record(cell)], make_manifest([cell]))
    notes = [finding.text for finding in Analysis(run=run).findings]
    told = [text for text in notes if "the layout of the model was not recorded" in text]
    assert len(told) == (workload != "llama"), notes
