"""An environment for one version, on top of the current one, and a probe that runs in it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Container
from importlib.metadata import version
from pathlib import Path
from typing import Any

from studies.versions.versions_page import Entry, VersionFact

EXTRAS = {"lightning": ("setuptools<81",), "deepspeed": ()}
"""Installed too: pkg_resources, which old Lightning imports without requiring it, and which setuptools 81 dropped."""
TIMEOUT_S = 600
"""Of an installation, and of a probe."""
FOLDERS = re.compile(r"(?<![\w.:/])(?:file://)?(?:/[\w.+~@-]+)+/(?=[\w.+~@-])")
"""The folders of absolute paths."""


class FailedError(Exception):
    """A version could not be installed or probed; the message goes into its row."""


def measure(package: str, number: str, folder: Path) -> Entry:
    """Install one version into the empty ``folder`` and run its probes; what fails is in the entry."""
    about: dict[str, Any] = {
        "package": package,
        "version": number,
        "torch": version("torch"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    try:
        found = probe(package, install(package, number, folder), folder)
        if found["version"] != number or not found["own"]:
            where = "" if found["own"] else " of the environment below"
            return Entry(
                **about, error=f"not probed: {found['version']}{where} was imported instead"
            )
    except FailedError as failure:
        return Entry(**about, error=str(failure))
    facts = [
        VersionFact(**fact | {"measured": without_folders(fact["measured"])})
        for fact in found["findings"]
    ]
    return Entry(
        **{**about, "torch": found["torch"], "python": found["python"]},
        departures=tuple(found["departures"]),
        findings=tuple(facts),
    )


def install(package: str, number: str, folder: Path) -> Path:
    """The interpreter of a new environment with this version, and everything else from the current environment."""
    python = create(folder)
    # --no-deps keeps torch and the other packages as they are, whatever the metadata requires; --ignore-installed,
    # because the current environment may have this very version.
    for requirement in (*EXTRAS[package], f"{package}=={number}"):
        # DeepSpeed is a source package; with its operators off, nothing is compiled.
        command = [*pip(python), "--no-deps", "--ignore-installed", requirement]
        run(command, folder, TIMEOUT_S, "not installed", {"DS_BUILD_OPS": "0"})
    return python


def create(folder: Path) -> Path:
    """The interpreter of a new environment, in which all packages of the current one can be imported."""
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
    below = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    # Read after the environment's own packages, which therefore come first.
    (packages / "below.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in below)
    )
    return folder / "bin" / "python"


def pip(python: Path) -> list[str]:
    """The command that installs into the environment of this interpreter."""
    return [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]


def probe(package: str, python: Path, folder: Path) -> dict[str, Any]:
    """What ``studies.versions.probe`` found in the environment."""
    answer = folder / "answer.json"
    command = [str(python), "-m", "studies.versions.probe", package, str(answer)]
    variables = {
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    run(command, folder, TIMEOUT_S, "not probed", variables)
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def run(
    command: list[str],
    folder: Path,
    timeout_s: float,
    failed: str,
    variables: dict[str, str],
    statuses: Container[int] = (0,),
) -> None:
    """Run a program in a folder. Raises FailedError, which begins with ``failed``, for any other exit status."""
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"{failed}: still running after {timeout_s:g} s") from None
    if done.returncode not in statuses:
        raise FailedError(f"{failed}: {last_line(done.stderr or done.stdout)}")


def last_line(output: str) -> str:
    """What went wrong, from a program's output: pip's last error or else the last line, without folders."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return without_folders((errors or lines or ["no output"])[-1])


def without_folders(text: str) -> str:
    """The text with only the last part of each absolute path."""
    return FOLDERS.sub("", text)
