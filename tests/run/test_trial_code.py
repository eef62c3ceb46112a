"""What a trial depends on: found by imports, for ``--resume`` and for ``nox -s results`` alike."""

from __future__ import annotations

from bench.backends.base import built_in
from bench.run import trial_code
from studies.results import ROWS


def names() -> set[str]:
    return {str(path.relative_to(trial_code.PACKAGE)) for path in trial_code.modules()}


def test_what_trains_and_measures_is_found() -> None:
    backends = {
        f"{backend.__module__.removeprefix('bench.').replace('.', '/')}.py"
        for backend in built_in().values()
    }
    entries = {
        "run/runner.py",
        "launch/rank.py",
        "measure/trial.py",
        "measure/taps.py",
        "workload/llama.py",
    }
    assert backends | entries <= names()


def test_titles_figures_and_checks_of_the_machine_are_not() -> None:
    folders = {name.partition("/")[0] for name in names()}
    assert folders == set(trial_code.STAGES)
    assert "launch/gpu_checks.py" not in names()


def test_a_committed_run_is_out_of_date_by_the_same_code() -> None:
    (cpu,) = [row for row in ROWS if row.name == "cpu"]
    assert {f"bench/{name}" for name in names()} <= set(cpu.code)
