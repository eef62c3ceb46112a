"""What many tests share: real runs of the bench, each made once per session."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.backends.base import registry
from bench.judge import gates, tables
from bench.plan.cell import SHARDED_REFERENCE
from bench.run.journal import Journal, read_manifest
from tests import plugin

ROOT = Path(__file__).resolve().parent.parent
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background, and so in all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def alone() -> dict[str, str]:
    """The environment for a pytest of a test's own, which is no worker of this one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run also what takes long: all backends, precisions and worlds")
    parser.addoption("--browser", action="store_true", help="run also what needs a browser: nox -s browser has one")
    parser.addoption(
        "--reliability", type=Path, metavar="FILE.md", help="write the page of what tests/faults found, and its data"
    )
    parser.addoption("--cuda-stub", metavar="DIR", help="run also tests/cuda, over the stub of CUDA in this folder")
    parser.addoption("--gpu-page", type=Path, metavar="FILE.md", help="write the table of this page: what was counted")
    parser.addoption("--kills", type=int, default=50, metavar="N", help="with --all: how many by each signal")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for name, option, why in (("slow", "--all", "takes long"), ("browser", "--browser", "needs a browser")):
        if config.getoption(option):
            continue
        skip = pytest.mark.skip(reason=f"{why}; run it with {option}")
        for item in items:
            if name in item.keywords:
                item.add_marker(skip)


def first(chosen: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """Every one as a parameter of a test, those that are not chosen with --all alone."""
    return [one if one in chosen else pytest.param(one, marks=pytest.mark.slow) for one in every]


def asked(request: pytest.FixtureRequest, chosen: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """What a fixture makes: the chosen ones, or with --all every one."""
    return list(every if request.config.getoption("--all") else chosen)


MATRIX = """
description = "for the tests"
device = "cpu"
repeats = {repeats}
threads = 1
timeout_s = {timeout_s}

[workload]
model = "micro"
sequence_length = {sequence_length}
global_batch_size = 16

[training]
warmup_windows = 2
timed_windows = 3

[axes]
backend = {backend}
accumulate = [4]
world_size = [2]
precision = ["{precision}"]
"""


@dataclass
class Run:
    """A finished run: its folder, what the command printed and returned, and its judged tables."""

    folder: Path
    process: subprocess.CompletedProcess[str]

    @property
    def tables(self) -> tables.Tables:
        return gates.judge(tables.build(self.records, self.manifest))

    @property
    def records(self) -> list[dict[str, Any]]:
        """All but those of the A/A twin, which is its cell once more."""
        return [record for record in Journal(self.folder).read() if not record["cell"]["twin"]]

    @property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.folder)

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
        timeout=900,
    )


def processes_with(token: str) -> list[int]:
    """Processes whose environment holds the token."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BENCH_TEST_TOKEN") == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def run_matrix(
    folder: Path,
    *arguments: str,
    backend: str = '"all"',
    precision: str = "fp32",
    repeats: int = 1,
    timeout_s: int = 120,
    sequence_length: int = 16,
    pythonpath: Path | None = None,
    **environment: str,
) -> Run:
    """Run a matrix of backends at N = 4 on two ranks into ``folder / "run"``."""
    matrix = MATRIX.format(
        backend=backend, precision=precision, repeats=repeats, timeout_s=timeout_s, sequence_length=sequence_length
    )
    (folder / "matrix.toml").write_text(matrix)
    process = bench(
        "run", "--matrix", "matrix.toml", "--out", "run", *arguments, cwd=folder, pythonpath=pythonpath, **environment
    )
    return Run(folder / "run", process)


@pytest.fixture(scope="session")
def fp32_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Every built-in backend in fp32."""
    return run_matrix(tmp_path_factory.mktemp("fp32"), backend=json.dumps(list(registry())))


IN_BF16 = (
    SHARDED_REFERENCE,
    "ddp-deferred",
    "fsdp2-eager",
    "deepspeed-zero2-eager",
    "deepspeed-zero2-deferred",
    "lightning-deepspeed-zero2",
)
"""One backend for each way to compute in bf16, one that refuses, and one with a defect."""


@pytest.fixture(scope="session")
def bf16_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """IN_BF16, or with --all every built-in backend, in bf16."""
    names = json.dumps(asked(request, IN_BF16, registry()))
    return run_matrix(tmp_path_factory.mktemp("bf16"), backend=names, precision="bf16")


@pytest.fixture(scope="session")
def extra_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the package with the extra backends was installed."""
    return plugin.install(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="session")
def faulty_run(tmp_path_factory: pytest.TempPathFactory, extra_site: Path) -> Run:
    """The extra package's backends, most of which fail in one way or another."""
    names = ", ".join(f'"{name}"' for name in plugin.NAMES)
    folder = tmp_path_factory.mktemp("faulty")
    return run_matrix(folder, backend=f"[{names}]", timeout_s=40, pythonpath=extra_site, BENCH_TEST_TOKEN="faulty")


@pytest.fixture
def lonely_group(tmp_path: Path) -> Iterator[None]:
    """A gloo group of one rank."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """This process is a process group of one rank, over gloo."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
