"""A lease whose steps take seconds: what is left where one is ended, and how a second call goes on."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from bench.launch import stragglers
from studies import ROOT, lease
from studies.lease import Lease, Step

WRITES = "import sys; open(sys.argv[1], 'a').write('x'); print('wrote', flush=True)"
HANGS = f"{WRITES}; import time; time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + HANGS
PARENT = f"""
import subprocess, sys, time
command = [sys.executable, '-c', 'import time; time.sleep(600)']
for alone in (False, True):
    print(subprocess.Popen(command, start_new_session=alone).pid, flush=True)
{HANGS}
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "GRACE_S", 1.0)
    monkeypatch.setattr(lease, "RESERVED_S", 1.0)


class Place:
    """The folders of a lease."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.written = folder / "lease", folder / "out", folder / "written"
        self.written.mkdir()

    def step(
        self, name: str, code: str = WRITES, *, limit_s: float = 60.0, needs_s: float = 0.0
    ) -> Step:
        command = [sys.executable, "-c", code, str(self.written / name)]
        return Step(name=name, command=command, needs_s=needs_s, limit_s=limit_s)

    def call(self, seconds: float, *steps: Step) -> int:
        return Lease(seconds, self.folder, self.out).run(steps)

    def count(self, name: str) -> int:
        """How often a step was begun."""
        path = self.written / name
        return len(path.read_text()) if path.exists() else 0

    def log(self, name: str) -> str:
        """The log of a step, as it is packed."""
        with tarfile.open(self.out / f"{name}.tar.gz") as tar:
            found = tar.extractfile(f"{name}.log")
            assert found is not None
            return found.read().decode()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_steps_are_done_in_order_and_only_once(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, rest = (
        place.step("good"),
        place.step("bad", f"{WRITES}; sys.exit('no')"),
        place.step("rest"),
    )
    assert place.call(60, good, bad, rest) == 1
    assert [place.count(name) for name in ("good", "bad", "rest")] == [1, 1, 1]
    assert place.log("bad") == "wrote\nno\n"
    said = capsys.readouterr().out
    assert re.search(r"lease: bad: exit status 1 after \d+ s\n  wrote\n  no\n", said)
    assert place.call(60, good, bad, rest) == 0 and place.count("bad") == 1, (
        "a failed step would fail again"
    )
    assert capsys.readouterr().out.count("was done by an earlier call") == 3


@pytest.mark.parametrize("code", [HANGS, STUBBORN], ids=["ends", "ignores SIGTERM"])
def test_a_step_at_its_own_limit_is_ended_and_the_next_ones_follow(place: Place, code: str) -> None:
    hanging, rest = place.step("hanging", code, limit_s=1.5), place.step("rest")
    began = time.monotonic()
    assert place.call(60, hanging, rest) == 0
    assert (
        time.monotonic() - began < 15
        and place.log("hanging") == "wrote\n"
        and place.log("rest") == "wrote\n"
    )
    place.call(60, hanging)
    assert place.count("hanging") == 1, "it would take as long again"


def test_what_the_end_of_the_lease_cuts_off_is_done_by_the_next_call(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    first, cut, late = place.step("first"), place.step("cut", HANGS), place.step("late", needs_s=20)
    assert place.call(4, first, cut, late) == 0
    assert (place.count("first"), place.count("cut"), place.count("late")) == (1, 1, 0)
    assert place.log("cut") == "wrote\n"
    assert "lease: late: needs 20 s, and 0 s are left" in capsys.readouterr().out
    assert place.call(60, first, place.step("cut"), late) == 0
    assert (place.count("first"), place.count("cut"), place.count("late")) == (1, 2, 1)


def test_no_process_of_a_step_outlives_it(place: Place) -> None:
    place.call(60, place.step("parent", PARENT, limit_s=2.0))
    children = [int(line) for line in place.log("parent").splitlines()[:2]]
    assert len(children) == 2 and not any(
        stragglers.alive(stragglers.find(child)) for child in children
    )


def test_a_run_of_the_bench_is_resumed_and_only_its_truth_is_packed_if_it_is_large(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Step(name="a-run", command=["begun"], needs_s=0, limit_s=60, is_run=True)
    began = [
        sys.executable,
        "-c",
        "import pathlib, sys; f = pathlib.Path(sys.argv[-1]); f.mkdir(); ",
    ]
    began[-1] += "(f / 'run.json').write_text('{}'); (f / 'trials.jsonl').write_text(''); "
    began[-1] += "(f / 'scratch').mkdir(); (f / 'scratch' / 'much').write_bytes(b'1'); "
    began[-1] += (
        "(f / 'plot').write_bytes(__import__('os').urandom(2**15)); import time; time.sleep(600)"
    )
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(lease, "LARGEST_BYTES", 2**14)
    monkeypatch.setattr(
        lease,
        "_run",
        lambda *options: asked.append(options) or [sys.executable, "-c", "print('on')"],
    )
    place.call(4, Step(name="a-run", command=began, needs_s=0, limit_s=60, is_run=True))
    with tarfile.open(place.out / "a-run.tar.gz") as tar:
        assert sorted(tar.getnames()) == ["a-run.log", "a-run/run.json", "a-run/trials.jsonl"]
    assert place.call(60, run) == 0 and asked == [("--resume", str(place.folder / "a-run"))]
    assert place.log("a-run") == "on\n"


def test_a_lease_that_is_ended_from_outside_has_packed_what_there_was(place: Place) -> None:
    hanging = [sys.executable, "-c", HANGS, str(place.written / "long")]
    code = f"""
import sys
from pathlib import Path
from studies import lease
lease.problems = lambda asked: []
lease.named_after_gpu = list
lease.GRACE_S = lease.RESERVED_S = 1.0
lease.steps = lambda: [lease.Step(name="long", command={hanging!r}, needs_s=0, limit_s=600)]
sys.exit(lease.main(["600", "--folder", {str(place.folder)!r}, "--out", {str(place.out)!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not place.count("long"):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert place.log("long") == "wrote\n"
    assert not (place.folder / "long.status").exists(), "the next call does it again"


def test_a_fact_that_the_machine_cannot_tell_stops_no_other(place: Place) -> None:
    facts = lease.each(["echo one", "no-such-program", "false", "echo two"])
    assert place.call(60, Step(name="facts", command=facts, needs_s=0, limit_s=60)) == 0
    told = [line for line in place.log("facts").splitlines() if "not found" not in line]
    assert told == ["one", "no: no-such-program", "no: false", "two"]


@pytest.mark.parametrize(("gib", "found"), [(80, 0), (24, 1)])
def test_a_matrix_that_is_too_large_for_the_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch, gib: int, found: int
) -> None:
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": gib * 2**30}
    monkeypatch.setattr("bench.launch.gpus.gpus", lambda: [gpu])
    told = list(lease._too_large("h100-15min"))
    assert len(told) == found
    assert all(line.startswith("matrix h100-15min is for a larger GPU: ") for line in told)


def test_steps_are_chosen_by_name() -> None:
    assert [step.name for step in lease.chosen("zero3,facts")] == ["zero3", "facts"]
    assert len(lease.chosen("")) == len({step.name for step in lease.steps()}) <= 8, (
        "so many files come back"
    )
    with pytest.raises(SystemExit, match=r"'h100' is not a step; there are facts, 1b"):
        lease.chosen("h100")


def test_a_machine_without_a_gpu_or_a_package_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert lease.main(["60", "--folder", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("lease: NVML does not answer (")
        and "install the driver's libnvidia-ml" in line
    )
    monkeypatch.setattr(lease, "missing_packages", lambda: ["deepspeed", "textalloc"])
    assert lease.main(["60"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "lease: not installed: deepspeed, textalloc; install them (docs/offline.md"
    )
    assert not (tmp_path / "a").exists(), "nothing was begun"
