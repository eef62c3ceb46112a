"""Real runs on something else than the shipped model and the Markov source."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cli import main
from bench.errors import InputError
from bench.plan.models import describe_file, sources
from tests.conftest import ROOT, Command, run_matrix

BACKENDS = ["ddp-deferred", "fsdp2-deferred", "deepspeed-zero3-eager", "lightning-ddp"]


def test_a_workload_of_ones_own_runs_under_every_kind_of_backend(
    tmp_path: Path, here: Command
) -> None:
    run = run_matrix(
        tmp_path,
        "--workload",
        "tests.own_workload:Cycle",
        "--model",
        "perceptron",
        backend=BACKENDS,
        command=here,
    )
    assert run.process.returncode == 0, run.process.stdout + run.process.stderr
    trials = run.tables.trials
    assert (trials["status"] == "ok").all()
    assert set(trials["workload"]) == {"tests.own_workload:Cycle"}
    assert set(trials["num_parameters"]) == {16 * 32 + 32 * 64 + 64 + 64 * 16 + 16}
    assert trials["entropy_floor"].isna().all(), "an unknown floor is empty, not 0"
    assert (trials["final_loss"] < run.tables.losses.query("step == 0")["loss"].max()).all(), (
        "it learns"
    )


def test_the_files_of_a_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package" / "below").mkdir(parents=True)
    files = [
        tmp_path / "own_package" / name for name in ("__init__.py", "below/more.py", "model.py")
    ]
    for file in [*files, tmp_path / "own_module.py"]:
        file.write_text("raise RuntimeError\n" if file.name == "own_module.py" else "")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert sources("own_package.model:Factory") == sources("own_package:factory") == files
    assert sources("own_module:factory") == [tmp_path / "own_module.py"], "it is found, not run"
    assert sources("llama") == []
    with pytest.raises(InputError, match="there is no module no_such_module"):
        sources("no_such_module:factory")
    with pytest.raises(InputError, match=r"workload 'own_package\.no\.such:factory'"):
        sources("own_package.no.such:factory")


def test_a_text_file_is_a_corpus(tmp_path: Path, here: Command) -> None:
    text = ROOT / "LICENSE"
    run = run_matrix(tmp_path, "--corpus", str(text), backend=["ddp-deferred"], command=here)
    assert run.process.returncode == 0, run.process.stdout + run.process.stderr
    assert {record["cell"]["corpus"] for record in run.records} == {describe_file(text, 17)}
    assert str(text) not in (run.folder / "trials.jsonl").read_text(), (
        "a cell names content, not a place"
    )
    assert run.tables.trials["entropy_floor"].isna().all()


def test_a_plan_says_that_it_does_not_know_how_long_an_unknown_model_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--matrix", "cpu", "--backend", "ddp-deferred", "--workload"]
    assert main(["plan", *given, "tests.own_workload:Cycle"]) == 0
    out = capsys.readouterr().out
    assert "of each cell: of unknown length" in out
    assert "about" not in out and "all of them fit" not in out
