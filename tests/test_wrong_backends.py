"""Defects that a framework can have by accident: each is found by name, and sound loops beside them are not accused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.judge import gates
from bench.judge.trial_columns import TrialRow
from bench.launch.launcher import Launcher
from bench.plan.cell import Cell, Precision, Status
from bench.run.state_check import read_truths
from bench.run.trial_record import merge_ranks, wrong
from tests.factories import make_cell, make_manifest, make_record, make_tables
from tests.wrong_backends import KINDS, Trials, reference_file
from tests.wrong_frameworks import MISUSES

pytestmark = pytest.mark.torch
CHOSEN = (
    "sound",
    "sound-two-optimizers",
    "sound-flat-masters",
    "no-weight-decay",
    "epsilon-1e-6",
    "state-in-bf16",
    "bf16-gradients-from-window-2",
    "not-reduced-in-the-last-window",
    "norms-never-reduced",
    "norms-never-trained",
    "rank-1-gradients-times-1000",
    "rank-1-norms-frozen",
    "rank-1-weights-in-bf16",
    "second-step",
)


def cell_of(backend: str, **changes: Any) -> Cell:
    values: dict[str, Any] = {
        "model": "micro",
        "accumulate": 3,
        "global_batch_size": 6,
        "sequence_length": 16,
    }
    return make_cell(backend=backend, **(values | changes))


def judged(
    launcher: Launcher, folder: Path, cells: Sequence[Cell]
) -> dict[tuple[str, str], tuple[str, str, str]]:
    """Status, gates and reason by backend and precision; references come along."""
    references = list(dict.fromkeys(cell.reference() for cell in cells))
    return {
        (row.cell.backend, row.cell.precision): (row.status, row.failed_gates or "", row.reason)
        for row in rows_of(launcher, folder, (*references, *cells))
    }


def rows_of(launcher: Launcher, folder: Path, every: tuple[Cell, ...]) -> Sequence[TrialRow]:
    """The judged rows of cells, which train on two ranks; references on one."""
    task = Trials(cells=every, world_size=2, references=str(folder))
    outcome = launcher.run(task, 1200)
    assert outcome.status is Status.OK, f"{outcome.reason}\n{outcome.traceback}"
    records = []
    for index, cell in enumerate(every):
        ranks = [rank["trials"][index] for rank in outcome.ranks if rank["trials"][index]]
        assert not wrong(ranks, task.passes)
        truths = read_truths(reference_file(str(folder), cell).with_suffix(".state"))
        facts = merge_ranks(ranks, truths) | {"passes": list(task.passes)}
        record = make_record(cell) | facts
        for other in ("collectives", "memory", "dispatch"):
            record[other] = None
        records.append(record)
    return gates.judge(make_tables(records, make_manifest())).trial_rows


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """The verdicts on all loops, in both precisions."""
    names = KINDS if request.config.getoption("--all") else CHOSEN
    cells = [cell_of(name, precision=precision) for precision in Precision for name in names]
    return judged(launcher, tmp_path_factory.mktemp("references"), cells)


def require_found(kind: Any, verdict: tuple[str, str, str]) -> None:
    """The gate of a defect found it and says so; nothing is said of what has none."""
    status, failed, reason = verdict
    if kind.found_by is None:
        assert (status, reason) == ("ok", "")
        return
    assert status == "invalid", f"{kind.name} passed"
    assert kind.found_by in failed.split(","), f"{failed}: {reason}"
    assert kind.words in reason


CASES = [
    pytest.param(name, precision, marks=() if name in CHOSEN else pytest.mark.slow)
    for name, kind in KINDS.items()
    for precision in kind.found_in
]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_defect_is_found_by_its_gate_and_a_sound_loop_is_not_accused(
    found: Any, name: str, precision: Precision
) -> None:
    require_found(KINDS[name], found[name, precision])


@pytest.fixture(scope="module")
def misused(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The verdicts on frameworks that are used wrongly, and rightly in another way, in both precisions."""
    cells = []
    for name, kind in MISUSES.items():
        for precision in Precision:
            cells.append(cell_of(name, precision=precision, replicate=kind.replicate))
    return judged(launcher, tmp_path_factory.mktemp("references"), cells)


@pytest.mark.slow
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", MISUSES)
def test_a_framework_used_wrongly_is_found_and_used_rightly_is_not(
    misused: Any, name: str, precision: Precision
) -> None:
    require_found(MISUSES[name], misused[name, precision])


OF_ANY_LOSS = ("sound", "not-reduced-from-window-2", "divided-twice", "second-step")
FACTORS = ("0.001", "1000")


@pytest.fixture(scope="module")
def of_other_losses(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The verdicts on loops that train a mean squared error, by its factor."""
    found = {}
    for factor in FACTORS:
        # Of 16 tokens each sample would have all of 16, and all ranks the same gradient.
        values: dict[str, Any] = {
            "workload": "tests.own_workload:Regression",
            "model": factor,
            "sequence_length": 7,
        }
        cells = [
            cell_of(name, precision=precision, **values)
            for precision in Precision
            for name in OF_ANY_LOSS
        ]
        folder = tmp_path_factory.mktemp("references")
        found[factor] = judged(launcher, folder, cells)
    return found


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", OF_ANY_LOSS)
def test_no_size_of_a_loss_hides_a_defect_or_makes_one(
    of_other_losses: Any, name: str, precision: Precision, factor: str
) -> None:
    require_found(KINDS[name], of_other_losses[factor][name, precision])


BUILT_IN = ("ddp-deferred", "fsdp2-deferred", "deepspeed-zero2-eager", "deepspeed-zero3-eager")


@pytest.mark.parametrize("workload", ["Uneven", "Odd"])
def test_shards_of_a_model_that_nothing_divides_add_up(
    launcher: Launcher, tmp_path: Path, workload: str
) -> None:
    """Some shards are empty, a partition ends within a parameter, and parameters are tied, frozen or unused."""
    values = {
        "workload": f"tests.own_workload:{workload}",
        "model": "2",
        "global_batch_size": 12,
        "precision": Precision.FP32,
    }
    cells = [cell_of(name, **values) for name in BUILT_IN]
    every = (cells[0].reference(), *cells)
    rows = rows_of(launcher, tmp_path, every)
    for row in rows:
        assert (row.status, row.reason, row.unchecked) == ("ok", "", None), row.cell.backend
        assert row.end_weights_error is not None and row.end_state_error is not None
        assert row.end_state_error < 1e-4
