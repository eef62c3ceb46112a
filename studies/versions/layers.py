"""Environments with some packages in other versions, kept between sessions, and scripts that are measured in them.

A script prints a line of JSON for each case: ``case``, what was ``measured`` and what would be ``right``. All records
stand in one file of lines, so that an interrupted session goes on where it was.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from pydantic import TypeAdapter

from studies import ROOT
from studies.versions.environment import FOLDERS, FailedError, create, pip, run, without_folders

ENVIRONMENTS = Path(tempfile.gettempdir()) / "bench-versions"
ALONE = {"lightning": ("setuptools<81",), "deepspeed": (), "accelerate": ()}
"""Packages that are installed without what they require, and what they need besides; all others bring theirs."""
NAMES = ("torch", "deepspeed", "lightning", "accelerate", "transformers", "trl")
"""Packages whose versions a record has."""
INSTALL_S = 900
FORKED = Path(__file__).with_name("forked.py")
VARIABLES = {
    "MASTER_ADDR": "127.0.0.1",
    "PYTHONWARNINGS": "ignore",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": "",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Of the scripts' processes."""
ASK = (
    "import importlib.metadata as m, json, sys\n"
    "print(json.dumps({n: m.version(n) for n in sys.argv[1:] if any(m.distributions(name=n))}))"
)
"""The versions that an environment has."""


@dataclass(frozen=True)
class Job:
    """A script to be measured."""

    script: str
    """Its name under studies/, without ``.py``."""
    ranks: int = 1
    imports: tuple[str, ...] = ("torch",)
    """What is imported before it is forked."""


@dataclass(frozen=True)
class Record:
    """One case of one script in one environment."""

    script: str
    """Its name under studies/, without ``.py``."""
    asked: tuple[str, ...]
    """The versions that were asked for, such as ``deepspeed==0.18.9``; none for the environment of the project."""
    packages: dict[str, str]
    """Versions of the packages that matter, as installed; empty if they could not be."""
    python: str
    date: str
    """Of the measurement, ISO 8601, UTC."""
    seconds: float
    """Of the script, with its imports."""
    case: str = ""
    measured: Any = None
    right: Any = None
    error: str = ""
    """Why nothing was measured: the last line of pip or of the script."""

    @property
    def is_right(self) -> bool:
        return not self.error and self.measured == self.right

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        return self.script, self.asked


def read_records(path: Path) -> list[Record]:
    """The records of a file of lines; none without the file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return TypeAdapter(list[Record]).validate_python(list(map(json.loads, lines)))


def write_records(path: Path, records: Iterable[Record]) -> None:
    path.write_text(
        "".join(json.dumps(asdict(record)) + "\n" for record in records), encoding="utf-8"
    )


def measure_into(
    path: Path,
    jobs: Sequence[Job],
    asked: Sequence[str],
    *,
    again: bool = False,
    environments: Path = ENVIRONMENTS,
) -> list[Record]:
    """Measure the jobs that ``path`` lacks for these versions, or all ``again``, and write them into it."""
    records = read_records(path)
    there = {record.key for record in records}
    wanted = [job for job in jobs if again or (job.script, tuple(asked)) not in there]
    if not wanted:
        return []
    found = measured(wanted, asked, environments)
    made = {record.key for record in found}
    write_records(path, [record for record in records if record.key not in made] + found)
    return found


def measured(
    jobs: Sequence[Job], asked: Sequence[str], environments: Path = ENVIRONMENTS
) -> list[Record]:
    """What the scripts say in the environment of these versions; a record with an error for one that says nothing."""
    about: dict[str, Any] = {
        "asked": tuple(asked),
        "packages": {},
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": 0.0,
    }
    try:
        python = environment_of(asked, environments)
        about["packages"] = versions_in(python)
        for name, number in (text.split("==") for text in asked):
            if about["packages"].get(name, number) != number:
                raise FailedError(f"{name} {about['packages'][name]} was installed instead")
        answers = answers_of(python, jobs)
    except FailedError as failure:
        return [Record(**about, script=job.script, error=str(failure)) for job in jobs]
    found = []
    for job, answer in zip(jobs, answers, strict=True):
        more = about | {"script": job.script, "seconds": answer["seconds"]}
        found += [Record(**more, **line) for line in answer["lines"]]
        if not answer["lines"]:
            found.append(Record(**more, error=FOLDERS.sub("", answer["error"])[:300]))
    return found


def environment_of(asked: Sequence[str], environments: Path) -> Path:
    """The interpreter of the environment with these versions, which is made if it is not there."""
    if not asked:
        return Path(sys.executable)
    folder = environments / "+".join(asked).replace("==", "-")
    done, python = folder / "installed", folder / "bin" / "python"
    if done.exists():
        return python
    folder.mkdir(parents=True, exist_ok=True)
    create(folder)
    for text in asked:
        name = Requirement(text).name
        alone = ["--no-deps", "--ignore-installed"] if name in ALONE else []
        for requirement in (*ALONE.get(name, ()), text):
            pinned = [] if alone else [f"torch=={version('torch')}"]
            command = [*pip(python), *alone, requirement, *pinned]
            run(command, folder, INSTALL_S, "not installed", {"DS_BUILD_OPS": "0"})
    done.touch()
    return python


def versions_in(python: Path) -> dict[str, str]:
    """Versions of the packages that matter in the environment of this interpreter."""
    asked = subprocess.run(
        [str(python), "-c", ASK, *NAMES], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(asked.stdout)
    return found


def answers_of(python: Path, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """What ``forked.py`` says of each job. Raises FailedError if it does not answer for each."""
    modules = list(dict.fromkeys(module for job in jobs for module in job.imports))
    paths = [[str(ROOT / "studies" / f"{job.script}.py"), job.ranks] for job in jobs]
    command = [str(python), str(FORKED), json.dumps(modules), json.dumps(paths)]
    environment = {**os.environ, **VARIABLES}
    with tempfile.TemporaryDirectory(prefix="bench-versions-") as folder:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"script"')]
    if len(found) != len(jobs):
        raise FailedError(f"not measured: {without_folders(done.stderr.strip())[-300:]}")
    return found
