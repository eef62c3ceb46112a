"""The GPUs that are not there: commands run over the stub that ``--cuda-stub`` names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.plan.cell import Cell
from bench.run.journal import Journal
from tests.conftest import ROOT
from tests.cuda_stub import build

TIMEOUT_S = 3600
"""Of one test: it is a run of many trials, each of which has a limit of its own."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            if not config.getoption("--cuda-stub"):
                item.add_marker(
                    pytest.mark.skip(reason="needs a stub of CUDA; nox -s cuda builds it")
                )


@dataclass(frozen=True)
class Machine:
    """A machine with GPUs that are not there, and a folder of its own."""

    stub: Path
    folder: Path

    def environment(self, gpus: int, *, values: bool = False, **settings: str) -> dict[str, str]:
        """What a process is to be given that runs on it."""
        (self.folder / "runtime").mkdir(mode=0o700, exist_ok=True)
        about = {
            "FAKE_GPUS": str(gpus),
            "FAKE_MACHINE": str(self.folder / "machine"),
            "OMP_NUM_THREADS": "1",
        }
        # The GPUs are this machine's alone, and so are the locks of those that use them.
        return {
            **os.environ,
            **build.environment(self.stub, values=values),
            **about,
            "XDG_RUNTIME_DIR": str(self.folder / "runtime"),
        } | settings

    def bench(
        self, *arguments: str, gpus: int = 1, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """``python -m bench`` there, with values."""
        return subprocess.run(
            [sys.executable, "-m", "bench", *arguments],
            cwd=self.folder,
            env=self.environment(gpus, values=True, **settings),
            capture_output=True,
            text=True,
        )

    def python(self, code: str, gpus: int = 1, *, values: bool = False, **settings: str) -> str:
        command = [sys.executable, "-c", code]
        process = subprocess.run(
            command,
            env=self.environment(gpus, values=values, **settings),
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout.strip()

    def records(self, run: str = "run") -> list[dict[str, Any]]:
        return list(Journal(self.folder / run).read())

    def trials(
        self,
        cells: Sequence[Cell],
        passes: tuple[str, ...],
        *,
        gpus: int,
        counted: bool = False,
        values: bool = False,
        **settings: str,
    ) -> list[dict[str, Any]]:
        """One trial of each cell, without a run around it: how it ended, and what rank 0 found."""
        specs = [{"cell": cell.to_dict(), "passes": passes, "counted": counted} for cell in cells]
        process = subprocess.run(
            [sys.executable, "-m", "tests.cuda.counting", str(self.folder / "trials")],
            cwd=ROOT,
            env=self.environment(gpus, values=values, **settings),
            input=json.dumps(specs),
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr
        return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.fixture(scope="session")
def stub(request: pytest.FixtureRequest) -> Path:
    """The folder of the stub, built again if its sources have changed."""
    folder = Path(request.config.getoption("--cuda-stub")).resolve()
    build.build(folder)
    return folder


@pytest.fixture
def machine(stub: Path, tmp_path: Path) -> Machine:
    return Machine(stub, tmp_path)


@pytest.fixture(scope="module")
def shared_machine(stub: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """One for a module, for what takes long and is looked at twice."""
    return Machine(stub, tmp_path_factory.mktemp("machine"))
