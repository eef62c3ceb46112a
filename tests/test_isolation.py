"""What a backend changes beside its training: it reaches neither the others, nor the clock, nor the comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.judge.analysis import Analysis
from bench.judge.loading import load
from bench.judge.pool import Pool
from bench.report.ranking import groups
from tests.accused import LARGE
from tests.conftest import Run, run_matrix

ACCUSED = (
    "Averaging",
    "SwapsJudge",
    "SlowsClock",
    "HoldsTensor",
    "HoldsArray",
    "HelperThread",
    "IdleThread",
    "Compressed",
    "DeclaresIt",
    "DeclaresTooLittle",
)
SOUND = ("a-sound", "a-idle-thread", "ddp-deferred", "reference")
MIB = 2**20


@pytest.fixture(scope="module")
def accused_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All of them, and one whose module changes torch, in one run."""
    named = [f"tests.accused:{name}" for name in ACCUSED] + ["tests.changes_torch:ChangesTorch"]
    options = ("--backend", ",".join(["ddp-deferred", *named]))
    return run_matrix(tmp_path_factory.mktemp("accused"), *options, backend=["ddp-deferred"])


@pytest.mark.parametrize("backend", SOUND)
def test_sound_backends_beside_them_are_right(accused_run: Run, backend: str) -> None:
    trial = accused_run.trial(backend)
    assert trial["status"] == "ok", trial["reason"]
    assert trial["update_error"] < 1e-6


@pytest.mark.parametrize(
    ("backend", "gate", "words"),
    [
        ("a-swaps-judge", "update", "0.970 times the right one"),
        ("a-changes-torch", "update", "too small"),
        ("a-compressed", "update", "times the right one"),
        ("a-declares-too-little", "update", "limit 0.0001, as its backend declares"),
    ],
)
def test_a_wrong_one_is_found_by_name(
    accused_run: Run, backend: str, gate: str, words: str
) -> None:
    trial = accused_run.trial(backend)
    assert trial["status"] == "invalid"
    assert gate in trial["failed_gates"].split(",") and words in trial["reason"], trial["reason"]


def test_a_replay_is_faster_than_any_step_can_be(tmp_path: Path) -> None:
    # Sequences so long that it is several times too fast on a busy machine, too.
    options = ("--backend", "ddp-deferred,tests.accused:Replays")
    run = run_matrix(tmp_path, *options, backend=["ddp-deferred"], sequence_length=1024)
    assert run.trial("ddp-deferred")["status"] == "ok"
    replay = run.trial("a-replays")
    assert "time" in replay["failed_gates"].split(",")
    assert "is impossible: the model's FLOPs" in replay["reason"]


def test_a_clock_that_a_backend_replaces_is_not_that_of_the_taps(accused_run: Run) -> None:
    slow, timed = accused_run.trial("a-slows-clock"), accused_run.record("a-slows-clock")["time"]
    assert slow["status"] == "ok", slow["reason"]
    assert timed["span_s"] == pytest.approx(timed["observed_span_s"], rel=0.1, abs=0.05)


def test_memory_counts_what_threads_and_constructors_allocate(accused_run: Run) -> None:
    def peak(backend: str) -> int:
        return int(accused_run.trial(backend)["peak_memory_bytes"])

    for backend in ("a-holds-tensor", "a-helper-thread"):
        assert peak(backend) == pytest.approx(peak("a-sound") + 4 * LARGE, abs=MIB)
    assert peak("a-idle-thread") == peak("a-sound") == peak("a-holds-array")
    memory = load(accused_run.folder)
    cautioned = {
        finding.subject.split()[0]
        for finding in Analysis.of(Pool(runs=(memory,)), accused_run.folder).findings
        if finding.topic == "memory"
    }
    assert cautioned == {"a-holds-array"}


def test_what_is_declared_stands_in_every_table(accused_run: Run) -> None:
    trial = accused_run.trial("a-declares-it")
    assert trial["status"] == "ok", trial["reason"]
    (group,) = groups(Analysis.of(Pool(runs=(load(accused_run.folder),)), accused_run.folder))
    texts = {row.backend: group.texts(row)["correct"] for row in group.rows}
    assert texts["a-declares-it"] == "within its declared 6.0e-3"
    assert texts["a-sound"] == "yes"
    for shown in (accused_run.process.stdout, (accused_run.folder / "report.md").read_text()):
        assert "within its declared 6.0e-3" in " ".join(shown.split())
