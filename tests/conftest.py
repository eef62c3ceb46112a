"""What many tests share: real runs of the bench, each made once per session."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from bench import cli
from bench.backends.base import EXTRA_BACKENDS, registry
from bench.judge import gates, tables
from bench.launch.launcher import Launcher
from bench.launch.node import Node
from bench.launch.node_task import NodeTask
from bench.plan.cell import REFERENCES, SHARDED_REFERENCE, Device
from bench.report import figures
from bench.run.journal import Journal, read_document
from tests import plugin
from tests.factories import make_tables

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: idle threads spin, and starve other processes
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in a shell's background, and so in all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Machines are shared: how long an example takes says nothing.
hypothesis.settings.register_profile("bench", deadline=None)
hypothesis.settings.load_profile("bench")


def alone() -> dict[str, str]:
    """The environment for a pytest of a test's own, which is no worker of this one."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="run also what takes long: all backends, precisions and worlds",
    )
    parser.addoption("--quick", action="store_true", help="leave out what trains, or needs torch")
    parser.addoption(
        "--browser",
        action="store_true",
        help="run also what needs a browser: nox -s browser has one",
    )
    parser.addoption(
        "--reliability",
        type=Path,
        metavar="FILE.md",
        help="write the page of what tests/faults found, and its data",
    )
    parser.addoption(
        "--smoke",
        type=Path,
        metavar="DIR",
        help="look at this run of the smoke matrix, and make none",
    )
    parser.addoption(
        "--cuda-stub",
        metavar="DIR",
        help="run also tests/cuda, over the stub of CUDA in this folder",
    )
    parser.addoption(
        "--gpu-tables",
        action="store_true",
        help="write the tables of results/gpu-stub: what was counted",
    )
    parser.addoption(
        "--kills", type=int, default=50, metavar="N", help="with --all: how many by each signal"
    )


TRAINS = {"launcher", "here", "fp32_run", "variants_run", "faulty_run", "lonely_group"}
"""Fixtures that start processes or groups."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        needs = pytest.mark.skip(reason="trains, or needs torch")
        for item in items:
            module, fixtures = getattr(item, "module", None), set(getattr(item, "fixturenames", ()))
            if fixtures & TRAINS or hasattr(module, "torch") or "torch" in item.keywords:
                item.add_marker(needs)
    for name, option, why in (
        ("slow", "--all", "takes long"),
        ("browser", "--browser", "needs a browser"),
    ):
        if config.getoption(option):
            continue
        skip = pytest.mark.skip(reason=f"{why}; run it with {option}")
        for item in items:
            if name in item.keywords:
                item.add_marker(skip)


def first(chosen: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """Every one as a parameter of a test, those that are not chosen with --all alone."""
    parameters = []
    num_chosen = 0
    for value in every:
        if value in chosen:
            parameters.append(value)
            num_chosen += 1
        else:
            parameters.append(pytest.param(value, marks=pytest.mark.slow))
    assert num_chosen or not chosen, f"none of {chosen} is a parameter"
    return parameters


def asked(request: pytest.FixtureRequest, chosen: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """What a fixture makes: the chosen ones, or with --all every one."""
    return list(every if request.config.getoption("--all") else chosen)


Command = Callable[..., subprocess.CompletedProcess[str]]

MATRIX = """
description = "for the tests"
device = "cpu"
repeats = {repeats}
threads = 1
timeout_s = 900

[workload]
model = "micro"
sequence_length = {sequence_length}
global_batch_size = 12

[training]
warmup_windows = 2
timed_windows = 2

[axes]
backend = {backend}
accumulate = [3]
world_size = [2]
precision = ["{precision}"]
"""


@dataclass
class Run:
    """A finished run: its folder, what the command printed and returned, and its judged tables."""

    folder: Path
    process: subprocess.CompletedProcess[str]
    only: dict[str, Any] = field(default_factory=dict)
    """Values of cells that are looked at: all cells if empty."""

    @property
    def tables(self) -> tables.Tables:
        return gates.judge(make_tables(self.records, self.manifest))

    @property
    def records(self) -> list[dict[str, Any]]:
        """All but those of the A/A twin, which is its cell once more."""
        return [
            record
            for record in Journal(self.folder).read()
            if not record["cell"]["twin"]
            and all(
                record["cell"][key] == value
                for key, value in self.only.items()
                if key == "clip_norm" or record["cell"]["backend"] not in REFERENCES
            )
        ]

    @property
    def manifest(self) -> dict[str, Any]:
        return read_document(self.folder)

    def record(self, backend: str) -> dict[str, Any]:
        """The first record of a backend."""
        return next(record for record in self.records if record["cell"]["backend"] == backend)

    def trial(self, backend: str) -> Any:
        """The first row of a backend in the judged trials table."""
        trials = self.tables.trials
        return trials[trials["backend"] == backend].iloc[0]


def bench(*arguments: str, cwd: Path, pythonpath: Path | None = None, **environment: str) -> Any:
    """``python -m bench`` as a user runs it, in ``cwd``."""
    paths = [str(ROOT), *([str(pythonpath)] if pythonpath else [])]
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
    )


def processes_with(token: str) -> list[int]:
    """Processes whose environment holds the token."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("BENCH_TEST_TOKEN") == token
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait for a condition. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen in time")
        time.sleep(0.05)


def run_bench(
    folder: Path, matrix: str, *arguments: str, command: Command | None = None, **environment: Any
) -> Run:
    """Run a matrix, a name or a file in the folder, into ``folder / "run"``; in a new process unless told how."""
    options = ("run", "--matrix", matrix, "--out", "run", *arguments)
    return Run(
        folder / "run", command(*options) if command else bench(*options, cwd=folder, **environment)
    )


def run_matrix(
    folder: Path,
    *arguments: str,
    backend: Sequence[str],
    precision: str = "fp32",
    sequence_length: int = 16,
    **how: Any,
) -> Run:
    """Run backends at N = 3 on two ranks, as ``run_bench`` does."""
    text = MATRIX.format(
        backend=json.dumps(backend),
        precision=precision,
        repeats=1,
        sequence_length=sequence_length,
    )
    (folder / "matrix.toml").write_text(text)
    return run_bench(folder, "matrix.toml", *arguments, **how)


IN_BF16 = (
    SHARDED_REFERENCE,
    "ddp-deferred",
    "fsdp2-eager",
    "deepspeed-zero2-eager",
    "deepspeed-zero2-deferred",
)
"""One backend for each way to compute in bf16, and one that refuses."""
CLIP = 0.75
CLIPPED = ("ddp-deferred", "fsdp2-deferred", "deepspeed-zero2-eager", "lightning-deepspeed-zero2")
CLIPPING = (*CLIPPED, "lightning-ddp", "fabric-fsdp2-deferred")
CHECKPOINTED = ("fsdp2-deferred",)
VARIANTS = """
[axes]
backend = {bf16}
accumulate = [3]
world_size = [2]
precision = ["bf16"]

[[groups]]
axes.backend = {clipped}
axes.precision = ["fp32"]
axes.optimizer = ["sgd"]
axes.clip_norm = [{clip}]

[[groups]]
axes.backend = {checkpointed}
axes.precision = ["fp32"]
axes.activation_checkpointing = [true]
"""
HSDP = [name for name, backend in registry().items() if backend.replicate]


@pytest.fixture(scope="session")
def fp32_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The smoke matrix: every built-in backend in fp32, HSDP on four ranks."""
    if folder := request.config.getoption("--smoke"):
        return Run(folder.resolve(), bench("check", str(folder.resolve()), cwd=folder))
    return run_bench(tmp_path_factory.mktemp("smoke"), "smoke")


@pytest.fixture(scope="session")
def variants_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Some backends of the smoke matrix in bf16, with clipping, and with checkpointing; with --all more."""
    axes = VARIANTS.format(
        bf16=json.dumps(asked(request, IN_BF16, [name for name in registry() if name not in HSDP])),
        clipped=json.dumps(asked(request, CLIPPED, CLIPPING)),
        checkpointed=json.dumps(CHECKPOINTED),
        clip=CLIP,
    )
    folder = tmp_path_factory.mktemp("variants")
    smoke = (ROOT / "bench/matrices/smoke.toml").read_text()
    (folder / "variants.toml").write_text(smoke.partition("[axes]")[0] + axes)
    return run_bench(folder, "variants.toml")


@pytest.fixture(scope="session")
def bf16_run(variants_run: Run) -> Run:
    return replace(variants_run, only={"precision": "bf16", "clip_norm": 0.0})


@pytest.fixture(scope="session")
def clipped_run(variants_run: Run) -> Run:
    """SGD and clipping, with a limit that the whole gradient is above and that one rank's shard may be below."""
    return replace(variants_run, only={"clip_norm": CLIP})


@pytest.fixture(scope="session")
def extra_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the package with the extra backends was installed."""
    return plugin.install(tmp_path_factory.mktemp("plugin"))


LOOPS = ",".join(f"tests.extra_backends:{name}" for name in plugin.CLASSES.values())
WATCHED = "tests.watched:WatchedZero3,tests.watched:WatchedLightning"
OWN = f"{LOOPS},{WATCHED}"
"""Backends of tests, as BENCH_BACKENDS names them."""
FAULTY = (
    "x-sound",
    "x-raises",
    "x-killed",
    "x-unsupported",
    "x-needs-missing",
    "x-last-only",
    "x-aborts-afterwards",
)


@pytest.fixture(scope="session")
def faulty_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, extra_site: Path
) -> Run:
    """The extra package's backends, most of which fail in one way or another."""
    names = asked(request, FAULTY, (*FAULTY, "x-steps-too-often", "x-summed"))
    folder = tmp_path_factory.mktemp("faulty")
    return run_matrix(folder, backend=names, pythonpath=extra_site, BENCH_TEST_TOKEN="faulty")


ALL = ("deepspeed", "lightning")
"""What the fork server of tests has loaded."""


class OneServer(Node):
    """A node with one fork server for all backends: it has imported all frameworks, and knows the backends of tests."""

    def start(self, every: Iterable[tuple[str, ...]], *, cold: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(EXTRA_BACKENDS, OWN)
            super().start([ALL], cold=cold)

    def begin(self, node_task: NodeTask) -> int:
        return super().begin(replace(node_task, packages=ALL))


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """One launcher for all tests of a worker: its processes take ten seconds of CPU time to start."""
    made = Launcher(Device.CPU)
    made._own = OneServer()
    with made:
        yield made


def lend(launcher: Launcher, monkeypatch: pytest.MonkeyPatch, *users: Any) -> None:
    """Give modules the shared launcher in place of one that they would start and end."""
    monkeypatch.setattr(
        Launcher, "__enter__", lambda shared: shared
    )  # only its fixture starts and ends it
    for method in ("__exit__", "close"):
        monkeypatch.setattr(Launcher, method, lambda *_: None)
    for user in users:
        monkeypatch.setattr(user, "Launcher", lambda *_, **__: launcher)


@pytest.fixture
def here(launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """``python -m bench`` in this process and folder, its trials forked from the shared launcher."""
    from bench.audit import dtypes
    from bench.launch import launcher as module

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "draw", lambda *_: [])
    lend(launcher, monkeypatch, dtypes, module)

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.main(list(arguments))
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())

    return command


@pytest.fixture
def lonely_group(tmp_path: Path) -> Iterator[None]:
    """A gloo group of one rank."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()
