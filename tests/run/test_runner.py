"""The runner: order, passes, failures that do not end a run, interrupts, and going on where a run stopped."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bench.backends.base import Backend
from bench.errors import InputError
from bench.launch import dumps
from bench.launch.interrupt import terminate_as_interrupt
from bench.launch.outcome import Outcome
from bench.plan.cell import REFERENCE, Status
from bench.plan.expand import expand
from bench.plan.models import SIZES
from bench.plan.schedule import InterimAnalysis, block
from bench.plan.task import EXTRA_PASSES, Spec
from bench.run import machine, runner, start
from bench.run.journal import Journal, encode, read_document, read_manifest, write_document
from bench.run.manifest import Manifest
from bench.run.runner import Runner
from bench.run.trial_record import TrialRecord
from tests import factories
from tests.factories import (
    FakeLauncher,
    Script,
    failed,
    make_backend,
    make_cell,
    make_matrix,
    make_rank,
)

NAMES = [f"b{number}" for number in range(6)]
BACKENDS: dict[str, type[Backend]] = {name: make_backend(name) for name in [REFERENCE, *NAMES]}


class Run:
    """A run of the backends b0 ... b5 at N = 2 in a folder; ``go`` runs what is left of it with a new Runner."""

    def __init__(
        self,
        folder: Path,
        *,
        repeats: int = 3,
        seed: int = 0,
        backends: Mapping[str, type[Backend]] = BACKENDS,
        workload: str = "llama",
    ) -> None:
        self.folder = folder
        self.backends = backends
        overrides = {"repeats": repeats, "training.seed": seed, "timeout_s": 77}
        overrides["workload.workload"] = workload
        self.matrix = make_matrix(
            overrides, backend=[name for name in backends if name != REFERENCE], accumulate=[2]
        )
        self.cells = [cell for cell in expand(self.matrix, backends, 0).cells if not cell.twin]
        self.manifest = start.create(
            folder, start.Planned(self.matrix, backends, self.cells), cold=False
        )
        self.observer = Mock()
        self.judge: Any = never

    def go(self, script: Script | None = None) -> FakeLauncher:
        launcher = FakeLauncher(script)
        self.runner(launcher).run()
        return launcher

    def runner(self, launcher: Any, **options: Any) -> Runner:
        manifest = read_manifest(self.folder)
        return Runner(
            self.folder, manifest, self.backends, launcher, self.observer, self.judge, **options
        )

    @property
    def records(self) -> list[dict[str, Any]]:
        return Journal(self.folder).read()

    def statuses(self, backend: str) -> list[str]:
        return [record["status"] for record in self.records if record["cell"]["backend"] == backend]


def never(
    records: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any], repeats: int
) -> InterimAnalysis:
    raise AssertionError("a run with fixed repeats does not look")


def ran(launcher: FakeLauncher) -> list[tuple[str, tuple[str, ...]]]:
    return [(spec.cell.backend, spec.passes) for spec in launcher.specs]


def passes_of(launcher: FakeLauncher, backend: str) -> list[tuple[str, ...]]:
    return [passes for name, passes in ran(launcher) if name == backend]


def when(backend: str, call: int, outcome: Outcome) -> Script:
    """A script in which one call of a backend, counted from 0, ends otherwise."""
    count = itertools.count()
    return lambda spec, _: outcome if spec.cell.backend == backend and next(count) == call else None


def test_order_is_seeded_and_differs_between_repeats() -> None:
    cells = [make_cell(accumulate=n) for n in range(1, 21)]
    cells.insert(3, cells[0].reference())
    orders = {
        tuple(trial.cell.cell_id for trial in block(cells, repeat, seed))
        for seed in ("0", "0", "1")
        for repeat in range(3)
    }
    assert len(orders) == 6
    assert not any(
        list(order[1:]) == [cell.cell_id for cell in cells if cell.backend != REFERENCE]
        for order in orders
    )


def test_a_run_runs_all_trials_in_order(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    launcher = run.go()
    expected = list(read_manifest(run.folder).schedule().trials())
    other = Run(tmp_path / "other")
    other.go()
    keys = [(record["cell_id"], record["repeat"]) for record in run.records]
    keys_of_other = [(record["cell_id"], record["repeat"]) for record in other.records]
    assert keys != keys_of_other and sorted(keys) == sorted(keys_of_other)
    assert [(spec.cell.cell_id) for spec in launcher.specs] == [
        trial.cell.cell_id for trial in expected
    ]
    assert [(record["cell_id"], record["repeat"]) for record in run.records] == [
        trial.key for trial in expected
    ]
    assert {record["status"] for record in run.records} == {"ok"}
    assert set(launcher.timeouts) == {77.0}
    assert [call.args[1:] for call in run.observer.started.call_args_list] == [
        (done, 21) for done in range(21)
    ]
    assert [call.args[1].status for call in run.observer.finished.call_args_list] == ["ok"] * 21


def test_extra_passes_run_once_in_the_first_block_and_never_again(tmp_path: Path) -> None:
    run = adaptive(tmp_path, repeats=3, most=6)
    every = [cell.cell_id for cell in run.cells]
    run.judge = Scripted(every, every, [])
    launcher = run.go(when("b1", 0, failed()))
    timed = [("time",)]
    assert (
        passes_of(launcher, REFERENCE)
        == passes_of(launcher, "b0")
        == [factories.ALL_PASSES, *timed * 5]
    )
    assert passes_of(launcher, "b1") == [factories.ALL_PASSES, *timed * 5], (
        "crashed, and not tried again"
    )


def test_no_update_without_a_reference(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    launcher = run.go(when(REFERENCE, 0, failed(Status.OOM)))
    without = ("time", *(name for name in EXTRA_PASSES if name != "update"))
    assert passes_of(launcher, REFERENCE) == [factories.ALL_PASSES, ("time",), ("time",)]
    assert passes_of(launcher, "b0") == [without, ("time",), ("time",)]
    assert run.statuses(REFERENCE) == ["oom", "ok", "ok"]
    assert run.statuses("b0") == ["ok"] * 3
    again = FakeLauncher()
    run.runner(again, retry_failed=True).run()
    assert passes_of(again, REFERENCE) == [factories.ALL_PASSES]
    assert passes_of(again, "b0") == [("time", "update")], "the update is made up for"


def test_dumps_of_a_hang_are_kept_beside_its_log(tmp_path: Path) -> None:
    def script(spec: Spec, number: int) -> Outcome | None:
        if spec.cell.backend != "b2":
            return None
        for rank in range(2):
            dumps.stacks_of(Path(spec.folder), rank).write_text(f"stacks of rank {rank}")
        (Path(spec.folder) / "flight-rank0").write_bytes(b"flight")
        return failed(Status.HANG, "no rank got on for 3 s")

    run = Run(tmp_path / "run", repeats=1)
    run.go(script)
    record = next(record for record in run.records if record["status"] == "hang")
    stem = record["log"].removesuffix(".log")
    assert record["dumps"] == [
        f"{stem}.rank0.stacks",
        f"{stem}.rank1.stacks",
        f"{stem}.flight-rank0",
    ]
    assert (run.folder / record["dumps"][1]).read_text() == "stacks of rank 1"
    assert (run.folder / record["dumps"][2]).read_bytes() == b"flight"


def test_a_trial_that_takes_too_long_names_the_option_for_its_limit(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", repeats=1)
    run.go(when("b2", 0, failed(Status.TIMEOUT, "not finished after 3 s")))
    assert "not finished after 3 s; raise --timeout" in {record["reason"] for record in run.records}


def test_a_result_that_no_sound_rank_hands_back_is_a_crash(tmp_path: Path) -> None:
    def script(spec: Spec, number: int) -> Outcome | None:
        if spec.cell.backend != "b2":
            return None
        ranks = [make_rank(spec.cell, spec.passes, rank) for rank in range(2)]
        ranks[1]["time"]["step_seconds"] = "fast"
        return Outcome(status=Status.OK, reason="", ranks=ranks, wall_s=1.0)

    run = Run(tmp_path / "run", repeats=1)
    run.go(script)
    assert run.statuses("b2") == ["crashed"]
    record = next(record for record in run.records if record["status"] == "crashed")
    assert record["reason"].startswith("rank 1: its result is damaged: ")
    assert "time.step_seconds is 'fast'" in record["reason"]
    assert "time" not in record


def test_an_interrupt_while_a_trial_is_kept_waits_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run")
    append = Journal.append

    def interrupted(journal: Journal, record: dict[str, Any]) -> None:
        if record["slot"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        append(journal, record)

    monkeypatch.setattr(Journal, "append", interrupted)
    with terminate_as_interrupt(), pytest.raises(KeyboardInterrupt):
        run.go()
    assert [record["status"] for record in run.records] == ["ok"] * 5, "the trial had ended well"


def test_a_trial_that_failed_on_a_full_disk_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run", repeats=1)

    def script(spec: Spec, number: int) -> Outcome | None:
        if number != 3:
            return None
        monkeypatch.setattr(start, "free", lambda folder: 0)
        return failed(Status.CRASHED, "rank 0: OSError: [Errno 28] No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run.go(script)
    assert [record["status"] for record in run.records] == ["ok"] * 3
    with pytest.raises(OSError, match="No space left"):
        run.go()
    assert len(run.records) == 3, "no trial is begun without space"
    monkeypatch.undo()
    assert len(run.go().specs) == 4


def test_what_a_run_needs_grows_with_its_trials_and_references() -> None:
    cell = make_cell(timed_windows=1000)
    once, often = start.needed([cell], 1), start.needed([cell], 11)
    assert once > start.RESERVE_BYTES
    record = factories.make_record(cell)
    record["time"]["rank_step_seconds"] = [record["time"]["step_seconds"]] * cell.world_size
    assert (often - once) / 10 > len(encode(record))
    assert (
        start.needed([cell.reference()], 1) - start.RESERVE_BYTES > 4 * SIZES["tiny"].num_parameters
    )


def test_reopen_refuses_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    now = {**machine.machine(), "cpu": "Another CPU"}
    monkeypatch.setattr(machine, "machine", lambda: now)
    with pytest.raises(InputError, match=r"machine.cpu was .* and is 'Another CPU'; "):
        start.reopen(run.folder, BACKENDS)


def test_reopen_refuses_another_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "own_counted.py"
    module.write_text("def factory(spec): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    matrix = make_matrix(
        {"workload.workload": "own_counted:factory"}, backend=["b0"], accumulate=[2]
    )
    plan = start.Planned(matrix, BACKENDS, expand(matrix, BACKENDS, 0).cells)
    made = start.create(tmp_path / "run", plan, cold=False)
    assert start.reopen(tmp_path / "run", BACKENDS) == made
    module.write_text("def factory(spec): return 1\n")
    with pytest.raises(InputError, match=r"the code .* is not what it was"):
        start.reopen(tmp_path / "run", BACKENDS)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("cells", [], "cells: there are none"),
        ("cells", [{"backend": "b0"}], r"cells\[0\].accumulate is missing"),
        ("cold", "no", "cold is 'no'; it must be"),
        ("git", {"commit": 7}, "git.commit is 7; it must be a string"),
        ("looks", [{"repeats": 1}], r"looks\[0\].open is missing"),
        ("matrix", {}, "matrix: device is missing"),
    ],
)
def test_reopen_refuses_an_edited_manifest(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    run = Run(tmp_path / "run")
    write_document(run.folder, read_document(run.folder) | {key: value})
    with pytest.raises(InputError, match=words):
        start.reopen(run.folder, BACKENDS)


class Scripted:
    """A judge that goes on with all cells, then with two, then ends."""

    def __init__(self, *opens: Sequence[str]) -> None:
        self.opens = list(opens)
        self.asked: list[tuple[int, int]] = []

    def __call__(
        self, records: Sequence[TrialRecord], manifest: Manifest, repeats: int
    ) -> InterimAnalysis:
        self.asked.append((len(records), repeats))
        return InterimAnalysis(
            repeats=repeats, open=tuple(self.opens[len(manifest.looks)]), widest=0.25
        )


def adaptive(tmp_path: Path, repeats: int = 2, most: int = 9, budget_s: float = 0.0) -> Run:
    run = Run(tmp_path / "run", repeats=repeats)
    manifest = read_document(run.folder)
    manifest["matrix"]["values"] |= {"max_repeats": most, "budget_s": budget_s}
    write_document(run.folder, manifest)
    return run


def test_cells_are_run_on_while_the_judge_wants_more(tmp_path: Path) -> None:
    run = adaptive(tmp_path)
    every = [cell.cell_id for cell in run.cells]
    run.judge = Scripted(every, every[3:5], [])
    run.go()
    assert run.judge.asked == [(14, 2), (28, 4), (32, 6)], (
        "after the first blocks, then after a fifth more, in pairs"
    )
    keys = [(record["cell_id"], record["repeat"]) for record in run.records]
    assert sorted(keys) == sorted(
        [(cell_id, repeat) for cell_id in every for repeat in range(4)]
        + [(cell_id, repeat) for cell_id in every[3:5] for repeat in (4, 5)]
    )
    manifest = read_document(run.folder)
    assert manifest["ended_by"] == "precision"
    assert [(look["repeats"], look["open"]) for look in manifest["looks"]] == [
        (2, every),
        (4, every[3:5]),
        (6, []),
    ]
    assert [record["slot"] for record in run.records] == list(range(32))


@pytest.mark.parametrize(
    ("budget_s", "blocks"), [(1e-9, 1), (55.0, 1), (55.25, 2), (131.75, 5), (157.0, 5), (157.25, 6)]
)
def test_no_block_but_the_first_begins_that_would_exceed_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_s: float, blocks: int
) -> None:
    """A trial takes 4.25 s; the first block has seven of them, each of the others six."""
    now = 0.0

    def script(spec: Spec, number: int) -> None:
        nonlocal now
        now += 4.25  # as FakeLauncher says

    run = adaptive(tmp_path, repeats=5, budget_s=budget_s)
    every = [cell.cell_id for cell in run.cells]
    write_document(run.folder, read_document(run.folder) | {"once": every[:1]})
    run.judge = Scripted(every, every)
    monkeypatch.setattr(runner.time, "monotonic", lambda: now)
    run.go(script)
    extras = {
        record["cell_id"]: record["repeat"]
        for record in run.records
        if record["passes"] != ["time"]
    }
    assert extras == dict.fromkeys(every, 0)
    repeats = [
        sorted(record["repeat"] for record in run.records if record["cell_id"] == cell)
        for cell in every
    ]
    assert repeats == [[0], *[list(range(blocks))] * 6]
    assert now == 4.25 * (7 + 6 * (blocks - 1)) and (blocks == 1 or now <= budget_s)
    assert read_document(run.folder)["ended_by"] == "budget"
    told = run.observer.expect.call_args_list[0].kwargs["budget_left_s"]
    assert told == pytest.approx(budget_s), "the display is told how far it reaches"
    assert run.go(script).specs == [], "a resumed run has no new budget"


@pytest.mark.parametrize("stop", [5, 14, 20, 29])
def test_an_interrupted_adaptive_run_goes_on_as_if_it_had_not_been(
    tmp_path: Path, stop: int
) -> None:
    unbroken, broken = adaptive(tmp_path / "a"), adaptive(tmp_path / "b")
    every = [cell.cell_id for cell in unbroken.cells]

    def interrupt(spec: Spec, number: int) -> None:
        if number == stop:
            raise KeyboardInterrupt

    for run in (unbroken, broken):
        run.judge = Scripted(every, every[1:4], [])
    unbroken.go()
    with pytest.raises(KeyboardInterrupt):
        broken.go(interrupt)
    broken.go()
    kept = [
        (record["cell_id"], record["repeat"])
        for record in broken.records
        if record["status"] == "ok"
    ]
    assert kept == [trial.key for trial in read_manifest(broken.folder).schedule().trials()]
    assert sorted(kept) == sorted(
        (record["cell_id"], record["repeat"]) for record in unbroken.records
    )
    assert read_document(broken.folder)["looks"] == read_document(unbroken.folder)["looks"]


@pytest.mark.parametrize(("trial_s", "renewals"), [(10.0, 2), (5.0, 1), (2.0, 0)])
def test_fork_servers_are_renewed_between_pairs_of_blocks_but_not_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trial_s: float, renewals: int
) -> None:
    now = 0.0

    def script(spec: Spec, number: int) -> None:
        nonlocal now
        now += trial_s

    monkeypatch.setattr(runner.time, "monotonic", lambda: now)
    assert Run(tmp_path / "run", repeats=6).go(script).closed == renewals, (
        "a pair of blocks is 14 trials"
    )


def test_cells_that_are_skipped_are_rows_and_are_not_tried(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    cell = next(cell for cell in run.cells if cell.backend == "b1")
    manifest = read_document(run.folder) | {
        "skipped": {cell.cell_id: "1b needs 9 GiB by prediction, the GPU has 8"}
    }
    write_document(run.folder, manifest)
    launcher = run.go()
    assert not passes_of(launcher, "b1") and passes_of(launcher, "b0")
    assert launcher.prepared == set(run.backends) - {"b1"}
    assert run.statuses("b1") == ["unsupported"] * 3
    reasons = {record["reason"] for record in run.records if record["cell"]["backend"] == "b1"}
    assert reasons == {"1b needs 9 GiB by prediction, the GPU has 8"}


@pytest.mark.parametrize("status", [Status.CRASHED, Status.HANG, Status.TIMEOUT, Status.OOM])
def test_a_reference_of_ones_own_model_that_fails_ends_the_run(
    tmp_path: Path, status: Status
) -> None:
    run = Run(tmp_path / "run", workload="tests.own_workload:Cycle")
    with pytest.raises(InputError, match=f"'tests.own_workload:Cycle': its reference.*{status}"):
        run.go(when(REFERENCE, 0, failed(status)))
    assert run.statuses(REFERENCE) == [status], "what happened is kept"


def test_a_reference_of_a_shipped_model_that_fails_does_not(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", repeats=1)
    run.go(when(REFERENCE, 0, failed(Status.HANG)))
    assert len(run.records) == len(run.cells)
