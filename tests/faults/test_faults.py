"""Every fault ends in the right status, in bounded time, beside trials that it does not touch, and leaves nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.plan.cell import Status
from tests.conftest import Run
from tests.faults import backends
from tests.faults.backends import LATE_S
from tests.faults.form import FORM, marked, nothing
from tests.faults.harness import HANG_S, MATRIX_RUN, TIMEOUT_S, Place, place

SOON_S = 15.0
"""How long a trial may take whose fault is seen at once."""
ENDING_S = 15.0
"""How long ending a trial may take, after a limit was reached: stacks, SIGTERM, a grace period, SIGKILL."""
LOG_BYTES = 4 * 2**20
"""The most that a run's logs may take, whatever was printed."""


@dataclass(frozen=True)
class Case:
    """One fault: what happens, and what must come of it."""

    name: str
    """The backend's."""
    what: str
    status: Status
    reason: str = ""
    """A regular expression that must match in the reason."""
    within_s: float = SOON_S
    stack: str = ""
    """What must be found in the stacks that are saved beside the trial."""
    short: bool = False
    """Whether the short form has it too."""


HANG = (Status.HANG, f"no rank got on for {HANG_S} s", HANG_S + ENDING_S)
CASES = [
    Case("f-sleeps", "rank 1 sleeps forever in step 2, rank 0 waits in a collective", *HANG, "in sleeps"),
    Case("f-holds-gil", "rank 1 sleeps forever in C code, holding the GIL", *HANG, "in holds_gil", short=True),
    Case("f-stops", "rank 1 stops itself (SIGSTOP)", *HANG),
    Case(
        "f-never-ends", "both ranks compute losses forever", Status.TIMEOUT, f"{TIMEOUT_S} s", TIMEOUT_S + ENDING_S
    ),
    Case(
        "f-raises", "rank 1 raises an exception that names other faults", Status.CRASHED,
        "rank 1: ValueError: no such thing", short=True,
    ),
    Case(
        "f-exits-0", "rank 1 exits with 0 and hands over no result", Status.CRASHED,
        "rank 1 ended without a result", short=True,
    ),
    Case("f-kills-fork-server", "rank 1 kills the process that all ranks come from", Status.CRASHED),
    Case(
        "f-kills-launcher", "rank 1 kills the launcher's process", Status.CRASHED,
        "the launcher's process was ended by SIGKILL",
    ),
    Case("f-segfaults", "rank 1 reads from address 0 (SIGSEGV)", Status.CRASHED, "rank 1 .*SIGSEGV", short=True),
    Case(
        "f-oom-torch", "rank 1 allocates tensors beyond RLIMIT_AS", Status.OOM,
        "rank 1: RuntimeError: .*can't allocate memory", short=True,
    ),
    Case("f-prints", "rank 1 prints 1 GB", Status.CRASHED, "wrote more than 64 MiB", short=True),
    Case(
        "f-leaves-children",
        "rank 1 forks children that ignore SIGTERM, one in its own session with an open port", Status.OK, short=True,
    ),
    Case(
        "f-leaves-shared-memory", "rank 1 makes a shared memory segment and kills itself", Status.CRASHED,
        "rank 1 .*SIGKILL", short=True,
    ),
    Case("f-nan", "a weight becomes NaN", Status.INVALID, "a loss is not finite", short=True),
    Case(
        "f-steps-too-few", "takes one optimizer step too few", Status.INVALID,
        "2 optimizer steps were taken, 3 were due",
    ),
    Case("f-result-cut", "rank 1's result file is cut off", Status.CRASHED, "rank 1.*result", short=True),
    Case("f-result-empty", "rank 1's result file says ok and nothing else", Status.CRASHED, "rank 1.*result"),
    Case("f-ends-late", f"rank 0 hands over its result {LATE_S:g} s after rank 1 has ended", Status.OK),
]  # fmt: skip
SHORT = [case for case in CASES if case.short]


def check(case: Case, run: Run) -> None:
    """What must be true of the fault's trial."""
    trial, record = run.trial(case.name), run.record(case.name)
    assert trial["status"] == case.status, trial["reason"]
    assert re.search(case.reason, trial["reason"]), trial["reason"]
    assert record["wall_s"] <= case.within_s
    saved = "".join(
        path.read_text(errors="replace") for path in run.folder.glob("logs/**/*") if path.is_file()
    )
    assert case.stack in saved, "not in the stacks"
    assert not case.stack or "torch/nn/parallel/distributed.py" in saved, (
        "the stack of the rank that waits"
    )


def check_beside(run: Run) -> None:
    """What must be true of the run around the fault."""
    assert "Traceback" not in run.process.stdout + run.process.stderr
    for name in ("reference", "f-sound"):
        assert run.trial(name)["status"] == "ok", run.trial(name)["reason"]
    assert sum(path.stat().st_size for path in run.folder.rglob("*.log")) < LOG_BYTES
    assert not (run.folder / "scratch").exists()


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    """One run of the faults of the short form, and what it left."""
    with place(tmp_path_factory.mktemp("together"), **{backends.BYTES: str(2**28)}) as here:
        here.write(*(case.name for case in SHORT), "f-sound")
        return here.run(), here.leaks.left()


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_each_fault_has_its_status(together: tuple[Run, list[str]], case: Case) -> None:
    check(case, together[0])


def test_what_stands_beside_faults_is_sound_and_nothing_is_left_behind(
    together: tuple[Run, list[str]],
) -> None:
    run, left = together
    assert run.process.returncode == 1, "some cells failed"
    check_beside(run)
    assert left == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_alone(tmp_path: Path, case: Case) -> None:
    with place(tmp_path / "place", **{backends.BYTES: str(2**30)}) as here:
        here.write(case.name, "f-sound")
        run, left = measured(here, case)
    assert left == []
    check(case, run)
    check_beside(run)
    good = case.status is Status.OK
    assert run.process.returncode == (0 if good else 1)
    trained = {record["cell"]["backend"] for record in run.records}
    assert trained == {"reference", case.name, "f-sound"}


def measured(here: Place, case: Case, *options: str) -> tuple[Run, list[str]]:
    """The run of a fault and what it left; both go to the page, whatever they are."""
    done = here.run(*MATRIX_RUN, *options)
    left = here.leaks.left()
    found, seconds = "no row", None
    if (done.folder / "trials.jsonl").exists():
        found, seconds = (
            str(done.trial(case.name)["status"]),
            float(done.record(case.name)["wall_s"]),
        )
    FORM.note(
        "faults",
        case.name,
        case.what,
        case.status,
        marked(found, found == case.status),
        "" if seconds is None else marked(f"{seconds:.1f}", seconds <= case.within_s),
        f"{case.within_s:.0f}",
        nothing([re.sub(r"\d{2,}", "#", line) for line in left]),
    )
    return done, left
