"""The runner: order, passes, failures that do not end a run, interrupts, and going on where a run stopped."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.backends.base import Backend, registry
from bench.errors import InputError
from bench.launch import dumps
from bench.launch.interrupt import terminate_as_interrupt
from bench.launch.outcome import Outcome
from bench.plan.cell import REFERENCE, Cell, Device, Status
from bench.plan.expand import expand
from bench.plan.schedule import Look, Trial, block
from bench.plan.task import EXTRA_PASSES, Spec
from bench.run import machine, runner, start
from bench.run.journal import JOURNAL, MANIFEST, Journal, read_manifest, write_manifest
from bench.run.runner import Runner
from tests.factories import ALL_PASSES, FakeLauncher, Script, failed, make_backend, make_cell, make_matrix, make_rank

NAMES = [f"b{number}" for number in range(6)]
BACKENDS: dict[str, type[Backend]] = {name: make_backend(name) for name in [REFERENCE, *NAMES]}


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.started_with: list[tuple[str, int, int, int]] = []
        self.statuses: list[str] = []
        self.looks: list[Look] = []
        self.budgets: list[float] = []

    def expect(self, trials: Sequence[Trial], *, more: bool, budget_left_s: float) -> None:
        self.expected = ([trial.key for trial in trials], more)
        self.budgets.append(budget_left_s)

    def say(self, message: str) -> None: ...

    def looked(self, look: Look) -> None:
        self.looks.append(look)

    def started(self, trial: Trial, done: int, total: int) -> None:
        self.started_with.append((trial.cell.backend, trial.repeat, done, total))

    def finished(self, trial: Trial, record: Mapping[str, Any]) -> None:
        self.statuses.append(str(record["status"]))


class Run:
    """A run of the backends b0 ... b5 at N = 2 in a folder; ``go`` runs what is left of it with a new Runner."""

    def __init__(
        self, folder: Path, *, repeats: int = 3, seed: int = 0, backends: Mapping[str, type[Backend]] = BACKENDS
    ) -> None:
        self.folder = folder
        self.backends = backends
        overrides = {"repeats": repeats, "training.seed": seed, "timeout_s": 77}
        self.matrix = make_matrix(overrides, backend=[name for name in backends if name != REFERENCE], accumulate=[2])
        self.cells = [cell for cell in expand(self.matrix, backends, 0) if not cell.twin]
        self.manifest = start.create(folder, self.matrix, self.cells, backends, cold=False)
        self.observer = Recorder()
        self.judge: Any = never

    def go(self, script: Script | None = None) -> FakeLauncher:
        launcher = FakeLauncher(script)
        self.runner(launcher).run()
        return launcher

    def runner(self, launcher: Any, **options: Any) -> Runner:
        manifest = read_manifest(self.folder)
        return Runner(self.folder, manifest, self.backends, launcher, self.observer, self.judge, **options)

    @property
    def records(self) -> list[dict[str, Any]]:
        return Journal(self.folder).read()

    def statuses(self, backend: str) -> list[str]:
        return [record["status"] for record in self.records if record["cell"]["backend"] == backend]


def never(records: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any], repeats: int) -> Look:
    raise AssertionError("a run with fixed repeats does not look")


def order(cells: Sequence[Cell], repeats: int, seed: int) -> list[Trial]:
    return [trial for repeat in range(repeats) for trial in block(cells, repeat, seed)]


def ran(launcher: FakeLauncher) -> list[tuple[str, tuple[str, ...]]]:
    return [(spec.cell.backend, spec.passes) for spec in launcher.specs]


def passes_of(launcher: FakeLauncher, backend: str) -> list[tuple[str, ...]]:
    return [passes for name, passes in ran(launcher) if name == backend]


def when(backend: str, calls: Sequence[int], outcome: Outcome | BaseException) -> Script:
    """A script in which some calls of one backend, counted from 0, end otherwise."""
    count = 0

    def script(spec: Spec, number: int) -> Outcome | None:
        nonlocal count
        if spec.cell.backend != backend:
            return None
        count += 1
        if count - 1 not in calls:
            return None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return script


def cells(count: int = 20) -> list[Cell]:
    made = [make_cell(accumulate=n + 1) for n in range(count)]
    return [*made[:3], made[0].reference(), *made[3:]]


def test_order_has_every_trial_once() -> None:
    trials = order(cells(), 3, seed=0)
    assert sorted(trial.key for trial in trials) == sorted((cell.cell_id, r) for cell in cells() for r in range(3))
    assert [trial.repeat for trial in trials] == [r for r in range(3) for _ in cells()]


def test_order_has_the_references_first_in_every_repeat() -> None:
    trials = order([*cells(), make_cell(backend=REFERENCE, seed=1)], 3, seed=0)
    for repeat in range(3):
        names = [trial.cell.backend for trial in trials if trial.repeat == repeat]
        assert names[:2] == [REFERENCE] * 2
        assert REFERENCE not in names[2:]


def test_order_is_seeded_and_differs_between_repeats() -> None:
    def ids(seed: int, repeat: int) -> list[str]:
        return [trial.cell.cell_id for trial in order(cells(), 3, seed) if trial.repeat == repeat]

    assert ids(0, 0) == ids(0, 0)
    assert len({tuple(ids(seed, repeat)) for seed in range(2) for repeat in range(3)}) == 6
    assert ids(0, 0)[1:] != [cell.cell_id for cell in cells() if cell.backend != REFERENCE]


def test_a_run_runs_all_trials_in_order(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    launcher = run.go()
    expected = order(run.cells, 3, seed=0)
    assert [(spec.cell.cell_id) for spec in launcher.specs] == [trial.cell.cell_id for trial in expected]
    assert [(record["cell_id"], record["repeat"]) for record in run.records] == [trial.key for trial in expected]
    assert {record["status"] for record in run.records} == {"ok"}
    assert set(launcher.timeouts) == {77.0}
    assert [done for *_, done, _ in run.observer.started_with] == list(range(21))
    assert {total for *_, total in run.observer.started_with} == {21}
    assert run.observer.statuses == ["ok"] * 21


def test_records_hold_the_facts(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", repeats=1)
    run.go()
    record = run.records[1]
    assert Cell.from_dict(record["cell"]).cell_id == record["cell_id"]
    assert record["time"]["ranks_agree"] is True
    assert record["passes"] == list(ALL_PASSES)
    assert (record["wall_s"], record["training_s"], record["reason"]) == (4.25, 3.0, "")


def test_records_tell_how_their_ranks_started(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", repeats=1)
    run.go(when("b0", [0], replace(failed(), cold=True)))
    told = {record["cell"]["backend"]: record.get("cold", "untold") for record in run.records}
    assert told == dict.fromkeys(told, "untold") | {"b0": True}


def test_what_a_trial_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 7)
    run = Run(tmp_path / "run", repeats=1)
    launcher = run.go()
    for spec in launcher.specs:
        assert Path(spec.folder).is_absolute() and Path(spec.reference).is_absolute()
        assert spec.threads == (7 if spec.cell.backend == REFERENCE else 3)
        assert spec.corpus is None
    assert len({spec.reference for spec in launcher.specs}) == 1
    assert len({spec.folder for spec in launcher.specs}) == len(launcher.specs)


def test_extra_passes_run_once_after_the_timed_blocks_and_never_again(tmp_path: Path) -> None:
    run = adaptive(tmp_path, repeats=3, most=6)
    every = [cell.cell_id for cell in run.cells]
    run.judge = Scripted(every, every, [])
    launcher = run.go(when("b1", [2], failed()))
    timed = [("time",)]
    assert passes_of(launcher, REFERENCE) == passes_of(launcher, "b0") == [*timed * 2, ALL_PASSES, *timed * 3]
    assert passes_of(launcher, "b1") == [*timed * 2, ALL_PASSES, *timed * 3], "crashed, and not tried again"
    again = FakeLauncher()
    run.runner(again, retry_failed=True).run()
    assert ran(again) == [(REFERENCE, ("update",)), ("b1", ALL_PASSES)], "but when asked"


def test_a_cell_whose_timed_trial_crashed_gets_its_extra_passes(tmp_path: Path) -> None:
    launcher = Run(tmp_path / "run").go(when("b1", [0, 1], failed()))
    assert passes_of(launcher, "b1") == [("time",), ("time",), ALL_PASSES]


def test_no_update_without_a_reference(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    launcher = run.go(when(REFERENCE, [2], failed(Status.OOM)))
    without = ("time", *(name for name in EXTRA_PASSES if name != "update"))
    assert passes_of(launcher, REFERENCE) == [("time",), ("time",), ALL_PASSES]
    assert passes_of(launcher, "b0") == [("time",), ("time",), without]
    assert run.statuses(REFERENCE) == ["ok", "ok", "oom"]
    assert run.statuses("b0") == ["ok"] * 3
    again = FakeLauncher()
    run.runner(again, retry_failed=True).run()
    assert passes_of(again, REFERENCE) == [ALL_PASSES]
    assert passes_of(again, "b0") == [("time", "update")], "the update is made up for"


def test_failed_trials_are_rows_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    launcher = run.go(when("b2", [0, 1, 2], failed(Status.TIMEOUT, "not finished after 77 s")))
    assert len(launcher.specs) == len(run.records) == 21
    assert run.statuses("b2") == ["timeout"] * 3
    assert all(run.statuses(name) == ["ok"] * 3 for name in NAMES if name != "b2")
    record = next(record for record in run.records if record["status"] == "timeout")
    assert (record["reason"], record["wall_s"]) == ("not finished after 77 s", 1.5)
    assert "time" not in record and "update" not in record
    assert run.observer.statuses.count("timeout") == 3


def test_logs_are_kept_for_failures_only(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", repeats=2)
    run.go(when("b2", [1], failed()))
    kept = [record for record in run.records if "log" in record]
    assert [(record["cell"]["backend"], record["repeat"]) for record in kept] == [("b2", 1)]
    logs = list((run.folder / "logs").iterdir())
    assert logs == [run.folder / kept[0]["log"]]
    text = logs[0].read_text()
    assert text.startswith("b2 N=2 W=2 fp32: crashed: rank 1: ValueError: no\n")
    assert "Traceback: line of the cause" in text
    assert "--- 0/stderr.log\nthe log of call " in text


def test_a_long_log_keeps_its_end(tmp_path: Path) -> None:
    def script(spec: Spec, number: int) -> Outcome | None:
        if spec.cell.backend != "b2":
            return None
        text = "start" + "x" * 3 * runner.LOG_BYTES + "the end"
        (Path(spec.folder) / "attempt_0" / "0" / "stderr.log").write_text(text)
        return failed()

    run = Run(tmp_path / "run", repeats=1)
    run.go(script)
    text = next((run.folder / "logs").iterdir()).read_text()
    assert "the end" in text and "start" not in text
    assert len(text) < runner.LOG_BYTES + 1000


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
    assert record["dumps"] == [f"{stem}.rank0.stacks", f"{stem}.rank1.stacks", f"{stem}.flight-rank0"]
    assert (run.folder / record["dumps"][1]).read_text() == "stacks of rank 1"
    assert (run.folder / record["dumps"][2]).read_bytes() == b"flight"


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
    assert record["reason"] == "rank 1: its result is damaged: time.step_seconds is 'fast'; it must be a list"
    assert "time" not in record


def test_a_finished_run_leaves_no_scratch_and_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", repeats=1)
    assert "finished" not in run.manifest
    run.go()
    assert sorted(path.name for path in run.folder.iterdir()) == [MANIFEST, JOURNAL]
    manifest = read_manifest(run.folder)
    assert manifest["finished"] >= manifest["started"]
    assert 2**20 < manifest["parent_peak_bytes"] < 2**40
    assert {key: manifest[key] for key in run.manifest if key != "finished"} == run.manifest


def test_unsupported_backends_are_rows_without_launching(tmp_path: Path) -> None:
    backends = {**BACKENDS, "b3": make_backend("b3", "needs x: pip install x")}
    run = Run(tmp_path / "run", backends=backends)
    launcher = run.go()
    assert "b3" not in {name for name, _ in ran(launcher)}
    rows = [record for record in run.records if record["cell"]["backend"] == "b3"]
    assert [(row["status"], row["reason"], row["passes"]) for row in rows] == [
        ("unsupported", "needs x: pip install x", [])
    ] * 3
    assert len(run.records) == 21


def interrupt_at(stop: int) -> Script:
    def script(spec: Spec, number: int) -> Outcome | None:
        if number == stop:
            raise KeyboardInterrupt
        return None

    return script


@pytest.mark.parametrize("stop", [0, 1, 4, 9, 20])
def test_an_interrupt_keeps_what_is_finished_and_the_rest_is_run_later(tmp_path: Path, stop: int) -> None:
    run = Run(tmp_path / "run")
    expected = [trial.key for trial in order(run.cells, 3, seed=0)]
    with pytest.raises(KeyboardInterrupt):
        run.go(interrupt_at(stop))
    first = run.records
    assert [(record["cell_id"], record["repeat"]) for record in first] == expected[: stop + 1]
    assert [record["status"] for record in first] == ["ok"] * stop + ["interrupted"]
    assert first[-1]["reason"] == "stopped by the user"
    assert "finished" not in read_manifest(run.folder)

    launcher = run.go()
    assert [spec.cell.cell_id for spec in launcher.specs] == [cell_id for cell_id, _ in expected[stop:]]
    assert run.records[: stop + 1] == first, "the journal is only added to"
    assert [(record["cell_id"], record["repeat"]) for record in run.records[stop + 1 :]] == expected[stop:]
    good = [record for record in run.records if record["status"] == "ok"]
    assert sorted((record["cell_id"], record["repeat"]) for record in good) == sorted(expected)
    with_update = [record["cell_id"] for record in good if record.get("update")]
    assert sorted(with_update) == sorted(cell.cell_id for cell in run.cells), "each update once, in both parts together"
    assert "finished" in read_manifest(run.folder)
    assert not (run.folder / "scratch").exists()


def test_a_finished_run_has_nothing_left(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.go()
    before = run.records
    assert run.go().specs == []
    assert run.records == before


def test_failures_are_not_run_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", repeats=1)
    run.go(when("b2", [0], failed()))
    assert run.go().specs == []
    assert run.statuses("b2") == ["crashed"]


def test_failures_are_run_again_when_asked(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", repeats=2)
    run.go(when("b2", [0], failed(Status.HANG)))
    launcher = FakeLauncher()
    run.runner(launcher, retry_failed=True).run()
    assert [(spec.cell.backend, spec.passes) for spec in launcher.specs] == [("b2", ("time",))]
    assert run.statuses("b2") == ["hang", "ok", "ok"]
    assert [record["slot"] for record in run.records] == list(range(15))


def test_a_run_that_its_budget_ended_gets_its_failures_again(tmp_path: Path) -> None:
    run = adaptive(tmp_path, budget_s=1e-9)
    run.go(when("b2", [1], failed()))
    looks = read_manifest(run.folder)["looks"]
    launcher = FakeLauncher()
    run.runner(launcher, retry_failed=True).run()
    assert ran(launcher) == [(REFERENCE, ("update",)), ("b2", ALL_PASSES)], "its update had not been made"
    assert read_manifest(run.folder)["looks"] == looks, "what was decided stays"


def test_a_retry_that_is_interrupted_is_left_to_do(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", repeats=1)
    run.go(when("b2", [0], failed()))
    with pytest.raises(KeyboardInterrupt):
        run.runner(FakeLauncher(interrupt_at(1)), retry_failed=True).run()  # after the reference's update
    assert run.statuses("b2") == ["crashed", "interrupted"]
    assert [spec.cell.backend for spec in run.go().specs] == ["b2"]


def test_an_interrupt_while_a_trial_is_kept_waits_until_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_trial_that_failed_on_a_full_disk_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_limits_are_those_of_the_matrix(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", repeats=1)
    assert set(run.go().inactivities) == {120.0}


def test_a_lost_reference_update_is_made_again_without_a_record(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", repeats=1)
    with pytest.raises(KeyboardInterrupt):
        run.go(interrupt_at(3))
    for path in (run.folder / "scratch").glob("*.safetensors"):
        path.unlink()
    launcher = run.go()
    assert ran(launcher)[0] == (REFERENCE, ("update",))
    assert [passes for _, passes in ran(launcher)[1:]] == [ALL_PASSES] * 4
    assert run.statuses(REFERENCE) == ["ok"]


def test_a_lost_reference_update_that_nobody_needs_is_not_made_again(tmp_path: Path) -> None:
    run = adaptive(tmp_path)
    run.judge = Scripted([cell.cell_id for cell in run.cells], [])
    with pytest.raises(KeyboardInterrupt):
        run.go(interrupt_at(17))  # after the initial blocks: every cell has its update
    for path in (run.folder / "scratch").glob("*.safetensors"):
        path.unlink()
    assert {passes for _, passes in ran(run.go())} == {("time",)}


def test_create_writes_the_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    run = Run(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest == run.manifest
    assert manifest["run_id"] == "b"
    assert [Cell.from_dict(cell) for cell in manifest["cells"]] == run.cells
    assert manifest["matrix"] == run.matrix.to_dict()
    assert manifest["backends"].keys() == set(BACKENDS)
    assert manifest["backends"]["b0"] == {
        "framework": "made",
        "sync": "eager",
        "sharding": "none",
        "bf16_as": "autocast over fp32 parameters",
        "defect": "",
    }
    assert {"machine", "packages", "environment", "git", "command", "started"} <= manifest.keys()


def test_create_refuses_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    before = (run.folder / MANIFEST).read_bytes()
    with pytest.raises(InputError, match="holds a run already; name another folder, or go on with --resume"):
        Run(tmp_path / "run", seed=1)
    assert (run.folder / MANIFEST).read_bytes() == before


def test_create_refuses_a_folder_that_holds_a_journal(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text("{}\n")
    with pytest.raises(InputError, match="holds a run already"):
        Run(tmp_path)


def test_create_refuses_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="cannot be written"):
            Run(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_reopen_on_the_same_machine(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert start.reopen(run.folder, BACKENDS) == run.manifest


def test_reopen_refuses_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    now = {**machine.machine(), "cpu": "Another CPU"}
    monkeypatch.setattr(machine, "machine", lambda: now)
    with pytest.raises(InputError, match=r"machine 'cpu' was .* and is 'Another CPU'; .* so start a new one"):
        start.reopen(run.folder, BACKENDS)


@pytest.mark.parametrize("then", ["0.0.1", None], ids=["another version", "not there before"])
def test_reopen_refuses_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str | None) -> None:
    real = machine.packages()
    rest = {name: version for name, version in real.items() if name != "torch"}
    monkeypatch.setattr(machine, "packages", lambda: rest if then is None else {**rest, "torch": then})
    run = Run(tmp_path / "run")
    monkeypatch.setattr(machine, "packages", lambda: real)
    with pytest.raises(InputError, match=re.escape(f"packages 'torch' was {then!r} and is '{real['torch']}'")):
        start.reopen(run.folder, BACKENDS)


def test_reopen_refuses_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    monkeypatch.setattr(machine, "code", lambda *_: {"bench": "another"})
    with pytest.raises(InputError, match="the code of the bench, of a backend or of the workload is not what it was"):
        start.reopen(run.folder, BACKENDS)


def test_reopen_refuses_another_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "own_counted.py"
    module.write_text("def factory(spec): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    matrix = make_matrix({"workload.workload": "own_counted:factory"}, backend=["b0"], accumulate=[2])
    made = start.create(tmp_path / "run", matrix, expand(matrix, BACKENDS, 0), BACKENDS, cold=False)
    assert start.reopen(tmp_path / "run", BACKENDS) == made
    module.write_text("def factory(spec): return 1\n")
    with pytest.raises(InputError, match="the code of the bench, of a backend or of the workload is not what it was"):
        start.reopen(tmp_path / "run", BACKENDS)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("cells", [], "cells: there are none"),
        ("cells", [{"backend": "b0"}], "cells: are not those of a run"),
        ("cells", 7, "cells is 7; it must be a list"),
        ("cold", "no", "cold is 'no'; it must be true or false"),
        ("git", {"commit": 7}, "git.commit is 7; it must be a string"),
        ("looks", [{"repeats": 1}], r"looks\[0\].open is missing"),
        ("matrix", {}, "matrix: device is missing"),
        ("matrix", {"values": {"repeats": 2**62}}, "matrix: device is missing"),
    ],
)
def test_reopen_refuses_an_edited_manifest(tmp_path: Path, key: str, value: object, words: str) -> None:
    run = Run(tmp_path / "run")
    write_manifest(run.folder, run.manifest | {key: value})
    with pytest.raises(InputError, match=words):
        start.reopen(run.folder, BACKENDS)


def test_a_run_without_end_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    values = run.manifest["matrix"]["values"] | {"repeats": 2**62}
    write_manifest(run.folder, run.manifest | {"matrix": run.manifest["matrix"] | {"values": values}})
    with pytest.raises(InputError, match="more than 1,000,000 trials"):
        start.reopen(run.folder, BACKENDS)


def test_what_a_killed_bench_left_is_nobodys(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run.go(interrupt_at(3))
    (stale,) = [path for path in (run.folder / "scratch").iterdir() if path.is_dir()]
    (stale / "rank0.json").write_text("{}")
    folders = {spec.folder for spec in run.go().specs}
    assert str(stale.resolve()) not in folders and not stale.exists()


def test_reopen_refuses_a_run_without_its_backends(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(InputError, match="backend 'b5' is not installed here any more"):
        start.reopen(run.folder, {name: backend for name, backend in BACKENDS.items() if name != "b5"})


def test_reopen_refuses_an_older_schema(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    text = (run.folder / MANIFEST).read_text()
    (run.folder / MANIFEST).write_text(text.replace('"schema_version": 2', '"schema_version": 1'))
    with pytest.raises(InputError, match=r"begun by an older bench \(schema version 1\)"):
        start.reopen(run.folder, BACKENDS)


def test_reopen_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        start.reopen(tmp_path, BACKENDS)


def corpus_run(folder: Path) -> Path:
    """A run on a corpus file; the file."""
    path = folder / "text.txt"
    path.write_bytes(b"some text that is long enough for a sample")
    made = make_matrix({"workload.corpus": str(path)}, backend=["b0"], accumulate=[2])
    start.create(folder / "run", made, expand(made, BACKENDS, 0), BACKENDS, cold=False)
    return path


def test_every_trial_is_given_the_corpus_file(tmp_path: Path) -> None:
    path = corpus_run(tmp_path)
    launcher = FakeLauncher()
    manifest = start.reopen(tmp_path / "run", BACKENDS)
    Runner(tmp_path / "run", manifest, BACKENDS, launcher, Recorder(), never).run()  # type: ignore[arg-type]
    assert {spec.corpus for spec in launcher.specs} == {str(path.resolve())}


@pytest.mark.parametrize("content", [b"another text that is long enough for a sample", None], ids=["changed", "gone"])
def test_reopen_refuses_another_corpus(tmp_path: Path, content: bytes | None) -> None:
    path = corpus_run(tmp_path)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"text\.txt"):
        start.reopen(tmp_path / "run", BACKENDS)


class Scripted:
    """A judge that goes on with all cells, then with two, then ends."""

    def __init__(self, *opens: Sequence[str]) -> None:
        self.opens = list(opens)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, records: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any], repeats: int) -> Look:
        self.asked.append((len(records), repeats))
        return Look(repeats=repeats, open=tuple(self.opens[len(manifest.get("looks", ()))]), widest=0.25)


def adaptive(tmp_path: Path, repeats: int = 2, most: int = 9, budget_s: float = 0.0) -> Run:
    run = Run(tmp_path / "run", repeats=repeats)
    manifest = read_manifest(run.folder)
    manifest["matrix"]["values"] |= {"max_repeats": most, "budget_s": budget_s}
    runner.write_manifest(run.folder, manifest)
    return run


def test_cells_are_run_on_while_the_judge_wants_more(tmp_path: Path) -> None:
    run = adaptive(tmp_path)
    every = [cell.cell_id for cell in run.cells]
    run.judge = Scripted(every, every[3:5], [])
    run.go()
    assert run.judge.asked == [(14, 2), (28, 4), (32, 6)], "after the first blocks, then after a fifth more, in pairs"
    keys = [(record["cell_id"], record["repeat"]) for record in run.records]
    assert sorted(keys) == sorted(
        [(cell_id, repeat) for cell_id in every for repeat in range(4)]
        + [(cell_id, repeat) for cell_id in every[3:5] for repeat in (4, 5)]
    )
    manifest = read_manifest(run.folder)
    assert manifest["ended_by"] == "precision"
    assert [(look["repeats"], look["open"]) for look in manifest["looks"]] == [(2, every), (4, every[3:5]), (6, [])]
    assert [record["slot"] for record in run.records] == list(range(32))


def test_a_run_in_which_nothing_can_be_compared_is_not_called_precise(tmp_path: Path) -> None:
    run = adaptive(tmp_path)
    run.judge = lambda records, manifest, repeats: Look(repeats=repeats, open=(), refused="the machine was not idle")
    run.go()
    manifest = read_manifest(run.folder)
    assert manifest["ended_by"] == "nothing to compare"
    assert manifest["looks"][-1]["refused"] == "the machine was not idle"


def test_no_more_repeats_than_allowed(tmp_path: Path) -> None:
    run = adaptive(tmp_path, most=3)
    every = [cell.cell_id for cell in run.cells]
    run.judge = Scripted(every, every)
    run.go()
    assert run.judge.asked == [(14, 2), (21, 3)]
    assert {record["repeat"] for record in run.records} == {0, 1, 2}
    assert read_manifest(run.folder)["ended_by"] == "max-repeats"


def test_fixed_repeats_end_by_their_number(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.go()
    assert read_manifest(run.folder)["ended_by"] == "max-repeats"
    assert run.observer.expected == ([], False)


@pytest.mark.parametrize(
    ("budget_s", "blocks"),
    [(1e-9, 2), (150.0, 4), (250.0, 5), (310.0, 6)],
    ids=["at once", "in the initial blocks", "in the last of them", "after them"],
)
def test_the_budget_ends_a_run_after_a_block_with_all_that_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_s: float, blocks: int
) -> None:
    """A trial takes 10 s. No block begins after the budget, but for one that has what is done once."""
    now = 0.0

    def script(spec: Spec, number: int) -> None:
        nonlocal now
        now += 10.0

    run = adaptive(tmp_path, repeats=5, budget_s=budget_s)
    every = [cell.cell_id for cell in run.cells]
    write_manifest(run.folder, read_manifest(run.folder) | {"once": every[:1]})
    run.judge = Scripted(every, every)
    monkeypatch.setattr(runner.time, "monotonic", lambda: now)
    run.go(script)
    last = min(blocks, 5) - 1
    extras = {record["cell_id"]: record["repeat"] for record in run.records if record["passes"] != ["time"]}
    assert extras == dict.fromkeys(every, last)
    repeats = [sorted(record["repeat"] for record in run.records if record["cell_id"] == one) for one in every]
    assert repeats == [[last], *[list(range(blocks))] * 6]
    assert read_manifest(run.folder)["ended_by"] == "budget"
    assert run.observer.budgets[0] == pytest.approx(budget_s), "the display is told how far it reaches"
    assert run.go(script).specs == [], "a resumed run has no new budget"


@pytest.mark.parametrize("stop", [9, 15], ids=["before the last block", "in it"])
def test_a_block_that_was_begun_is_not_cut_short_by_the_budget_of_a_resumed_run(tmp_path: Path, stop: int) -> None:
    run = adaptive(tmp_path, repeats=3, budget_s=30.0)  # a made trial says that it took 4.25 s
    with pytest.raises(KeyboardInterrupt):
        run.go(interrupt_at(stop))
    run.judge = Scripted([])
    run.go()
    good = [record for record in run.records if record["status"] == "ok"]
    assert len(good) == 21
    assert sorted(record["cell_id"] for record in good if record["passes"] != ["time"]) == sorted(
        cell.cell_id for cell in run.cells
    )


@pytest.mark.parametrize("stop", [5, 14, 20, 29])
def test_an_interrupted_adaptive_run_goes_on_as_if_it_had_not_been(tmp_path: Path, stop: int) -> None:
    unbroken, broken = adaptive(tmp_path / "a"), adaptive(tmp_path / "b")
    every = [cell.cell_id for cell in unbroken.cells]
    for run in (unbroken, broken):
        run.judge = Scripted(every, every[1:4], [])
    unbroken.go()
    with pytest.raises(KeyboardInterrupt):
        broken.go(interrupt_at(stop))
    broken.go()
    kept = [(record["cell_id"], record["repeat"]) for record in broken.records if record["status"] == "ok"]
    assert kept == [(record["cell_id"], record["repeat"]) for record in unbroken.records]
    assert read_manifest(broken.folder)["looks"] == read_manifest(unbroken.folder)["looks"]


@pytest.mark.parametrize(("trial_s", "renewals"), [(10.0, 2), (2.0, 1), (0.1, 0)])
def test_fork_servers_are_renewed_between_pairs_of_blocks_but_not_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trial_s: float, renewals: int
) -> None:
    now = 0.0

    def script(spec: Spec, number: int) -> None:
        nonlocal now
        now += trial_s

    monkeypatch.setattr(runner.time, "monotonic", lambda: now)
    assert Run(tmp_path / "run", repeats=6).go(script).renewed == renewals, "a pair of blocks is 14 trials"


def test_cells_that_are_skipped_are_rows_and_are_not_tried(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    cell = next(cell for cell in run.cells if cell.backend == "b1")
    manifest = read_manifest(run.folder) | {"skipped": {cell.cell_id: "1b needs 9 GiB by prediction, the GPU has 8"}}
    write_manifest(run.folder, manifest)
    launcher = run.go()
    assert not passes_of(launcher, "b1") and passes_of(launcher, "b0")
    assert run.statuses("b1") == ["unsupported"] * 3
    reasons = {record["reason"] for record in run.records if record["cell"]["backend"] == "b1"}
    assert reasons == {"1b needs 9 GiB by prediction, the GPU has 8"}


def test_cells_of_one_trial_have_it_in_the_last_initial_block(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    ids = {cell.backend: cell.cell_id for cell in run.cells}
    write_manifest(run.folder, read_manifest(run.folder) | {"once": [ids["b1"], ids[REFERENCE]]})
    launcher = run.go()
    assert passes_of(launcher, "b1") == passes_of(launcher, REFERENCE) == [ALL_PASSES]
    assert passes_of(launcher, "b0") == [("time",), ("time",), ALL_PASSES]
    last = [record["cell"]["backend"] for record in run.records if record["repeat"] == 2]
    assert last[0] == REFERENCE and "b1" in last, "the others are checked against it"


def test_what_the_run_was_told_of_its_cells_is_stored(tmp_path: Path) -> None:
    made = make_matrix(backend=["b0"], accumulate=[2])
    cells = expand(made, BACKENDS, 0)
    told = [cells[0].cell_id]
    start.create(tmp_path / "run", made, cells, BACKENDS, cold=False, once=told, skipped={"x": "too large"})
    manifest = read_manifest(tmp_path / "run")
    assert (manifest["once"], manifest["skipped"]) == (told, {"x": "too large"})
    assert manifest["remarks"] == {}


def test_what_has_to_be_said_beside_a_cell_is_stored(tmp_path: Path) -> None:
    names = ("deepspeed-zero2-eager", "deepspeed-zero3-eager", "lightning-deepspeed-zero3")
    cells = [
        make_cell(backend=name, world_size=w, device=device)
        for name in names
        for w in (1, 2)
        for device in (Device.CPU, Device.CUDA)
    ]
    start.create(tmp_path / "run", make_matrix(), cells, registry(), cold=False)
    remarks = read_manifest(tmp_path / "run")["remarks"]
    alone = [cell for cell in cells if "zero3" in cell.backend and cell.world_size == 1 and cell.device is Device.CUDA]
    assert remarks.keys() == {cell.cell_id for cell in alone}
    assert all("says nothing about larger worlds" in text for text in remarks.values())
