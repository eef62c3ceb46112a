"""Every fault ends in the right status, in bounded time, beside trials that it does not touch, and leaves nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.plan.cell import Status
from tests.conftest import Run
from tests.faults import backends
from tests.faults.backends import LATE_S
from tests.faults.form import FORM
from tests.faults.harness import HANG_S, MATRIX_RUN, TIMEOUT_S, Place, place, seed_that_puts_first

SOON_S = 15.0
"""How long a trial may take whose fault is seen at once."""
ENDING_S = 15.0
"""How long ending a trial may take, after a limit was reached: stacks, SIGTERM, a grace period, SIGKILL."""
LOG_BYTES = 4 * 2**20
"""The most that a run's logs may take, whatever was printed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault: what happens, and what must come of it."""

    name: str
    """Of the backend."""
    what: str
    status: Status
    reason: str = ""
    """What must be found in the reason: a regular expression."""
    within_s: float = SOON_S
    stacks: tuple[str, ...] = ()
    """What must be found in the stacks that are saved beside the trial."""
    short: bool = False
    """Whether the short form has it too."""


HANGS: dict[str, Any] = {
    "status": Status.HANG,
    "reason": f"no rank got on for {HANG_S} s",
    "within_s": HANG_S + ENDING_S,
}
CASES = [
    Case(
        name="f-sleeps",
        what="rank 1 sleeps for ever in step 2",
        stacks=("in sleeps", "torch/nn/parallel/distributed.py"),
        **HANGS,
    ),
    Case(
        name="f-holds-gil",
        what="rank 1 sleeps for ever in C code, holding the GIL",
        stacks=("in holds_gil", "torch/nn/parallel/distributed.py"),
        short=True,
        **HANGS,
    ),
    Case(name="f-stops", what="rank 1 stops itself (SIGSTOP)", **HANGS),
    Case(
        name="f-never-ends",
        what="both ranks compute losses for ever",
        status=Status.TIMEOUT,
        reason=rf"{TIMEOUT_S} s",
        within_s=TIMEOUT_S + ENDING_S,
    ),
    Case(
        name="f-raises",
        what="rank 1 raises an exception that names other faults",
        status=Status.CRASHED,
        reason=r"rank 1: ValueError: no such thing",
        short=True,
    ),
    Case(
        name="f-exits-0",
        what="rank 1 exits with 0 and hands over no result",
        status=Status.CRASHED,
        reason="rank 1 ended without a result",
        short=True,
    ),
    Case(name="f-kills-fork-server", what="rank 1 kills the process that all ranks come from", status=Status.CRASHED),
    Case(
        name="f-kills-launcher",
        what="rank 1 kills the launcher's process",
        status=Status.CRASHED,
        reason="the launcher's process was ended by SIGKILL",
    ),
    Case(
        name="f-segfaults",
        what="rank 1 reads from address 0 (SIGSEGV)",
        status=Status.CRASHED,
        reason="rank 1 .*SIGSEGV",
        short=True,
    ),
    Case(
        name="f-oom-python",
        what="rank 1 allocates in Python beyond RLIMIT_AS",
        status=Status.OOM,
        reason="rank 1: MemoryError",
        short=True,
    ),
    Case(
        name="f-oom-torch",
        what="rank 1 allocates tensors beyond RLIMIT_AS",
        status=Status.OOM,
        reason="rank 1: RuntimeError: .*can't allocate memory",
    ),
    Case(
        name="f-prints",
        what="rank 1 prints 1 GB",
        status=Status.CRASHED,
        reason="wrote more than 64 MiB",
        short=True,
    ),
    Case(
        name="f-leaves-children",
        what="rank 1 forks children that ignore SIGTERM, one in its own session with an open port",
        status=Status.OK,
        short=True,
    ),
    Case(
        name="f-leaves-shared-memory",
        what="rank 1 makes a shared memory segment and kills itself",
        status=Status.CRASHED,
        reason="rank 1 .*SIGKILL",
        short=True,
    ),
    Case(name="f-nan", what="a weight becomes NaN", status=Status.INVALID, reason="a loss is not finite", short=True),
    Case(
        name="f-steps-too-few",
        what="takes one optimizer step too few",
        status=Status.INVALID,
        reason="2 optimizer steps were taken, 3 were due",
    ),
    Case(
        name="f-result-cut",
        what="rank 1's result file is cut off",
        status=Status.CRASHED,
        reason=r"rank 1.*result",
        short=True,
    ),
    Case(
        name="f-result-empty",
        what="rank 1's result file says ok and nothing else",
        status=Status.CRASHED,
        reason=r"rank 1.*result",
    ),
    Case(
        name="f-ends-late", what=f"rank 0 hands over its result {LATE_S:g} s after rank 1 has ended", status=Status.OK
    ),
]


def check(case: Case, run: Run) -> None:
    """What must be true of the fault's trial."""
    trial, record = run.trial(case.name), run.record(case.name)
    assert trial["status"] == case.status, trial["reason"]
    assert re.search(case.reason, trial["reason"]), trial["reason"]
    assert record["wall_s"] <= case.within_s
    saved = "".join(path.read_text(errors="replace") for path in run.folder.glob("logs/**/*") if path.is_file())
    for words in case.stacks:
        assert words in saved, f"'{words}' is not in the stacks"


def check_beside(run: Run) -> None:
    """What must be true of the run around the fault."""
    assert "Traceback" not in run.process.stdout + run.process.stderr
    for name in ("reference", "f-sound"):
        assert run.trial(name)["status"] == "ok", run.trial(name)["reason"]
    assert sum(path.stat().st_size for path in run.folder.rglob("*.log")) < LOG_BYTES
    assert not (run.folder / "scratch").exists()


SHORT = [case for case in CASES if case.short]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    """One run of the faults of the short form, and what it left."""
    with place(tmp_path_factory.mktemp("together"), **{backends.BYTES: str(2**28)}) as here:
        here.write(*(case.name for case in SHORT), "f-sound")
        return here.run(), here.leaks.left()


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_each_fault_has_its_status(together: tuple[Run, list[str]], case: Case) -> None:
    check(case, together[0])


def test_what_stands_beside_faults_is_sound_and_nothing_is_left_behind(together: tuple[Run, list[str]]) -> None:
    run, left = together
    assert run.process.returncode == 1, "some cells failed"
    check_beside(run)
    assert left == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_alone(tmp_path: Path, case: Case) -> None:
    with place(tmp_path / "place", **{backends.BYTES: str(2**30)}) as here:
        here.write(case.name, "f-sound", seed=seed_that_puts_first(case.name, "f-sound"))
        run, left = measured(here, case)
    assert left == []
    check(case, run)
    check_beside(run)
    good = case.status is Status.OK
    assert run.process.returncode == (0 if good else 1)
    order = [record["cell"]["backend"] for record in run.records]
    assert order == ["reference", case.name, "f-sound"], "the sound one comes after the fault"


def measured(here: Place, case: Case, *options: str) -> tuple[Run, list[str]]:
    """The run of a fault and what it left; both go to the page, whatever they are."""
    done = here.run(*MATRIX_RUN, *options)
    left = here.leaks.left()
    found, seconds = "no row", None
    if (done.folder / "trials.jsonl").exists():
        found, seconds = str(done.trial(case.name)["status"]), float(done.record(case.name)["wall_s"])
    FORM.note(
        "faults",
        case.name,
        what=case.what,
        must=str(case.status),
        found=found,
        seconds=seconds,
        within=case.within_s,
        left=[re.sub(r"\d{2,}", "#", one) for one in left],
    )
    return done, left
