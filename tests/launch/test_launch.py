"""Real process groups that misbehave: how they are told apart, how soon they end, and that nothing is left of them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
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
from tests.conftest import first

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "BENCH_TEST_TOKEN"
LOG_BYTES = 2**20
"""What ranks may write in these tests: more than that ends a trial at once."""
FAMILY_S = 100_000 + os.getpid()
"""By this number in their command, the processes that ``family`` leaves are told from those of other tests."""
ACTS = '''
"""What ranks do for the tests beside this file: each function is one act, of the rank that is told to."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.plan.task import Task
from bench.launch.rank import join, live


def run(payload):
    task = json.loads(payload)
    folder = Path(task["folder"])

    def work(rank):
        if task["act"] == "end" and rank == task["rank"]:
            connect_late(folder)
        join(Task(backend="", world_size=2, folder=str(folder)))
        (folder / f"joined{rank}").write_text(str(time.monotonic()))
        if rank == task["rank"]:
            globals()[task["act"]](folder)
        elif task["group"]:
            import torch
            import torch.distributed as dist

            dist.all_reduce(torch.ones(1))
        return {"status": "ok", "rank": rank}

    live(folder, work)


def connect_late(folder):
    import torch.distributed as dist

    connect = dist.init_process_group

    def slowly(*args, **kwargs):
        connect(*args, **kwargs)
        time.sleep(0.5)
        (folder / "connected").write_text(str(time.monotonic()))

    dist.init_process_group = slowly


def end(folder): ...


def sleep(folder):
    time.sleep(3600)


def lock_the_interpreter(folder):
    re.match("(a+)+b", "a" * 64)  # in C for years


def stop(folder):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)  # it is woken up to tell where it is


def leave(folder):
    os._exit(0)


def segfault(folder):
    ctypes.string_at(0)


def end_the_trial():
    os.write(1, bytes(2 * LOG_BYTES))
    time.sleep(3600)


def deaf(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_the_trial()


def family(folder):
    code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(FAMILY_S)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", code], env={}, start_new_session=True)


def family_and_sleep(folder):
    family(folder)
    end_the_trial()


def hold_segment(folder):
    import mmap

    path = (folder / "segment").read_text()
    with open(path, "r+b") as file:
        kept = mmap.mmap(file.fileno(), 0)
    end_the_trial()


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("ran",))


def read_pickle(folder):
    import torch

    os.chdir(folder)
    torch.save(Trap(), "trap.pt")
    torch.load("trap.pt", weights_only=False)


def listeners(folder):
    import psutil

    launcher = os.environ["BENCH_LAUNCHER"]
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BENCH_LAUNCHER") == launcher:
                found += [c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue
    (folder / "listeners").write_text(json.dumps(found))
'''


TOO_MUCH = "its ranks wrote more than 1 MiB to their standard output and error"


@dataclasses.dataclass
class Act:
    """A task in which one rank of two does something."""

    folder: str
    act: str = "end"
    rank: int = 1
    group: bool = False
    entry: ClassVar[str] = "acts:run"
    backend: str = "ddp-eager"
    num_processes: int = 2
    num_nodes: ClassVar[int] = 1

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def left(token: str) -> list[psutil.Process]:
    """Processes that have the token in their environment, or in that of whoever started them, by name."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]


def sleepers() -> list[int]:
    """What ``family`` left."""
    mark = f"time.sleep({FAMILY_S})"
    return [p.pid for p in psutil.process_iter(["cmdline"]) if any(mark in word for word in p.info["cmdline"] or ())]


def wait_until(condition: Callable[[], bool]) -> bool:
    """Wait for what is sure to come; pytest's own time limit is for a test that waits in vain."""
    while not condition():
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def acts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the module of acts, which ranks can import."""
    folder = tmp_path_factory.mktemp("acts")
    (folder / "acts.py").write_text(ACTS.replace("FAMILY_S", str(FAMILY_S)).replace("LOG_BYTES", str(LOG_BYTES)))
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(folder))
    patch.setenv(TOKEN, f"launch-{os.getpid()}")
    patch.setattr(watchdog, "LOG_BYTES", LOG_BYTES)
    yield folder
    patch.undo()


@pytest.fixture(scope="module")
def launcher(acts: Path) -> Iterator[Launcher]:
    with Launcher(Device.CPU) as made:
        yield made
    assert wait_until(lambda: not left(os.environ[TOKEN])), left(os.environ[TOKEN])


def play(launcher: Launcher, folder: Path, act: str, **options: Any) -> Outcome:
    inactivity_s = options.pop("inactivity_s", 0.0)
    return launcher.run(Act(str(folder / "trial"), act, **options), 3000.0, inactivity_s)


@pytest.mark.parametrize("group", [False, True])
def test_a_sound_trial(launcher: Launcher, tmp_path: Path, group: bool) -> None:
    found = play(launcher, tmp_path, "end", group=group, rank=-1 if group else 1)
    assert (found.status, found.reason) == (Status.OK, "")
    assert [one["rank"] for one in found.ranks] == [0, 1]


@pytest.mark.parametrize("act", first(["lock_the_interpreter"], ["sleep", "lock_the_interpreter", "stop"]))
def test_a_hang_is_told_with_the_stacks_of_all_ranks(launcher: Launcher, tmp_path: Path, act: str) -> None:
    found = play(launcher, tmp_path, act, group=True, inactivity_s=10.0)
    assert found.status is Status.HANG, found.reason
    assert found.reason.startswith("no rank got on for 10 s (rank 0 after ")
    assert ("is stopped by a signal" in found.reason) == (act == "stop")
    stacks = [(tmp_path / "trial" / f"rank{rank}.stacks").read_text() for rank in range(2)]
    assert "in all_reduce" in stacks[0] and f"in {act}" in stacks[1]


def test_what_ignores_signals_or_left_the_session_is_ended_too(launcher: Launcher, tmp_path: Path) -> None:
    before = set(sleepers())
    found = play(launcher, tmp_path, "family")
    assert found.status is Status.OK, "what it left behind is nobody's result"
    assert set(sleepers()) == before
    for act in ("family_and_sleep", "deaf"):
        found = play(launcher, tmp_path, act)
        assert (found.status, found.reason) == (Status.CRASHED, TOO_MUCH)
        assert set(sleepers()) == before


def test_a_rank_that_leaves_in_silence_ends_the_others(launcher: Launcher, tmp_path: Path) -> None:
    found = play(launcher, tmp_path, "leave", group=True)
    assert (found.status, found.reason) == (Status.CRASHED, "rank 1 ended without a result")


def test_a_segfault_has_its_signal_and_its_last_lines(launcher: Launcher, tmp_path: Path) -> None:
    found = play(launcher, tmp_path, "segfault", group=True)
    assert (found.status, found.reason) == (Status.CRASHED, "rank 1 was ended by SIGSEGV")
    assert any("in segfault" in line or "Segmentation" in line or "in live" in line for line in found.last_lines)


def test_nobody_leaves_while_another_still_connects(launcher: Launcher, tmp_path: Path) -> None:
    found = play(launcher, tmp_path, "end")
    assert found.status is Status.OK, found.reason
    connected = float((tmp_path / "trial" / "connected").read_text())
    assert float((tmp_path / "trial" / "joined0").read_text()) >= connected


def test_no_rank_reads_a_pickle_that_runs_code(launcher: Launcher, tmp_path: Path) -> None:
    found = play(launcher, tmp_path, "read_pickle")
    assert (found.status, (tmp_path / "trial" / "ran").exists()) == (Status.CRASHED, False)
    assert found.reason.startswith("rank 1: UnpicklingError: Weights only load failed"), found.reason


def test_all_sockets_are_on_loopback(launcher: Launcher, tmp_path: Path) -> None:
    found = play(launcher, tmp_path, "listeners")
    assert found.status is Status.OK, found.reason
    addresses = json.loads((tmp_path / "trial" / "listeners").read_text())
    assert addresses and set(addresses) <= {"127.0.0.1", "::1"}


def test_segments_of_a_rank_that_is_ended_are_removed(launcher: Launcher, tmp_path: Path) -> None:
    segment = Path(f"{stragglers.SEGMENT_PREFIX}test-{os.getpid()}")
    segment.write_bytes(bytes(4096))
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "segment").write_text(str(segment))
    try:
        assert play(launcher, tmp_path, "hold_segment").reason == TOO_MUCH
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


def launcher_process() -> psutil.Process:
    (found,) = [p for p in psutil.Process().children() if "bench.launch.server" in " ".join(p.cmdline())]
    return found


@pytest.mark.slow
def test_a_launcher_that_is_killed_is_told_and_replaced(launcher: Launcher, tmp_path: Path) -> None:
    assert play(launcher, tmp_path, "end").status is Status.OK
    launcher_process().kill()  # between two trials
    assert play(launcher, tmp_path, "end").status is Status.OK
    for server in launcher._own._servers.values():
        shutil.rmtree(server._temporary)
    assert play(launcher, tmp_path, "end").status is Status.OK
    victim, joined = launcher_process(), tmp_path / "again" / "trial" / "joined1"
    killer = threading.Thread(target=lambda: wait_until(joined.exists) and victim.kill())
    killer.start()
    found = play(launcher, tmp_path / "again", "sleep")
    killer.join()
    assert (found.status, found.reason) == (Status.CRASHED, "the launcher's process was ended by SIGKILL")
    assert play(launcher, tmp_path / "last", "end").status is Status.OK


@pytest.mark.slow
def test_a_fork_server_that_is_killed_is_replaced(launcher: Launcher, tmp_path: Path) -> None:
    assert play(launcher, tmp_path, "end").status is Status.OK
    (server,) = [p for p in launcher_process().children() if "forkserver" in " ".join(p.cmdline())]
    server.kill()
    outcomes = [play(launcher, tmp_path / str(number), "end") for number in range(2)]
    assert outcomes[-1].status is Status.OK, [one.reason for one in outcomes]


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
    "act", first(["family_and_sleep"], ["sleep", "lock_the_interpreter", "stop", "family_and_sleep"])
)
@pytest.mark.parametrize("stopped", first([True], [False, True]), ids=str)
def test_nothing_is_left_of_a_bench_that_is_killed(acts: Path, tmp_path: Path, act: str, stopped: bool) -> None:
    token = f"killed-{act}-{stopped}-{os.getpid()}"
    before = set(sleepers())
    environment = os.environ | {TOKEN: token, "PYTHONPATH": f"{ROOT}{os.pathsep}{acts}"}
    temporary = Path(tempfile.mkdtemp(prefix="killed-", dir="/tmp"))  # short: a socket's path lies in it
    environment |= {"TMPDIR": str(temporary)}
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path / "trial"), act],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    assert wait_until((tmp_path / "trial" / "joined1").exists)
    (server,) = [p for p in psutil.Process(parent.pid).children() if "bench.launch.server" in " ".join(p.cmdline())]
    if stopped:
        server.send_signal(signal.SIGSTOP)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not left(token)), [process.cmdline() for process in left(token)]
    assert set(sleepers()) == before
    assert wait_until(lambda: not list(temporary.glob("bench-*")))
    shutil.rmtree(temporary)


@pytest.mark.parametrize(("gpu", "cold"), [({"uuid": "GPU-7"}, False), ({"uuid": "GPU-7", "mig": "MIG-7"}, True)])
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
    acts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], initializes: bool
) -> None:
    """CPU ranks, but the launcher of GPUs. What goes well alone is not forked either from then on."""
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    make = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, tmp_path / "driver.c"]
    subprocess.run(make, check=True)
    call = "driver.cuInit(0)" if initializes else ""
    (tmp_path / "initializer.py").write_text(f"import ctypes\ndriver = ctypes.CDLL('{library.name}')\n{call}\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{acts}{os.pathsep}{tmp_path}")
    monkeypatch.setattr("bench.launch.gpus.gpus", list)
    needs = {"plain": (), "initializing": ("initializer",)}
    stand_ins = {name: SimpleNamespace(requires=packages) for name, packages in needs.items()}
    monkeypatch.setattr(launching, "registry", lambda names: stand_ins)
    cold = []
    with Launcher(Device.CUDA) as launcher:
        for backend in ("plain", "initializing", "plain"):
            found = play(launcher, tmp_path, "end", backend=backend)
            assert (found.status, found.reason) == (Status.OK, "")
            cold.append(found.cold)
        assert {server.cold for server in launcher._own._servers.values()} == {initializes}
    assert cold == [False, initializes, initializes]
    assert capfd.readouterr().err.count("importing initializer initializes CUDA") == int(initializes)
