"""Real process groups that misbehave: how they are told apart, how soon they end, and that nothing is left of them."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

from bench.launch import launcher as launching
from bench.launch import stragglers, watchdog
from bench.launch.launcher import Launcher
from bench.launch.outcome import Outcome
from bench.plan.cell import Device, Status
from tests.conftest import ROOT, first, processes_with, until
from tests.launch import acts

TOKEN = "BENCH_TEST_TOKEN"
FAMILY_S = 100_000 + os.getpid()
TOO_MUCH = "wrote more than 1 MiB"


@dataclasses.dataclass
class Act:
    """A task in which one rank of two does something."""

    folder: str
    act: str = "end"
    rank: int = 1
    group: bool = False
    entry: ClassVar[str] = "tests.launch.acts:run"
    backend: str = "ddp-eager"
    num_processes: int = 2
    num_nodes: ClassVar[int] = 1

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def left(token: str) -> list[int]:
    """Other processes with the token."""
    return [pid for pid in processes_with(token) if pid != os.getpid()]


def sleepers() -> list[int]:
    """What ``family`` left."""
    mark = f"time.sleep({FAMILY_S})"
    return [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if any(mark in word for word in p.info["cmdline"] or ())
    ]


@pytest.fixture(scope="module", autouse=True)
def marked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN, f"launch-{os.getpid()}")
        patch.setenv(acts.FAMILY_S, str(FAMILY_S))
        patch.setattr(watchdog, "LOG_BYTES", acts.LOG_BYTES)
        yield


@pytest.fixture(scope="module")
def launcher(marked: None) -> Iterator[Launcher]:
    with Launcher(Device.CPU) as made:
        yield made
    until(lambda: not left(os.environ[TOKEN]))


def play(launcher: Launcher, folder: Path, act: str, **options: Any) -> Outcome:
    inactivity_s = options.pop("inactivity_s", 0.0)
    return launcher.run(Act(str(folder / "trial"), act, **options), 3000.0, inactivity_s)


def test_what_ignores_signals_or_left_the_session_is_ended_too(
    launcher: Launcher, tmp_path: Path
) -> None:
    before = set(sleepers())
    found = play(launcher, tmp_path, "family")
    assert found.status is Status.OK, "what it left behind is nobody's result"
    assert set(sleepers()) == before
    for act in ("family_and_sleep", "deaf"):
        found = play(launcher, tmp_path, act)
        assert found.status is Status.CRASHED and TOO_MUCH in found.reason
        assert set(sleepers()) == before


def test_nobody_leaves_while_another_still_connects(launcher: Launcher, tmp_path: Path) -> None:
    found = play(launcher, tmp_path, "end")
    assert found.status is Status.OK, found.reason
    connected = float((tmp_path / "trial" / "connected").read_text())
    assert float((tmp_path / "trial" / "joined0").read_text()) >= connected


def test_no_rank_reads_a_pickle_that_runs_code(launcher: Launcher, tmp_path: Path) -> None:
    found = play(launcher, tmp_path, "read_pickle")
    assert (found.status, (tmp_path / "trial" / "ran").exists()) == (Status.CRASHED, False)
    assert found.reason.startswith("rank 1: UnpicklingError: Weights only load failed"), (
        found.reason
    )


def test_all_sockets_are_on_loopback(launcher: Launcher, tmp_path: Path) -> None:
    found = play(launcher, tmp_path, "listeners")
    assert found.status is Status.OK, found.reason
    addresses = json.loads((tmp_path / "trial" / "listeners").read_text())
    assert addresses and set(addresses) <= {"127.0.0.1", "::1"}


def test_segments_are_removed_when_their_last_process_has_ended(
    launcher: Launcher, tmp_path: Path
) -> None:
    """NCCL's shared memory, as ranks that are ended leave it."""
    segment = Path(f"{stragglers.SEGMENT_PREFIX}test-{os.getpid()}")
    segment.write_bytes(bytes(4096))
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "segment").write_text(str(segment))
    try:
        with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            assert TOO_MUCH in play(launcher, tmp_path, "hold_segment").reason
            assert segment.exists(), "a peer still has it mapped"
        assert TOO_MUCH in play(launcher, tmp_path, "hold_segment").reason
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


def launcher_process() -> psutil.Process:
    (found,) = [
        p for p in psutil.Process().children() if "bench.launch.server" in " ".join(p.cmdline())
    ]
    return found


@pytest.mark.slow
def test_a_launcher_that_is_killed_between_two_trials_is_replaced(
    launcher: Launcher, tmp_path: Path
) -> None:
    assert play(launcher, tmp_path, "end").status is Status.OK
    launcher_process().kill()
    assert play(launcher, tmp_path, "end").status is Status.OK
    shutil.rmtree(launcher._own._server._temporary)
    assert play(launcher, tmp_path, "end").status is Status.OK


PARENT = """
import sys
from bench.plan.cell import Device
from bench.launch.launcher import Launcher
from tests.launch.test_launch import Act

with Launcher(Device.CPU) as launcher:
    print("ready", flush=True)
    print(launcher.run(Act(sys.argv[1], sys.argv[2], group=True), 300.0).reason)
"""


@pytest.mark.parametrize(
    "act", first(["family_and_sleep"], ["lock_the_interpreter", "stop", "family_and_sleep"])
)
@pytest.mark.parametrize("stopped", first([True], [False, True]), ids=str)
def test_nothing_is_left_of_a_bench_that_is_killed(tmp_path: Path, act: str, stopped: bool) -> None:
    token = f"killed-{act}-{stopped}-{os.getpid()}"
    before = set(sleepers())
    temporary = Path(
        tempfile.mkdtemp(prefix="killed-", dir="/tmp")
    )  # short: a socket's path lies in it
    environment = os.environ | {TOKEN: token, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", PARENT, str(tmp_path / "trial"), act]
    parent = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
    until((tmp_path / "trial" / "joined1").exists)
    (server,) = [
        p
        for p in psutil.Process(parent.pid).children()
        if "bench.launch.server" in " ".join(p.cmdline())
    ]
    if stopped:
        server.send_signal(signal.SIGSTOP)
    parent.kill()
    parent.wait()
    until(lambda: not left(token))
    assert set(sleepers()) == before
    until(lambda: not list(temporary.glob("bench-*")))
    shutil.rmtree(temporary)


@pytest.mark.parametrize(
    ("gpu", "cold"), [({"uuid": "GPU-7"}, False), ({"uuid": "GPU-7", "mig": "MIG-7"}, True)]
)
def test_a_fork_cannot_use_a_mig_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: dict[str, str], cold: bool
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("bench.launch.gpus.gpus", lambda: [gpu])
    with Launcher(Device.CUDA) as launcher:
        assert launcher._cold is cold


DRIVER = """
static int ready;
int cuInit(unsigned flags) { ready = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return ready ? 0 : 3; }
"""
"""What a GPU's machine has as libcuda.so.1, as far as it is asked here."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="a stand-in for CUDA's driver is compiled")
@pytest.mark.parametrize("initializes", first([True], [False, True]))
def test_a_package_that_initializes_cuda_is_not_forked_from(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    initializes: bool,
) -> None:
    """CPU ranks, but the launcher of GPUs. What goes well alone is not forked either from then on."""
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    make = [
        "cc",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{library.name}",
        "-o",
        library,
        tmp_path / "driver.c",
    ]
    subprocess.run(make, check=True)
    call = "driver.cuInit(0)" if initializes else ""
    (tmp_path / "initializer.py").write_text(
        f"import ctypes\ndriver = ctypes.CDLL('{library.name}')\n{call}\n"
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("bench.launch.gpus.gpus", list)
    needs = {"plain": (), "initializing": ("initializer",)}
    stand_ins = {
        name: SimpleNamespace(preloaded=lambda packages=packages: packages)
        for name, packages in needs.items()
    }
    monkeypatch.setattr(launching, "registry", lambda names: stand_ins)
    cold = []
    with Launcher(Device.CUDA) as launcher:
        for backend in ("plain", "initializing", "plain"):
            found = play(launcher, tmp_path, "end", backend=backend)
            assert (found.status, found.reason) == (Status.OK, "")
            cold.append(found.cold)
        assert launcher._own._server.cold is initializes
    assert cold == [False, initializes, initializes]
    assert capfd.readouterr().err.count("importing initializer initializes CUDA") == int(
        initializes
    )
