"""``studies.lease`` on a GPU that is not there: what it refuses, and a run that is cut off and goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.cuda.conftest import Machine

LEASE = (sys.executable, "-m", "studies.lease")
SMALL = """
import sys
from studies import lease
run = lease._run("--matrix", "smoke", "--device", "cuda", "--world-size", "1", "--backend", "ddp-deferred,fsdp2-eager")
race = [sys.executable, "-c", "print('no race')"]
lease.steps = lambda: [
    lease.Step(name="run", command=run, needs_s=10, limit_s=600, is_run=True),
    lease.Step(name="race", command=race, needs_s=1, limit_s=60),
]
sys.exit(lease.main(sys.argv[1:]))
"""


def lease(machine: Machine, *arguments: str, **settings: str) -> subprocess.Popen[str]:
    """A lease with a small run and a program."""
    command = [sys.executable, "-c", SMALL, *arguments, "--folder", str(machine.folder / "lease")]
    return subprocess.Popen(
        [*command, "--out", str(machine.folder / "out")],
        cwd=ROOT,
        env=machine.environment(1, values=True, **settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def packed(machine: Machine, name: str) -> str:
    """A file of the run, as it came back."""
    with tarfile.open(machine.folder / "out" / "h100-run.tar.gz") as tar:
        found = tar.extractfile(f"h100-run/{name}")
        assert found is not None
        return found.read().decode()


def trials(machine: Machine) -> list[dict[str, Any]]:
    """The finished trials that came back."""
    every = [json.loads(line) for line in packed(machine, "trials.jsonl").splitlines()]
    return [trial for trial in every if trial["status"] != "interrupted"]


def test_a_run_that_is_cut_off_comes_back_and_goes_on(machine: Machine) -> None:
    first = lease(machine, "600")
    journal = machine.folder / "lease" / "h100-run" / "trials.jsonl"
    while not (journal.exists() and journal.read_bytes().count(b"\n")):
        assert first.poll() is None, first.communicate()
        time.sleep(0.2)
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 128 + signal.SIGTERM, output
    finished = trials(machine)
    assert finished and json.loads(packed(machine, "run.json"))["run_id"] == "h100-run"
    output, errors = lease(machine, "600").communicate()
    assert (
        "lease: h100-run: exit status 0" in output and "lease: h100-race: exit status 0" in output
    ), output + errors
    every = trials(machine)
    assert (
        every[: len(finished)] == finished and json.loads(packed(machine, "run.json"))["finished"]
    )
    assert {trial["cell"]["backend"] for trial in every} == {
        "reference",
        "ddp-deferred",
        "fsdp2-eager",
    }
    assert all(trial["status"] == "ok" for trial in every)


def refused(machine: Machine, **settings: str) -> str:
    """The line that a lease with all its steps ends with before anything is begun."""
    folders = ("--folder", str(machine.folder / "lease"), "--out", str(machine.folder / "out"))
    process = subprocess.run(
        [*LEASE, "560", *folders],
        cwd=ROOT,
        env=machine.environment(1, **settings),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2 and not (machine.folder / "lease").exists(), (
        process.stdout + process.stderr
    )
    (line,) = process.stderr.splitlines()
    return line


def test_a_gpu_that_is_too_small_is_refused(machine: Machine) -> None:
    line = refused(machine, FAKE_MEM_MIB="24000")
    assert (
        line.startswith("lease: matrix h100-15min is for a larger GPU: ")
        and "the GPU has 23 GiB" in line
    )


def test_a_gpu_that_others_use_is_refused(machine: Machine) -> None:
    code = "import torch; kept = torch.ones(1, device='cuda'); print('on it', flush=True); input()"
    environment = machine.environment(1)
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "on it\n"
        line = refused(machine)
    finally:
        other.communicate("\n")
    assert line.startswith("lease: 1 other process computes on GPU-11111111") and "end it" in line


def test_a_machine_without_nvml_is_refused(machine: Machine, stub: Path) -> None:
    libraries = machine.folder / "lib"
    libraries.mkdir()
    for path in (stub / "lib").iterdir():
        if path.name != "libnvidia-ml.so.1":
            (libraries / path.name).symlink_to(path)
    line = refused(machine, LD_LIBRARY_PATH=str(libraries))
    assert (
        line.startswith("lease: NVML does not answer (")
        and "install the driver's libnvidia-ml" in line
    )
