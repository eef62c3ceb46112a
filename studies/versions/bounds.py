"""Smoke runs with the lowest and the newest packages that pyproject.toml allows.

Each torch gets an environment on top of the current one. Into it, pip installs the other packages at one end of what
pyproject.toml allows, then at the other, with all that they require.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from bench.errors import BAD, GOOD
from bench.judge.gates import defect_of_trial
from bench.judge.loading import load
from bench.judge.trial_columns import TrialRow
from bench.plan.cell import Status
from bench.run.journal import read_manifest
from bench.run.manifest import Manifest
from studies import ROOT
from studies.versions.environment import FailedError, create, pip, run, without_folders
from studies.versions.versions_page import Smoke

OTHERS = ("lightning", "deepspeed", "transformers", "accelerate", "torchtitan")
TIMEOUT_S = 3600
"""Of an installation, which may download CUDA, and of a run."""


def smokes() -> Iterator[Smoke]:
    """One run for each pair of a torch and an end of the other packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    required = map(Requirement, [*extras["frameworks"], *extras["hf"], *extras["torchtitan"]])
    found = {
        requirement.name: ends(requirement)
        for requirement in required
        if requirement.name in ("torch", *OTHERS)
    }
    for torch in dict.fromkeys(found["torch"]):
        with tempfile.TemporaryDirectory(prefix="bench-versions-") as folder:
            python = create(Path(folder))
            for number, end in enumerate(
                dict.fromkeys(zip(*(found[name] for name in OTHERS), strict=True))
            ):
                packages = {"torch": torch, **dict(zip(OTHERS, end, strict=True))}
                yield smoke(python, packages, Path(folder) / f"run{number}")


def ends(requirement: Requirement) -> tuple[str, str]:
    """The lowest and the newest release that the requirement allows. Raises FailedError if pip finds none."""
    command = [sys.executable, "-m", "pip", "index", "versions", requirement.name, "--json"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    listed = json.loads(asked.stdout)["versions"] if asked.returncode == 0 else []
    allowed = [Version(Version(text).public) for text in requirement.specifier.filter(listed)]
    if not allowed:
        raise FailedError(f"pip finds no version of {requirement}")
    return str(min(allowed)), str(max(allowed))


def smoke(python: Path, packages: Mapping[str, str], folder: Path) -> Smoke:
    """Install the packages, and run every backend once into ``folder``; what fails is in the result."""
    about = {
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    variables = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    command = [
        str(python),
        "-m",
        "bench",
        "run",
        "--matrix",
        "smoke",
        "--quiet",
        "--out",
        str(folder),
    ]
    try:
        wanted = [f"{name}=={version}" for name, version in packages.items()]
        run(
            [*pip(python), *wanted],
            folder.parent,
            TIMEOUT_S,
            "not installed",
            {"DS_BUILD_OPS": "0"},
        )
        run(command, folder.parent, TIMEOUT_S, "not run", variables, statuses=(GOOD, BAD))
    except FailedError as failure:
        return Smoke(packages=dict(packages), result=str(failure), good=False, **about)
    manifest = read_manifest(folder)
    result, good = outcome(manifest, load(folder).tables.trial_rows)
    return Smoke(
        packages={name: manifest.packages[name] for name in packages},
        result=result,
        good=good,
        **about,
    )


def outcome(manifest: Manifest, trials: Sequence[TrialRow]) -> tuple[str, bool]:
    """How the trials of a run ended, in words, and whether none failed."""
    failed = [trial for trial in trials if trial.status is not Status.OK]
    known = [trial for trial in failed if defect_of_trial(manifest, trial)]
    words = [f"{len(trials) - len(failed)} of {len(trials)} trials ok"]
    words += [f"{len(known)} invalid by a documented defect"] if known else []
    others = [trial for trial in failed if trial not in known]
    words += [
        without_folders(f"{trial.cell.backend} {trial.status}: {trial.reason}") for trial in others
    ]
    return "; ".join(words), all(trial.status is Status.UNSUPPORTED for trial in others)
