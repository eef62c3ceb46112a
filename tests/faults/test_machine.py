"""What a machine does to a run: its disk is full, its memory is used up, its clock moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.plan.cell import Status
from tests.conftest import ROOT, Run
from tests.faults import backends
from tests.faults.form import FORM, nothing
from tests.faults.harness import TIMEOUT_S, place
from tests.faults.machines import little_memory, small_disk
from tests.faults.test_faults import Case, check, check_beside, measured

DISK_BYTES = 2**26
MEMORY_BYTES = 3 * 2**30
DAY_S = 86400


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_costs_no_finished_trial(tmp_path: Path) -> None:
    """ENOSPC in a rank, and then in the runner; with room again, the run goes on."""
    folder = tmp_path / "run"
    folder.mkdir()
    with (
        small_disk(folder, DISK_BYTES) as disk,
        place(tmp_path, **{backends.FILL: str(folder / "filler")}) as here,
    ):
        here.before = disk.before
        here.write("f-fills-disk", "f-sound")
        ended = here.run()
        left = here.leaks.left()
        run = Run(disk.seen, ended.process)
        before = [(record["cell"]["backend"], record["status"]) for record in run.records]
        journal = (disk.seen / "trials.jsonl").read_bytes()
        (disk.seen / "filler").unlink()
        here.environment[backends.FILL] = "/dev/full"
        resumed = Run(disk.seen, here.run("run", "--resume", "run").process)
        found = {
            name: str(resumed.trial(name)["status"])
            for name in ("reference", "f-fills-disk", "f-sound")
        }
        FORM.note(
            "machine",
            "disk",
            f"rank 1 fills the disk (a tmpfs of {DISK_BYTES >> 20} MiB) that the run is written to",
            "the run ends by itself, says so in one line, keeps all finished trials, and goes on when there is room",
            f"exit status {ended.process.returncode} ('{ended.process.stderr.strip()[:200]}'); "
            f"{len(before)} finished; resumed: {', '.join(f'{name} {status}' for name, status in found.items())}",
            nothing(left),
        )
        assert left == []
        assert ended.process.returncode in {1, 2}
        assert "Traceback" not in ended.process.stdout + ended.process.stderr
        assert ended.process.stderr.startswith("bench: ") and ended.process.stderr.count("\n") == 1
        assert "No space left on device" in ended.process.stderr or "full" in ended.process.stderr
        assert before[0] == ("reference", "ok"), "what was finished is kept"
        # The time at which a run is begun decides, beside its seed, whether f-sound comes before.
        assert before[1:] in ([], [("f-sound", "ok")]), "none is judged that had no room"
        assert (disk.seen / "trials.jsonl").read_bytes().startswith(journal)
        assert found == {"reference": "ok", "f-fills-disk": "crashed", "f-sound": "ok"}
        check_beside(resumed)


@pytest.mark.slow
def test_memory_used_up_is_told_from_other_kills(tmp_path: Path) -> None:
    """The kernel's SIGKILL is an oom, and costs neither the bench's own process nor the trials beside."""
    what = f"rank 1 allocates until the kernel kills it (cgroup of {MEMORY_BYTES >> 30} GiB)"
    case = Case("f-oom-killer", what, Status.OOM, "rank 1", TIMEOUT_S)
    with little_memory(MEMORY_BYTES) as before, place(tmp_path / "place") as here:
        here.before = before
        here.write(case.name, "f-sound")
        run, left = measured(
            here, case, "--inactivity", "0"
        )  # the kernel looks for pages to free first
        assert left == []
        check(case, run)
        check_beside(run)


@pytest.mark.slow
def test_a_clock_that_jumps_moves_nothing(tmp_path: Path) -> None:
    """time.time() jumps by two days between calls in every process of the run, the bench's own too."""
    case = Case("f-sound", "the clock jumps by days in all processes of the run", Status.OK)
    with place(tmp_path / "place", PYTHONPATH=f"{ROOT}/tests/faults/clock:{ROOT}") as here:
        here.write("f-sound")
        run, left = measured(here, case)
    assert left == []
    check(case, run)
    check_beside(run)
    assert run.process.returncode == 0
    for record in run.records:
        assert 0 < record["wall_s"] < DAY_S
        assert all(0 < seconds < DAY_S for seconds in record["time"]["step_seconds"])
